"""TensorFlow's documented examples of `tf.distribute.Strategy`, with their results."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend


def numbers(value):
    return [np.asarray(ops.convert_to_numpy(part)).tolist() for part in value.values]


def from_function(strategy, fn):
    return strategy.experimental_distribute_values_from_function(
        lambda context: ops.convert_to_tensor(fn(context))
    )


def test_scope(mirrored):
    """`Strategy.scope`: cross-replica inside, the default replica outside."""
    assert ks.get_replica_context() is not None and not ks.has_strategy()
    with mirrored.scope():
        assert ks.get_strategy() is mirrored
        assert ks.in_cross_replica_context()
        variable = keras.Variable(1.0)
    assert mirrored.extended.variable_created_in_scope(variable)
    assert not mirrored.extended.variable_created_in_scope(keras.Variable(1.0))


def test_run_with_a_distributed_input(mirrored):
    """`Strategy.run`: `tensor_input * num_replicas_in_sync`."""
    tensor_input = from_function(mirrored, lambda context: np.float32(3))

    def replica_fn(value):
        return value * ks.get_replica_context().num_replicas_in_sync

    assert numbers(mirrored.run(replica_fn, args=(tensor_input,))) == [6, 6]


def test_values_from_function(mirrored):
    """`experimental_distribute_values_from_function`: constants, and by replica."""
    same = mirrored.experimental_distribute_values_from_function(lambda context: 1.0)
    assert mirrored.experimental_local_results(same) == (1.0, 1.0)
    array = np.array([3.0, 2.0, 1.0])
    own = mirrored.experimental_distribute_values_from_function(
        lambda context: array[context.replica_id_in_sync_group]
    )
    assert mirrored.experimental_local_results(own) == (3.0, 2.0)
    counts = mirrored.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    assert mirrored.experimental_local_results(counts) == (2, 2)


def test_reduce(mirrored):
    """`Strategy.reduce`: [0, 1] sums to 1; a sum along an axis; MEAN's denominator."""
    ids = from_function(mirrored, lambda c: np.float32(c.replica_id_in_sync_group))
    assert float(mirrored.reduce("SUM", ids, axis=None)) == 1
    rows = ks.PerReplica(
        [ops.convert_to_tensor(np.arange(4, dtype="float32") + i) for i in (0, 4)]
    )
    assert float(mirrored.reduce(ks.ReduceOp.SUM, rows, axis=0)) == 28
    uneven = ks.PerReplica(
        [ops.convert_to_tensor(np.array(p, "float32")) for p in ([1, 2, 3, 4], [5])]
    )
    assert float(mirrored.reduce("MEAN", uneven, axis=0)) == 3


def test_gather(mirrored):
    """`Strategy.gather`: [[1], [2], [3]] twice, one below the other."""
    value = from_function(mirrored, lambda context: np.array([[1], [2], [3]]))
    gathered = ops.convert_to_numpy(mirrored.gather(value, axis=0))
    assert gathered.tolist() == [[1], [2], [3], [1], [2], [3]]
    wide = ops.convert_to_numpy(mirrored.gather(value, axis=1))
    assert wide.tolist() == [[1, 1], [2, 2], [3, 3]]


def test_all_reduce_of_a_structure(mirrored):
    """`ReplicaContext.all_reduce`: 1 and [2, 2] sum to 2 and [4, 4]."""
    one = from_function(mirrored, lambda context: np.float32(1))

    def step_fn(value):
        context = ks.get_replica_context()
        given = {"a": value, "b": [value * 2, value * 2]}
        found = context.all_reduce("SUM", given)
        return found["a"] + 0, found["b"][0] + 0

    a, b = mirrored.run(step_fn, args=(one,))
    assert numbers(a) == [2, 2]
    assert numbers(b) == [4, 4]


@pytest.mark.parametrize("axis, shape", [(0, (4, 3)), (1, (2, 6))])
def test_all_gather(mirrored, axis, shape):
    """`ReplicaContext.all_gather`: concatenates along any axis."""
    value = from_function(mirrored, lambda context: np.ones((2, 3), "float32"))

    def gather_value(value):
        return ks.get_replica_context().all_gather(value, axis=axis) * 1

    found = mirrored.run(gather_value, args=(value,))
    assert [np.shape(part) for part in numbers(found)] == [shape, shape]


def test_merge_call(mirrored):
    """`ReplicaContext.merge_call`: its function sees all replicas' values."""
    value = from_function(mirrored, lambda c: np.float32(c.replica_id_in_sync_group))

    def merge_fn(strategy, value):
        return strategy.reduce("SUM", value, axis=None)

    def replica_fn(value):
        return ks.get_replica_context().merge_call(merge_fn, args=(value,)) + 0

    assert numbers(mirrored.run(replica_fn, args=(value,))) == [1, 1]


def test_compute_average_loss(mirrored):
    """`tf.nn.compute_average_loss`: [1..5] of a global batch of 10 is 1.5."""
    loss = np.array([1, 2, 3, 4, 5], "float32")
    assert float(ks.compute_average_loss(loss, global_batch_size=10)) == 1.5
    weighted = ks.compute_average_loss(
        loss, sample_weight=np.full(5, 2, "float32"), global_batch_size=10
    )
    assert float(weighted) == 3


def test_the_distributed_custom_loop(mirrored):
    """The guide's loop: one feature of ones to labels of ones, batches of 10."""
    x = np.ones((100, 1), "float32")

    with mirrored.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
    dataset = mirrored.experimental_distribute_dataset((x, x), batch_size=10)

    def train_step(features, labels):
        def loss_fn():
            error = (model(features) - labels)[:, 0] ** 2
            return ks.compute_average_loss(error, global_batch_size=10)

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(loss_fn, variables)()
        optimizer.apply(gradients, variables)
        return loss

    @ks.function
    def distributed_train_step(batch):
        losses = mirrored.run(train_step, args=batch)
        return mirrored.reduce("SUM", losses, axis=None)

    losses = [float(distributed_train_step(batch)) for batch in dataset]
    assert len(losses) == 10
    assert losses[-1] < 1e-2 * losses[0]
    # With x = y = 1 each step scales the error by 1 - 2 * 0.1 * (1 + 1).
    np.testing.assert_allclose(losses[1] / losses[0], 0.6**2, rtol=1e-4)
