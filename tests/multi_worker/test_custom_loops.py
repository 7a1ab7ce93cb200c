"""`run`, `reduce`, `gather`, variables and loops over all replicas of all workers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from harness.training import assert_same
from keras import ops
from multi_worker.clusters import ALL, on_clusters, one_device
from test_float8 import assert_equal, fitted, looped

import keras_strategies as ks

BACKEND = keras.backend.backend()
BOTH = on_clusters("two", "two_by_two")


def numpy(value):
    return np.asarray(ops.convert_to_numpy(value))


def local(strategy, value):
    return [numpy(part) for part in strategy.experimental_local_results(value)]


def ids(strategy):
    """A value of each replica: its number as a float."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: ops.convert_to_tensor(
            np.float32(context.replica_id_in_sync_group)
        )
    )


def batch_of(strategy, rows):
    [batch] = strategy.experimental_distribute_dataset([rows])
    return batch


#: The reductions of seven rows, of which workers have 4 and 3, and of a single row.
REDUCED = {
    (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0): [21, 3, 0, 6],
    (5.0,): [5, 5, 5, 5],
}


@BOTH
def test_reduce_is_over_all_replicas_with_the_true_denominator(cluster):
    def program(strategy):
        values = strategy.run(lambda x: x + 1.0, args=(ids(strategy),))
        batches = [batch_of(strategy, np.array(each, "float32")) for each in REDUCED]
        return [
            [float(numpy(strategy.reduce(op, value, axis=axis)))]
            for value, axis in ((values, None), *((batch, 0) for batch in batches))
            for op in ("SUM", "MEAN", "MIN", "MAX")
        ]

    count = cluster.replicas
    expected = [count * (count + 1) / 2, (count + 1) / 2, 1, count]
    for found in cluster(program):
        assert np.ravel(found).tolist() == [*expected, *np.ravel([*REDUCED.values()])]


@BOTH
def test_gather_concatenates_in_replica_order(cluster):
    rows = np.arange(14, dtype="float32").reshape(7, 2)

    def program(strategy):
        with pytest.raises(ks.errors.GatherError, match=r", 3\].*, 4\]"):
            strategy.gather(ops.zeros((2, 3 + strategy.workers.group.index)), axis=0)
        return numpy(strategy.gather(batch_of(strategy, rows), axis=0))

    for found in cluster(program):
        np.testing.assert_array_equal(found, rows)


@BOTH
def test_collectives_reach_every_replica_and_have_gradients(cluster):
    def program(strategy):
        with strategy.scope():
            weight = keras.Variable(2.0)

        def fn(x):
            context = ks.get_replica_context()

            def loss():
                return context.all_reduce("SUM", weight * x) ** 2

            return (
                context.all_reduce("SUM", x),
                context.all_reduce("MEAN", {"a": x})["a"],
                context.all_reduce("MAX", x),
                context.all_gather(ops.reshape(x, (1,)), axis=0),
                ks.value_and_grad(loss, [weight])()[1][0],
            )

        found = strategy.run(fn, args=(ids(strategy),))
        return [local(strategy, value) for value in found]

    count, place = cluster.replicas, 0
    total = count * (count - 1) / 2
    for sums, means, largest, gathered, gradients in cluster(program):
        assert all(float(value) == total for value in sums)
        assert all(float(value) == total / count for value in means)
        assert all(float(value) == count - 1 for value in largest)
        assert all(value.tolist() == list(range(count)) for value in gathered)
        for gradient in gradients:
            # Each replica's loss is (2 total)^2, and reaches this one's term.
            assert np.allclose(gradient, place * count * 4 * total)
            place += 1


@pytest.mark.one_backend
@BOTH
@pytest.mark.parametrize("aggregation", ["sum", "mean", "only_first_replica"])
def test_variables_agree_everywhere(cluster, aggregation):
    def program(strategy, aggregation):
        with strategy.scope():
            written, read = (
                keras.Variable(10.0, synchronization=when, aggregation=aggregation)
                for when in ("on_write", "on_read")
            )
        found = []
        for method in ("assign", "assign_add"):
            written.assign(10.0)
            strategy.run(
                lambda x, method=method: getattr(written, method)(x + 1),
                args=(ids(strategy),),
            )
            found.append(float(numpy(written.value)))
        read.assign(0.0)
        for _ in range(2):
            strategy.run(lambda x: read.assign_add(x + 1), args=(ids(strategy),))
        found.append(float(numpy(read.value)))
        read.assign(8.0)
        return [*found, float(numpy(read.value))]

    count = cluster.replicas
    total = count * (count + 1) / 2
    once = {"sum": total, "mean": total / count, "only_first_replica": 1}[aggregation]
    for found in cluster(program, aggregation):
        assert found == [once, 10 + once, 2 * once, 8]


