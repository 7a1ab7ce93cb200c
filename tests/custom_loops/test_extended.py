"""`strategy.extended`: the view that scripts for `tf.distribute` use."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks


def test_colocated_variables_belong_to_the_strategy(mirrored):
    with mirrored.scope():
        first = keras.Variable(1.0)
    with mirrored.extended.colocate_vars_with(first):
        second = keras.Variable(2.0)
    assert mirrored.extended.variable_created_in_scope(second)
    with (
        pytest.raises(RuntimeError, match="was not made in the scope"),
        mirrored.extended.colocate_vars_with(keras.Variable(1.0)),
    ):
        pass


def test_reduce_to_devices(mirrored):
    values = ks.PerReplica([ops.ones((2,)), ops.ones((2,)) * 3])
    (device, *_) = mirrored.extended.worker_devices
    total = mirrored.extended.reduce_to("sum", values, device)
    np.testing.assert_array_equal(ops.convert_to_numpy(total), [4, 4])
    pairs = [(values, device), (ks.PerReplica([ops.ones(()), ops.zeros(())]), device)]
    means = mirrored.extended.batch_reduce_to(ks.ReduceOp.MEAN, pairs)
    np.testing.assert_array_equal(ops.convert_to_numpy(means[0]), [2, 2])
    assert float(means[1]) == 0.5


def test_update_in_a_merge_call_changes_the_variable_once(mirrored):
    with mirrored.scope():
        variable = keras.Variable(1.0, aggregation="mean")

    def merged(strategy, delta):
        total = strategy.reduce("SUM", delta, axis=None)
        strategy.extended.update(
            variable, lambda v, d: v.assign(v.value + d), args=(total,)
        )

    def fn():
        context = ks.get_replica_context()
        delta = ops.cast(context.replica_id_in_sync_group, "float32") + 1.0
        context.merge_call(merged, args=(delta,))

    mirrored.run(fn)
    assert float(ops.convert_to_numpy(variable)) == 4


def test_update_is_refused_on_a_replica(mirrored):
    with mirrored.scope():
        variable = keras.Variable(1.0)

    def fn():
        mirrored.extended.update(variable, lambda v: v.assign(2.0))

    with pytest.raises(RuntimeError, match=r"extended\.update.*replica context"):
        mirrored.run(fn)
