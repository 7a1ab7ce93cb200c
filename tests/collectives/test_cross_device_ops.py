"""A strategy's own `CrossDeviceOps`: where it is used, and what is refused."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks

DEVICES = ["cpu:0", "cpu:1"]
own_ops = pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="refused on JAX, see test_jax_takes_the_classes_of_this_package",
)
RNG = np.random.default_rng(3)
X = RNG.normal(size=(7, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class ByReduce(ks.CrossDeviceOps):
    """Counts, and multiplies what it reduces by a factor."""

    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.factor = factor
        self.reduced: list[tuple[ks.ReduceOp, int, tuple[str, ...]]] = []

    def reduce_implementation(self, reduce_op, value, destinations, options):
        size = 4 * int(np.prod(value.values[0].shape))
        self.reduced.append((reduce_op, size, destinations))
        return scaled(
            super().reduce_implementation(reduce_op, value, destinations, options),
            self.factor,
        )


class OnlyBatch(ks.CrossDeviceOps):
    def __init__(self, factor: float):
        self.factor = factor

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        found = super().batch_reduce_implementation(reduce_op, pairs, options)
        return [scaled(result, self.factor) for result in found]


class OnlyBroadcast(ks.CrossDeviceOps):
    def __init__(self, factor: float):
        self.factor = factor

    def broadcast_implementation(self, tensor, destinations):
        return scaled(
            super().broadcast_implementation(tensor, destinations), self.factor
        )


class OfNccl(ks.NcclAllReduce):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def reduce_implementation(self, reduce_op, value, destinations, options):
        result = super().reduce_implementation(reduce_op, value, destinations, options)
        return scaled(result, self.factor)


class Misnamed(ks.NcclAllReduce):
    def reduce(self, reduce_op, per_replica_value, destinations, options=None):
        return 2.0


def scaled(result, factor):
    if isinstance(result, ks.DistributedValues):
        return ks.Mirrored([value * factor for value in result.values])
    return result * factor


def numpy(value):
    return ops.convert_to_numpy(value)


def make_model():
    keras.utils.set_random_seed(5)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(3, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def fitted(strategy, rows=5, learning_rate=0.1):
    """Weights after a batch of 4 rows and one of 1, which is fewer than replicas."""
    with strategy.scope():
        model = make_model()
    model.optimizer.learning_rate = learning_rate
    model.fit(X[:rows], Y[:rows], batch_size=4, shuffle=False, verbose=0)
    return [numpy(variable) for variable in model.trainable_variables]


def stepped(strategy, rows=5, learning_rate=0.1):
    """Weights after the same batches, in a custom loop."""
    with strategy.scope():
        model = make_model()
    model.optimizer.learning_rate = learning_rate

    def step(x, y):
        def loss():
            return ops.sum(ops.square(model(x, training=True) - y)) / 4

        _, gradients = ks.value_and_grad(loss, model.trainable_variables)()
        model.optimizer.apply(gradients, model.trainable_variables)

    for batch in strategy.experimental_distribute_dataset(
        (X[:rows], Y[:rows]), batch_size=4
    ):
        strategy.run(step, args=batch)
    return [numpy(variable) for variable in model.trainable_variables]


@functools.cache
def expected(train, *arguments):
    """The weights of one device."""
    return train(ks.OneDeviceStrategy("cpu:0"), *arguments)


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def own_value(strategy, *values):
    return strategy.experimental_distribute_values_from_function(
        lambda context: ops.convert_to_tensor(
            values[context.replica_id_in_sync_group], dtype="float32"
        )
    )


@pytest.mark.nightly(unless=["stepped"])
@own_ops
@pytest.mark.parametrize("train", [fitted, stepped])
def test_gradients_are_reduced_by_it(train) -> None:
    counting = ByReduce()
    found = train(ks.MirroredStrategy(DEVICES, counting))
    assert_close(found, expected(train))
    sums = [size for op, size, _ in counting.reduced if op is ks.ReduceOp.SUM]
    assert {size for size in sums if size} >= {4 * 12, 4 * 3, 4}
    # A wrong one shows in the weights: twice the gradients.
    wrong = train(ks.MirroredStrategy(DEVICES, ByReduce(2.0)))
    assert_close(wrong, expected(train, 5, 0.2))


@pytest.mark.one_backend("torch")
@own_ops
@pytest.mark.parametrize("kind", [ByReduce, OnlyBatch, OnlyBroadcast, OfNccl])
def test_one_overridden_method_is_used_everywhere(kind) -> None:
    strategy = ks.MirroredStrategy(DEVICES, kind(2.0))
    value = own_value(strategy, 1.0, 3.0)
    assert float(strategy.reduce("sum", value)) == 8
    assert float(strategy.reduce("max", value)) == 6
    assert float(strategy.extended.reduce_to("mean", value, "cpu:0")) == 4
    several = strategy.extended.reduce_to("sum", value, DEVICES)
    assert [float(each) for each in several.values] == [8, 8]

    def fn(own):
        context = ks.get_replica_context()
        return context.all_reduce("sum", {"a": own, "b": own})

    found = strategy.run(fn, args=(value,))
    assert [float(each) for each in found["b"].values] == [8, 8]
    assert_close(fitted(strategy, 4), expected(fitted, 4, 0.2))


@own_ops
def test_an_all_reduce_has_its_gradient_reduced_by_it() -> None:
    strategy = ks.MirroredStrategy(DEVICES, ByReduce(2.0))
    with strategy.scope():
        variable = keras.Variable(3.0)

    def fn():
        def loss():
            return ks.get_replica_context().all_reduce("sum", variable * 1.0)

        (gradient,) = ks.value_and_grad(loss, [variable])()[1]
        return gradient

    found = strategy.run(fn)
    assert [float(each) for each in found.values] == [4, 4]


@own_ops
def test_a_mean_along_an_axis_counts_elements_by_itself() -> None:
    strategy = ks.MirroredStrategy(DEVICES, ByReduce(2.0))
    value = own_value(strategy, [1.0], [2.0, 3.0])
    assert float(strategy.reduce("mean", value, axis=0)) == 4


@own_ops
def test_the_same_gradient_on_all_replicas_counts_for_each() -> None:
    for given in (None, ks.NcclAllReduce()):
        strategy = ks.MirroredStrategy(DEVICES, given)
        with strategy.scope():
            variable = keras.Variable(1.0)
            optimizer = keras.optimizers.SGD(1.0)
        gradient = ops.convert_to_tensor(0.25)
        strategy.run(lambda o=optimizer, v=variable, g=gradient: o.apply([g], [v]))
        assert float(numpy(variable)) == 0.5


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "kind",
    [
        ks.ReductionToOneDevice,
        ks.HierarchicalCopyAllReduce,
        pytest.param(ks.NcclAllReduce, marks=pytest.mark.nightly),  # `OfNccl` above.
    ],
)
def test_the_classes_of_this_package_compute_what_one_device_does(kind) -> None:
    found = fitted(ks.MirroredStrategy(DEVICES, kind()))
    assert_close(found, expected(fitted))


class Foreign:
    """In place of tf.distribute's own, which JAX and Torch do not have."""


