"""`run`, `reduce`, `gather`, variables and loops over all replicas of all workers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from harness.training import assert_same
from keras import ops

import keras_strategies as ks

BOTH = pytest.mark.parametrize(
    "cluster", ["two", "two_by_two"], indirect=True, scope="session"
)


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


@BOTH
def test_replicas_are_numbered_over_all_workers(cluster):
    def program(strategy):
        def fn(x):
            context = ks.get_replica_context()
            assert context.num_replicas_in_sync == strategy.num_replicas_in_sync
            return x + 0.0

        first = strategy.placement.replica_counts.first
        return local(strategy, strategy.run(fn, args=(ids(strategy),))), first

    numbers = []
    for values, first in cluster(program):
        assert first == len(numbers)
        numbers += values
    assert numbers == list(range(cluster.replicas))


@BOTH
def test_devices_are_those_of_own_replicas(cluster):
    """The program of JAX for all replicas has no device names."""

    def program(strategy):
        seen = []

        def fn(x):
            context = ks.get_replica_context()
            assert "ReplicaContext" in repr(context)
            seen.append(context.devices)
            return x

        try:
            strategy.run(fn, args=(ids(strategy),))
        except ks.errors.ReplicaMismatchError as error:
            return str(error)
        return seen

    for found in cluster(program):
        if keras.backend.backend() == "jax":
            assert "`ReplicaContext.devices` differs between them" in found
        else:
            assert {name for names in found for name in names} <= {"cpu:0", "cpu:1"}


@BOTH
def test_reduce_is_over_all_replicas(cluster):
    def program(strategy):
        values = strategy.run(lambda x: x + 1.0, args=(ids(strategy),))
        return [
            float(numpy(strategy.reduce(op, values, axis=None)))
            for op in ("SUM", "MEAN", "MIN", "MAX")
        ]

    count = cluster.replicas
    expected = [count * (count + 1) / 2, (count + 1) / 2, 1, count]
    assert cluster(program) == [expected] * len(cluster(program))


@BOTH
def test_uneven_rows_are_reduced_with_the_true_denominator(cluster):
    def program(strategy):
        dataset = strategy.experimental_distribute_dataset(
            [np.arange(7, dtype="float32")]
        )
        [batch] = list(dataset)
        return [
            float(numpy(strategy.reduce(op, batch, axis=0)))
            for op in ("SUM", "MEAN", "MIN", "MAX")
        ]

    for found in cluster(program):
        assert found == [21, 3, 0, 6]


@BOTH
def test_workers_without_rows_take_no_part_in_a_minimum(cluster):
    def program(strategy):
        dataset = strategy.experimental_distribute_dataset(
            [np.asarray([5.0], "float32")]
        )
        [batch] = list(dataset)
        reduced = [strategy.reduce(op, batch, axis=0) for op in ("MIN", "MAX", "MEAN")]
        return [float(numpy(value)) for value in reduced]

    for found in cluster(program):
        assert found == [5, 5, 5]


@BOTH
def test_gather_concatenates_in_replica_order(cluster):
    def program(strategy):
        rows = np.arange(14, dtype="float32").reshape(7, 2)
        [batch] = list(strategy.experimental_distribute_dataset([rows]))
        return numpy(strategy.gather(batch, axis=0))

    for found in cluster(program):
        assert found.tolist() == np.arange(14).reshape(7, 2).tolist()


def test_gather_refuses_shapes_that_differ_elsewhere(cluster):
    def program(strategy):
        index = strategy.workers.group.index
        value = ops.zeros((2, 3 + index))
        try:
            strategy.gather(value, axis=0)
        except ks.errors.GatherError as error:
            return str(error)
        return None

    for found in cluster(program):
        assert found is not None and "[2, 3]" in found and "[2, 4]" in found


@BOTH
def test_all_reduce_and_all_gather_reach_every_replica(cluster):
    def program(strategy):
        def fn(x):
            context = ks.get_replica_context()
            return (
                context.all_reduce("SUM", x),
                context.all_reduce("MEAN", {"a": x})["a"],
                context.all_reduce("MAX", x),
                context.all_gather(ops.reshape(x, (1,)), axis=0),
            )

        found = strategy.run(fn, args=(ids(strategy),))
        return [local(strategy, value) for value in found]

    count = cluster.replicas
    total = count * (count - 1) / 2
    for sums, means, largest, gathered in cluster(program):
        assert all(float(value) == total for value in sums)
        assert all(float(value) == total / count for value in means)
        assert all(float(value) == count - 1 for value in largest)
        assert all(value.tolist() == list(range(count)) for value in gathered)


@BOTH
def test_the_gradient_of_an_all_reduce_is_the_same_all_reduce(cluster):
    def program(strategy):
        with strategy.scope():
            weight = keras.Variable(2.0)

        def fn(x):
            def loss():
                total = ks.get_replica_context().all_reduce("SUM", weight * x)
                return total * total

            return ks.value_and_grad(loss, [weight])()[1][0]

        return local(strategy, strategy.run(fn, args=(ids(strategy),)))

    count = cluster.replicas
    total = count * (count - 1) / 2
    place = 0
    for found in cluster(program):
        for gradient in found:
            # Each replica's loss is (2 total)^2, and reaches this one's term.
            assert np.allclose(gradient, place * count * 4 * total)
            place += 1


@pytest.mark.one_backend
@BOTH
@pytest.mark.parametrize(
    ("aggregation", "assigned", "added"),
    [("sum", 3, 13), ("mean", 1.5, 11.5), ("only_first_replica", 1, 11)],
)
def test_on_write_variables_agree_everywhere(cluster, aggregation, assigned, added):
    def program(strategy, aggregation):
        with strategy.scope():
            variable = keras.Variable(
                10.0, synchronization="on_write", aggregation=aggregation
            )
        values = ids(strategy)
        found = []
        for method in ("assign", "assign_add"):
            variable.assign(10.0)
            strategy.run(
                lambda x, method=method: getattr(variable, method)(x + 1),
                args=(values,),
            )
            found.append(float(numpy(variable.value)))
        return found

    if cluster.replicas == 4:
        assigned = {"sum": 10, "mean": 2.5, "only_first_replica": 1}[aggregation]
        added = assigned + 10
    for found in cluster(program, aggregation):
        assert found == [assigned, added]


@pytest.mark.one_backend
@BOTH
def test_on_read_variables_are_read_together(cluster):
    def program(strategy):
        found = []
        for aggregation in ("sum", "mean", "only_first_replica"):
            with strategy.scope():
                variable = keras.Variable(
                    0.0, synchronization="on_read", aggregation=aggregation
                )
            for _ in range(2):
                strategy.run(
                    lambda x, v=variable: v.assign_add(x + 1), args=(ids(strategy),)
                )
            found.append(float(numpy(variable.value)))
            variable.assign(8.0)
            found.append(float(numpy(variable.value)))
        return found

    total = cluster.replicas * (cluster.replicas + 1)
    for found in cluster(program):
        assert found == [total, 8, total / cluster.replicas, 8, 2, 8]


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

    if compiled:
        step = ks.function(step)
    dataset = strategy.experimental_distribute_dataset((x, y), batch_size=32)
    losses = []
    for _ in range(2):
        losses += [float(numpy(step(batch))) for batch in dataset]
    weights = {i: numpy(value) for i, value in enumerate(model.get_weights())}
    return {
        "losses": np.asarray(losses),
        "accuracy": numpy(accuracy.result()),
        "weights": weights,
    }


def loops() -> list:
    """A program and steps without one, on clusters that differ; the rest at night."""
    by_day = {("two_by_two", True)}
    if keras.backend.backend() == "tensorflow":  # Where each replica is traced.
        by_day = {("two", True)}
    if keras.backend.backend() != "jax":  # Where each operation would be a program.
        by_day.add(("two", False))
    return [
        pytest.param(
            *(name, compiled),
            id=f"{'compiled' if compiled else 'eager'}-{name}",
            marks=() if (name, compiled) in by_day else pytest.mark.nightly,
        )
        for name in ("two", "three", "two_by_two")
        for compiled in (False, True)
    ]


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.nightly(unless=["eager-two"])
@pytest.mark.parametrize(
    ("cluster", "compiled"), loops(), indirect=["cluster"], scope="session"
)
def test_the_portable_loop_equals_one_device(cluster, compiled):
    expected = loop(ks.OneDeviceStrategy("cpu:0"), compiled)
    found = cluster(loop, compiled)
    for index, results in enumerate(found):
        assert_same(expected, results, 1e-4, f"worker {index}")
        assert_same(found[0], results, 0.0, f"worker {index} beside worker 0")


@pytest.mark.one_backend
@BOTH
def test_random_layers_draw_the_masks_of_one_device(cluster):
    def program(strategy):
        with strategy.scope():
            layer = keras.layers.Dropout(0.5, seed=3)
        rows = strategy.experimental_distribute_values_from_function(
            lambda context: ops.ones((2, 64))
        )
        found = strategy.run(lambda x: layer(x, training=True), args=(rows,))
        return local(strategy, found)

    masks = np.concatenate([mask for found in cluster(program) for mask in found])
    layer = keras.layers.Dropout(0.5, seed=3)
    rows = ops.ones((2 * cluster.replicas, 64))
    one_device = ks.OneDeviceStrategy("cpu:0")
    expected = one_device.run(lambda x: layer(x, training=True), args=(rows,))
    np.testing.assert_array_equal(masks, numpy(expected))


def test_an_error_in_a_replica_keeps_its_type(cluster):
    def program(strategy):
        def fn():
            raise KeyError("of the user's")

        try:
            strategy.run(fn)
        except KeyError as error:
            return str(error)
        return None

    assert cluster(program) == ['"of the user\'s"'] * 2


@pytest.mark.one_backend
@BOTH
def test_what_run_makes_is_equal_on_all_workers_and_is_saved_by_the_chief(
    cluster, tmp_path
):
    path = str(tmp_path / "loop.ckpt")

    def program(strategy):
        layer = keras.layers.Dense(2)

        def fn(x):
            return layer(ops.reshape(x, (1, 1)))

        strategy.run(fn, args=(ids(strategy),))
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


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX warns instead")
@pytest.mark.parametrize("compiled", [False, True])
def test_replicas_exchange_sums_that_a_layer_uses_further(cluster, compiled):
    x = np.random.default_rng(3).normal(size=(7, 4)).astype("float32")

    def program(strategy):
        class Centered(keras.layers.Layer):
            def call(self, x):
                self.add_loss(ops.square(ops.sum(x[:, 0]) / ops.sum(ops.abs(x[:, 0]))))
                return x - ops.mean(x, axis=0)

        with strategy.scope():
            layer = Centered()

        def on_replica(x):
            return layer(x), layer.losses[0]

        def step(x):
            return strategy.run(on_replica, args=(x,))

        (batch,) = strategy.experimental_distribute_dataset(x, batch_size=7)
        rows, losses = (ks.function(step) if compiled else step)(batch)
        return numpy(strategy.gather(rows, 0)), local(strategy, losses)

    if compiled and keras.backend.backend() == "torch":
        pytest.skip("it compiles nothing")
    loss = np.square(x[:, 0].sum() / np.abs(x[:, 0]).sum())
    for rows, losses in cluster(program):
        np.testing.assert_allclose(rows, x - x.mean(axis=0), atol=1e-6)
        np.testing.assert_allclose(losses, loss, rtol=1e-5)
