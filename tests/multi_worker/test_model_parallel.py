"""`ModelParallelStrategy` over several workers: one grid of all their devices."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from harness.training import (
    alone,
    as_arrays,
    assert_same,
    compiled,
    fit_evaluate_predict,
)
from model_parallel import model_parallel_cases

import keras_strategies as ks

JAX = keras.backend.backend() == "jax"
TENSORFLOW = keras.backend.backend() == "tensorflow"
#: Of Torch: see `test_torch_model_parallel`.
pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="a process has one device"
)

CASES = {case.name: case for case in model_parallel_cases.CASES}
# The layout of variables, and the devices along the model axis: of one worker where it
# has as many, else of several. The case of each grid by day.
GRIDS = {
    "model_axis_in_workers": ("auto", 2, "two_by_two", "dense_weights_23"),
    "model_axis_over_workers": ("auto", 4, "two_by_two", "dense_weights_23"),
    "a_worker_for_each_part": ("auto", 2, "two", "dense_weights_23"),
    "fsdp": ("fsdp", 1, "two", "dense_bn_3"),
    "fsdp_and_model_axis": ("fsdp", 2, "two_by_two", "dense_bn_3"),
}


def crossings() -> list:
    return [
        pytest.param(
            *(name, layout_map, width, cluster),
            id=f"{grid}-{name}",
            marks=() if name == by_day else pytest.mark.nightly,
        )
        for grid, (layout_map, width, cluster, by_day) in GRIDS.items()
        for name in ("dense_weights_23", "dense_bn_3", "transformer_adam")
    ]


def cut(strategy, layout_map, width):
    """The grid of all workers, on the devices of `strategy`."""
    devices = [str(device) for device in strategy.placement.replicas]
    return ks.ModelParallelStrategy(layout_map, devices, width, min_shard_bytes=0)


def values(variables):
    return {f"{i} {v.path}": np.asarray(v) for i, v in enumerate(variables)}


def kept(variable):
    """The shapes of the parts that this worker has of a variable."""
    if TENSORFLOW:
        return [tuple(shard.shape) for shard in variable.value.by_device.values()]
    return [shard.data.shape for shard in variable.value.addressable_shards]


def elsewhere(model):
    """How many weights have parts that this worker does not have."""
    if TENSORFLOW:
        return sum(hasattr(weight.value, "checksum") for weight in model.weights)
    return sum(
        not w.value.is_fully_replicated
        and sum(
            {str(s.index): s.data.size for s in w.value.addressable_shards}.values()
        )
        < w.value.size
        for w in model.weights
    )


def train_cut(strategy, name, layout_map, width):
    case = CASES[name]
    with cut(strategy, layout_map, width).scope():
        model = compiled(case)
    script = case.script or fit_evaluate_predict
    results = script(case, model, case.make_data())
    results |= {
        "weights": values(model.weights),
        "optimizer": values(model.optimizer.variables),
    }
    return as_arrays(results), elsewhere(model)


@pytest.mark.one_backend("tensorflow")
@pytest.mark.nightly(unless=["fsdp-dense_bn_3"])
@pytest.mark.parametrize(
    ("name", "layout_map", "width", "cluster"),
    crossings(),
    indirect=["cluster"],
    scope="session",
)
def test_same_as_one_device(cluster, name, layout_map, width):
    case = CASES[name]
    found = cluster(train_cut, name, layout_map, width)
    for index, (results, _) in enumerate(found):
        assert_same(alone(case), results, case.tolerance, f"worker {index}")
    # A worker has every part where the model axis is on its own devices.
    is_within = layout_map == "auto" and width * len(found) <= cluster.replicas
    assert all((parts == 0) == is_within for _, parts in found)


def network(strategy, units=16, seed=3):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(units, "tanh"),
                keras.layers.Dropout(0.5, seed=1),
                keras.layers.Dense(4),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model, callbacks=None):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(22, 8)), rng.normal(size=(22, 4))
    model.fit(
        x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks
    )
    return values([*model.weights, *model.optimizer.variables])


@pytest.mark.one_backend
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize(
    "builds", [False, pytest.param(True, marks=pytest.mark.nightly)]
)
def test_a_worker_saves_only_its_own_parts(cluster, tmp_path, builds):
    """What each process writes is what its devices keep, also of slots."""

    def program(strategy, folder):
        own = cut(strategy, "fsdp", 1)
        model = network(own)
        fit(model)
        number = own.save_sharded(model, folder)
        expected = values([*model.weights, *model.optimizer.variables])
        shapes = kept(model.weights[0])
        other = network(own, seed=4)
        if builds:
            # Outside of the scope: these slots are no strategy's yet.
            other.optimizer.build(other.trainable_variables)
        loaded = own.load_sharded(other, folder)
        found = values([*other.weights, *other.optimizer.variables])
        on = fit(model), fit(other)
        return number, loaded, expected, found, shapes, on

    for number, loaded, expected, found, shapes, on in cluster(program, str(tmp_path)):
        assert number == loaded == 1
        assert shapes == [(8, 8)]
        for (_, a), (_, b) in zip(expected.items(), found.items(), strict=True):
            np.testing.assert_array_equal(a, b)
        for (_, a), (_, b) in zip(on[0].items(), on[1].items(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    written = [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    if TENSORFLOW:
        names = {path.name for path in written}
        assert {f"state.data-0000{i}-of-00002" for i in range(2)} <= names
    else:
        processes = {part for path in written for part in path.parts}
        assert {"ocdbt.process_0", "ocdbt.process_1"} <= processes
    # Here, with one device, all of it opens.
    strategy = ks.OneDeviceStrategy("cpu:0")
    model = network(strategy, seed=5)
    model.optimizer.build(model.trainable_variables)
    assert strategy.load_sharded(model, tmp_path) == 1
    variables = [*model.weights, *model.optimizer.variables]
    for a, b in zip(expected.values(), values(variables).values(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.one_backend("jax", "tensorflow")
def test_a_plan_has_the_memory_of_a_step_on_every_worker(cluster):
    def program(strategy):
        shapes = (64, 8), (64, 4)
        own = cut(strategy, "fsdp", 1)
        plan = own.plan(lambda: network(own, 512), shapes)
        model = network(own, 512)
        fit(model)
        return plan.peak, plan.cost.activation, own.describe(model).totals

    for peak, activation, totals in cluster(program):
        if keras.backend.backend() == "tensorflow":
            # That of the hidden layer for half of the rows.
            assert (peak, activation) == (None, 32 * 512 * 4)
        else:
            assert max(totals.values()) < peak


@pytest.mark.one_backend("jax", "tensorflow")
def test_the_ordinary_file_is_the_chiefs(cluster, tmp_path):
    def program(strategy, folder):
        model = network(cut(strategy, "fsdp", 1))
        path = f"{folder}/{{epoch}}.keras"
        fit(model, [keras.callbacks.ModelCheckpoint(path)])
        return values(model.weights)

    found = cluster(program, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.keras", "2.keras"]
    weights = keras.models.load_model(tmp_path / "2.keras").get_weights()
    for worker in found:
        for a, b in zip(weights, worker.values(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_values_that_differ_are_an_error(cluster):
    def program(strategy):
        index = strategy.workers.group.index
        model = network(cut(strategy, "fsdp", 1))
        model.layers[0].set_weights(
            [np.full(w.shape, index) for w in model.layers[0].weights]
        )
        fit(model)

    for error, _ in cluster.outcomes(program):
        assert "is sharded over the workers, but workers" in error
        assert "load_sharded" in error


def test_backups_of_the_chief_alone_are_refused(cluster, tmp_path):
    def program(strategy, folder):
        model = network(cut(strategy, "fsdp", 1))
        fit(model, [keras.callbacks.BackupAndRestore(folder)])

    for error, _ in cluster.outcomes(program, str(tmp_path)):
        assert "BackupAndRestore was given to `fit`" in error
        assert "save_sharded" in error


@pytest.mark.parametrize("cluster", ["two_by_two"], indirect=True, scope="session")
def test_a_grid_that_workers_cannot_have(cluster):
    def program(strategy):
        own = cut(strategy, "auto", 2)
        grid = own.mesh.shape, len(own.mesh.own_devices), own.num_replicas_in_sync
        spanned = cut(strategy, "auto", 4)
        if not TENSORFLOW:
            problem = "takes the devices of several workers"
            with pytest.raises(RuntimeError, match=problem):
                spanned.run(lambda: 0)
        with pytest.raises(ValueError, match="does not divide the number of devices"):
            cut(strategy, "auto", 3)
        return grid, spanned.num_replicas_in_sync, strategy.num_replicas_in_sync

    for found in cluster(program):
        # On TensorFlow each device is a replica.
        expected = ((2, 2), 2, 4), 4, 4
        assert found == (expected if TENSORFLOW else (((2, 2), 2, 2), 1, 4))


# Over the devices of one worker, and where TensorFlow's replicas gather them, of all.
LOOPS = [("two_by_two", "auto", 2, True)]
if TENSORFLOW:
    LOOPS += [
        ("two", "fsdp", 1, True),
        ("two_by_two", "auto", 4, True),
        ("two_by_two", "fsdp", 2, False),
    ]


@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.nightly(unless=["two_by_two-auto-2-True"])
@pytest.mark.parametrize(
    ("cluster", "layout_map", "width", "compiles"),
    LOOPS,
    indirect=["cluster"],
    scope="session",
)
def test_custom_loops(cluster, layout_map, width, compiles):
    # Of the second batch some replicas have no rows.
    rows = 6 if TENSORFLOW else 4

    def program(strategy, layout_map, width, compiles, rows):
        own = cut(strategy, layout_map, width)
        model = network(own)
        x = np.arange(8 * rows, dtype="float32").reshape(rows, 8) / 32

        def replica_step(rows):
            def loss_fn():
                return ks.compute_average_loss(
                    keras.ops.mean(model(rows) ** 2, axis=-1)
                )

            loss, gradients = ks.value_and_grad(loss_fn, model.trainable_variables)()
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        def step(rows):
            return own.reduce("SUM", own.run(replica_step, args=(rows,)))

        step = ks.function(step) if compiles else step
        dataset = own.make_experimental_numpy_dataset(x)
        losses = [
            float(step(rows))
            for _ in range(3)
            for rows in own.experimental_distribute_dataset(dataset.batch(4))
        ]
        return losses, values(model.weights)

    model = network(ks.OneDeviceStrategy("cpu:0"))
    expected = []
    x = np.arange(8 * rows, dtype="float32").reshape(rows, 8) / 32
    for batch in [x[:4], x[4:]][: -(-rows // 4)] * 3:

        def loss_fn():
            return keras.ops.mean(model(batch) ** 2)  # noqa: B023

        value, gradients = ks.value_and_grad(loss_fn, model.trainable_variables)()
        model.optimizer.apply(gradients, model.trainable_variables)
        expected.append(float(value))
    for losses, weights in cluster(program, layout_map, width, compiles, rows):
        np.testing.assert_allclose(losses, expected, rtol=1e-4)
        for a, b in zip(weights.values(), model.get_weights(), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not TENSORFLOW, reason="replicas of JAX are on one worker")
def test_variables_of_all_workers_in_loops_and_branches_of_run(cluster):
    kernel = np.arange(64.0, dtype="float32").reshape(8, 8)

    def program(strategy, kernel):
        own = cut(strategy, "fsdp", 1)
        with own.scope():
            weights = keras.Variable(kernel, name="kernel")
        import tensorflow as tf

        def fn():
            def loss_fn():
                _, found = tf.while_loop(
                    lambda i, _: i < 3,
                    lambda i, found: (i + 1, found + tf.reduce_sum(weights * 0.5)),
                    (0, 0.0),
                )
                return tf.cond(found > 0, lambda: found * weights[1, 1], lambda: found)

            loss, (gradient,) = ks.value_and_grad(loss_fn, [weights])()
            return loss, gradient, weights + 0.0

        found = [own.run(fn), ks.function(lambda: own.run(fn))()]
        return [
            [np.asarray(v) for v in own.experimental_local_results(each)[0]]
            for each in found
        ]

    total = 1.5 * kernel.sum()
    gradient = np.full((8, 8), 1.5 * kernel[1, 1])
    gradient[1, 1] += total
    for both in cluster(program, kernel):
        for loss, found, value in both:
            np.testing.assert_allclose(loss, total * kernel[1, 1])
            np.testing.assert_allclose(found, gradient)
            np.testing.assert_array_equal(value, kernel)
