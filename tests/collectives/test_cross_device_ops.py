"""A strategy's `CrossDeviceOps`, and what is refused."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks

DEVICES = ["cpu:0", "cpu:1"]


def numpy(value):
    return ops.convert_to_numpy(value)


def test_the_same_gradient_on_all_replicas_counts_for_each() -> None:
    for given in (None, ks.NcclAllReduce()):
        strategy = ks.MirroredStrategy(DEVICES, given)
        with strategy.scope():
            variable = keras.Variable(1.0)
            optimizer = keras.optimizers.SGD(1.0)
        gradient = ops.convert_to_tensor(0.25)
        strategy.run(lambda o=optimizer, v=variable, g=gradient: o.apply([g], [v]))
        assert float(numpy(variable)) == 0.5


#: A reduction of the user's.
Own = type("Own", (ks.NcclAllReduce,), {})
#: In place of tf.distribute's own, which JAX and Torch do not have.
MODULE = "tensorflow.python.distribute.cross_device_ops"
Foreign = type("Foreign", (), {"__module__": MODULE})


@pytest.mark.parametrize(
    "given, match",
    [
        ("nccl", r"Use ks\.NcclAllReduce\(\).*'nccl' of type str"),
        (ks.ReduceOp.SUM, "ReduceOp.SUM"),
        (ks.NcclAllReduce, r"an instance: NcclAllReduce\(\)"),
        (Foreign(), "It is tf.distribute's"),
        (Own(), r"own engine reduces.*merge_call"),
    ],
)
def test_what_is_none_is_refused_at_once(given, match) -> None:
    with pytest.raises(TypeError, match=match):
        ks.MirroredStrategy(DEVICES, cross_device_ops=given)
    with pytest.raises(TypeError, match=r"`accumulation_fn` must be None.*merge_call"):
        ks.ReductionToOneDevice(None, lambda tensors: tensors[0])


def test_options_of_a_call() -> None:
    value = ks.PerReplica([np.ones((4,), "float32")] * 2)
    packs = ks.CommunicationOptions(bytes_per_pack=16)
    kind = ks.ReductionToOneDevice()
    for result in kind.batch_reduce("sum", [(value, "cpu:0")] * 3, options=packs):
        np.testing.assert_array_equal(numpy(result), [2] * 4)
    with pytest.raises(ValueError, match="CommunicationOptions"):
        kind.reduce("sum", value, "cpu:0", options="fast")
    nccl = ks.CommunicationOptions(implementation="nccl")
    with pytest.raises(ValueError, match="chosen when they connected"):
        kind.reduce("sum", value, "cpu:0", options=nccl)


def test_options_in_replica_context(mirrored) -> None:
    def fn(options):
        context = ks.get_replica_context()
        pair = [ops.ones((2,)), ops.ones((3,))]
        return context.all_reduce("sum", pair, options)

    first, second = mirrored.run(fn, args=(ks.CommunicationOptions(bytes_per_pack=8),))
    np.testing.assert_array_equal(numpy(first.values[1]), [2, 2])
    np.testing.assert_array_equal(numpy(second.values[0]), [2, 2, 2])
    with pytest.raises(ValueError, match="chosen when they connected"):
        mirrored.run(fn, args=(ks.CommunicationOptions(implementation="ring"),))

    def gather(options):
        return ks.get_replica_context().all_gather(ops.ones((1,)), 0, options)

    mirrored.run(gather, args=(ks.CommunicationOptions(timeout_seconds=3),))