def loop(strategy, compiled: bool):
    """Two epochs of a loop of one's own, 66 samples in batches of 32."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(66, 6)).astype("float32")
    y = rng.integers(0, 3, 66)
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, use_bias=False),
                keras.layers.BatchNormalization(momentum=0.8),
                keras.layers.ReLU(),
                keras.layers.Dense(3),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.5)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        loss_fn = keras.losses.SparseCategoricalCrossentropy(True, reduction=None)

    def replica_step(batch):
        x, y = batch

        def loss_of():
            outputs = model(x, training=True)
            return ks.compute_average_loss(loss_fn(y, outputs)), outputs

        (loss, outputs), gradients = ks.value_and_grad(
            loss_of, model.trainable_variables, has_aux=True
        )()
        optimizer.apply(gradients, model.trainable_variables)
        accuracy.update_state(y, outputs)
        return loss

    def step(batch):
        losses = strategy.run(replica_step, args=(batch,))
        return strategy.reduce("SUM", losses, axis=None)

    step = ks.function(step) if compiled else step
    dataset = strategy.experimental_distribute_dataset((x, y), batch_size=32)
    losses = [float(numpy(step(batch))) for _ in range(2) for batch in dataset]
    weights = {i: numpy(value) for i, value in enumerate(model.get_weights())}
    return {
        "losses": np.asarray(losses),
        "accuracy": numpy(accuracy.result()),
        "weights": weights,
    }


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.nightly(unless=["False-two"])
@ALL
@pytest.mark.parametrize("compiled", [False, True])
def test_the_portable_loop_equals_one_device(cluster, compiled):
    expected = loop(one_device(), compiled)
    found = cluster(loop, compiled)
    for index, results in enumerate(found):
        assert_same(expected, results, 1e-4, f"worker {index}")
        assert_same(found[0], results, 0.0, f"worker {index} beside worker 0")


@pytest.mark.one_backend
@BOTH
def test_what_run_makes_is_equal_on_all_workers_and_is_saved_by_the_chief(
    cluster, tmp_path
):
    path = str(tmp_path / "loop.ckpt")

    def program(strategy):
        layer = keras.layers.Dense(2)
        strategy.run(lambda x: layer(ops.reshape(x, (1, 1))), args=(ids(strategy),))
        kernel = numpy(layer.kernel)
        checkpoint = ks.Checkpoint(layer=layer)
        checkpoint.save(path)
        layer.kernel.assign(np.zeros_like(kernel))
        checkpoint.restore(path)
        return kernel, numpy(layer.kernel)

    results = list(cluster(program))
    for kernel, restored in results:
        np.testing.assert_array_equal(kernel, results[0][0])
        np.testing.assert_array_equal(restored, kernel)
    assert [file.name for file in tmp_path.iterdir()] == ["loop.ckpt"]


class Centered(keras.layers.Layer):
    def call(self, x):
        self.add_loss(ops.square(ops.sum(x[:, 0]) / ops.sum(ops.abs(x[:, 0]))))
        return x - ops.mean(x, axis=0)


# Torch compiles nothing.
@pytest.mark.skipif(BACKEND == "jax", reason="JAX warns instead")
@pytest.mark.parametrize("compiled", [False, True][: 1 + (BACKEND != "torch")])
def test_replicas_exchange_sums_that_a_layer_uses_further(cluster, compiled):
    x = np.random.default_rng(3).normal(size=(7, 4)).astype("float32")

    def program(strategy):
        with strategy.scope():
            layer = Centered()

        def step(x):
            return strategy.run(lambda x: (layer(x), layer.losses[0]), args=(x,))

        rows, losses = (ks.function(step) if compiled else step)(batch_of(strategy, x))
        return numpy(strategy.gather(rows, 0)), local(strategy, losses)

    loss = np.square(x[:, 0].sum() / np.abs(x[:, 0]).sum())
    for rows, losses in cluster(program):
        np.testing.assert_allclose(rows, x - x.mean(axis=0), atol=1e-6)
        np.testing.assert_allclose(losses, loss, rtol=1e-5)


@on_clusters("two_by_two")
def test_options_of_calls_repeat_those_of_the_workers(cluster):
    def program(strategy):
        ones = strategy.experimental_distribute_values_from_function(
            lambda context: ops.ones((2,))
        )
        seconds, devices = strategy.workers.group.timeout, ["cpu:0", "cpu:1"]
        same = ks.CommunicationOptions(bytes_per_pack=8, timeout_seconds=seconds)
        other = ks.CommunicationOptions(timeout_seconds=seconds + 1)
        nccl = ks.CommunicationOptions(implementation="NCCL")

        def fn(x, options):
            context = ks.get_replica_context()
            return context.all_reduce("sum", [x, x + 1.0], options)[1]

        found = strategy.run(fn, args=(ones, same))
        total = strategy.extended.reduce_to("mean", ones, devices, same)
        make = ks.MultiWorkerMirroredStrategy
        with pytest.raises(ValueError, match="timeout between the workers"):
            strategy.extended.reduce_to("sum", ones, "cpu:0", other)
        with pytest.raises(ValueError, match="Pass it to the first strategy"):
            make(communication_options=other)
        with pytest.raises(ValueError, match="NCCL connects GPUs"):
            make(communication_options=nccl, devices=strategy.extended.worker_devices)
        values = [*strategy.experimental_local_results(found), *total.values]
        return [ops.convert_to_numpy(value).tolist() for value in values]

    assert cluster(program) == [[[8, 8], [8, 8], [1, 1], [1, 1]]] * 2


# The last are more than two tensors of a message.
SIZES = (0, 5, 40_000_001)


def data_of(size):
    return (b"0123456" * (size // 7 + 1))[:size]


@pytest.mark.one_backend
@pytest.mark.parametrize("source", [0, 2])
@on_clusters("three")
def test_bytes_of_a_worker_arrive(cluster, source):
    def program(strategy):
        is_source, found = strategy.workers.group.index == source, []
        for data in map(data_of, SIZES):
            given = data if is_source else None
            found.append(
                strategy.workers.broadcast_bytes("a test", given, source) == data
            )
        return found

    assert cluster(program) == [[True] * len(SIZES)] * 3


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["two_by_two-looped"])
@pytest.mark.parametrize("train", [fitted, looped])
@BOTH
def test_float8_variables_are_overwritten_as_on_one_device(cluster, train) -> None:
    expected = train(one_device())
    for found in cluster(train):
        assert_equal(found, expected)