Foreign.__module__ = "tensorflow.python.distribute.cross_device_ops"


@pytest.mark.parametrize(
    "given, match",
    [
        ("nccl", r"Use ks\.NcclAllReduce\(\).*'nccl' of type str"),
        (ks.ReduceOp.SUM, "ReduceOp.SUM"),
        (ks.NcclAllReduce, r"an instance: NcclAllReduce\(\)"),
        (Foreign(), "in place of tf.distribute's"),
        (Misnamed(), r"Misnamed\.reduce.*Override `reduce_implementation`"),
    ],
)
def test_what_is_none_is_refused_at_once(given, match) -> None:
    with pytest.raises(TypeError, match=match):
        ks.MirroredStrategy(DEVICES, cross_device_ops=given)


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="JAX only")
@pytest.mark.parametrize(
    "given", [ByReduce(), ks.ReductionToOneDevice(None, lambda tensors: tensors[0])]
)
def test_jax_takes_the_classes_of_this_package(given) -> None:
    with pytest.raises(RuntimeError, match="XLA inserts"):
        ks.MirroredStrategy(DEVICES, cross_device_ops=given)
    assert float(given.reduce("sum", ks.PerReplica([2.0]), "cpu:0")) == 2


class Forgetful(ks.CrossDeviceOps):
    def reduce_implementation(self, reduce_op, value, destinations, options):
        value.values[0]


def test_an_implementation_that_returns_nothing_is_named() -> None:
    value = ks.PerReplica([1.0, 2.0])
    with pytest.raises(ValueError, match=r"Forgetful\.reduce_impl.*returned: None"):
        Forgetful().reduce("sum", value, "cpu:0")


def test_options_of_a_call() -> None:
    value = ks.PerReplica([np.ones((4,), "float32")] * 2)
    packs = ks.CommunicationOptions(bytes_per_pack=16)
    kind = ks.ReductionToOneDevice()
    pairs = [(value, "cpu:0")] * 3
    for result in kind.batch_reduce("sum", pairs, options=packs):
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


@own_ops
def test_gradients_of_looked_up_rows_are_reduced_by_it() -> None:
    ids = np.array([[0, 1], [1, 1], [2, 0], [3, 3], [0, 4]])

    def train(strategy, learning_rate):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((2,), dtype="int32"), keras.layers.Embedding(6, 3)]
            )
            model.compile(keras.optimizers.SGD(learning_rate), "mse")
        model.fit(ids, np.ones((5, 2, 3)), batch_size=5, verbose=0)
        return [numpy(model.trainable_variables[0])]

    found = train(ks.MirroredStrategy(DEVICES, ByReduce(2.0)), 0.1)
    assert_close(found, train(ks.OneDeviceStrategy("cpu:0"), 0.2))
