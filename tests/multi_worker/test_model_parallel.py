"""`ModelParallelStrategy` over several workers: one grid of all their devices."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from harness.training import (
    alone,
    as_arrays,
    assert_arrays,
    assert_workers,
    compiled,
    fit_evaluate_predict,
)
from keras import layers
from model_parallel import model_parallel_cases
from multi_worker import shards
from multi_worker.clusters import model_parallel, on_clusters, one_device, with_clusters

import keras_strategies as ks

BACKEND = keras.backend.backend()
TENSORFLOW, TORCH = BACKEND == "tensorflow", BACKEND == "torch"

CASES = {case.name: case for case in model_parallel_cases.CASES}
# The layout of variables, and the devices along the model axis: of one worker where it
# has as many, else of several. On Torch each worker has one.
GRIDS = {
    "a_worker_for_each_part": ("auto", 2, "two"),
    "fsdp": ("fsdp", 1, "two"),
    **(
        {
            "copies": ("auto", 1, "two"),
            "two_by_two": ("auto", 2, "four"),
            "fsdp_and_model_axis": ("fsdp", 2, "four"),
        }
        if TORCH
        else {
            "model_axis_in_workers": ("auto", 2, "two_by_two"),
            "model_axis_over_workers": ("auto", 4, "two_by_two"),
            "fsdp_and_model_axis": ("fsdp", 2, "two_by_two"),
        }
    ),
}
TRAINED = [*CASES] if TORCH else ["dense_weights_23", "dense_bn_3", "transformer_adam"]
BY_DAY = ["fsdp-dense_bn_3"]
if TORCH:
    BY_DAY = ["copies-global_clipnorm_ema", "fsdp-accumulation", "fsdp-eager"]


def values(variables):
    return {f"{i} {v.path}": np.asarray(v) for i, v in enumerate(variables)}


def state(model):
    return values([*model.weights, *model.optimizer.variables])


def elsewhere(model):
    """How many weights have parts that this worker does not have."""
    if TORCH:
        return sum(type(w.value).__name__ == "DTensor" for w in model.weights)
    if TENSORFLOW:
        return sum(hasattr(weight.value, "gather") for weight in model.weights)
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
    with model_parallel(layout_map, width, strategy).scope():
        model = compiled(case)
    script = case.script or fit_evaluate_predict
    results = script(case, model, case.make_data())
    state = {"weights": model.weights, "optimizer": model.optimizer.variables}
    results |= {name: values(variables) for name, variables in state.items()}
    return as_arrays(results), elsewhere(model)


@pytest.mark.one_backend("tensorflow", "torch")
@pytest.mark.nightly(unless=BY_DAY)
@with_clusters(
    "name layout_map width cluster",
    [
        pytest.param(name, *grid, id=f"{grid_name}-{name}")
        for grid_name, grid in GRIDS.items()
        for name in TRAINED
    ],
)
def test_same_as_one_device(cluster, name, layout_map, width):
    case = CASES[name]
    found = cluster(train_cut, name, layout_map, width)
    assert_workers(alone(case), [results for results, _ in found], case.tolerance)
    # A worker has every part where the model axis is on its own devices.
    is_within = layout_map == "auto" and width <= cluster.devices
    assert all((parts == 0) == is_within for _, parts in found)


def network(strategy, seed=3):
    # On Torch, random numbers after a checkpoint are others.
    rate = 0.0 if TORCH else 0.5
    return shards.network(strategy, seed, lambda: layers.Dropout(rate, seed=1))


def fit(model, callbacks=None):
    shards.fit(model, callbacks)
    return state(model)


@pytest.mark.skipif(TENSORFLOW, reason="it has no sharded checkpoints")
@pytest.mark.one_backend("jax", "torch")
@pytest.mark.slow(seconds=6)
@pytest.mark.nightly(unless=["two-fsdp-1-False", "two-auto-2-False"])
@pytest.mark.parametrize(
    ("layout_map", "width", "builds"),
    [("fsdp", 1, False), ("fsdp", 1, True), ("auto", 2, False)],
)
def test_a_worker_saves_only_its_own_parts(
    cluster, tmp_path, layout_map, width, builds
):
    """What each process writes is what its devices keep, also of slots.

    A checkpoint is loaded into shards of the same or of another layout.
    """

    def program(strategy, folder):
        own, others = (
            model_parallel("fsdp", 1, strategy),
            model_parallel(layout_map, width, strategy),
        )
        model, other = network(own), network(others, seed=4)
        # The ordinary file is the chief's.
        fit(model, [keras.callbacks.ModelCheckpoint(f"{folder}/{{epoch}}.keras")])
        numbers = [own.save_sharded(model, f"{folder}/sharded")]
        if builds:
            # Outside of the scope: these slots are no strategy's yet.
            other.optimizer.build(other.trainable_variables)
        expected = state(model)
        numbers.append(others.load_sharded(other, f"{folder}/sharded"))
        return numbers, expected, state(other), fit(model), fit(other)

    for numbers, expected, found, on, others_on in cluster(program, str(tmp_path)):
        assert numbers == [1, 1]
        assert_arrays(found.values(), expected.values())
        assert_arrays(on.values(), others_on.values(), 1e-5, 1e-7)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("1.keras", "2.keras", "sharded")
    }
    written = [p for p in (tmp_path / "sharded" / "1").rglob("*") if p.is_file()]
    names = {part for path in written for part in path.parts}
    files = {"jax": "ocdbt.process_{}", "torch": "__{}_0.distcp"}[BACKEND]
    assert {files.format(i) for i in range(2)} <= names
    if TORCH:
        sizes = [p.stat().st_size for p in written if p.suffix == ".distcp"]
        assert max(sizes) < 0.7 * sum(sizes)
    # Here, with one device, all of it opens.
    strategy = one_device()
    model = network(strategy, seed=5)
    model.optimizer.build(model.trainable_variables)
    assert strategy.load_sharded(model, tmp_path / "sharded") == 1
    assert_arrays(state(model).values(), expected.values())
    ordinary = keras.models.load_model(tmp_path / "2.keras").get_weights()
    assert_arrays(ordinary, list(expected.values())[: len(ordinary)])


def other_values(strategy, folder):
    model = network(model_parallel("fsdp", 1, strategy))
    first, index = model.layers[0], strategy.workers.group.index
    first.set_weights([np.full(w.shape, index) for w in first.weights])
    fit(model)


def sharded_checkpoint(strategy, folder):
    own = model_parallel("fsdp", 1, strategy)
    own.save_sharded(network(own), folder)


def backup(strategy, folder):
    model = network(model_parallel("fsdp", 1, strategy))
    fit(model, [keras.callbacks.BackupAndRestore(folder)])


# On Torch, the chief's values count.
@pytest.mark.parametrize(
    ("program", "texts"),
    [
        (other_values, ("is sharded over the workers, but workers", "load_sharded")),
        (backup, ("BackupAndRestore was given to `fit`", "save_sharded")),
        (sharded_checkpoint, ("are not supported", "Use `model.save_weights` on")),
    ][TORCH : None if TENSORFLOW else -1],
)
def test_what_sharded_variables_refuse(cluster, tmp_path, program, texts):
    for error, _ in cluster.outcomes(program, str(tmp_path)):
        assert all(text in error for text in texts), error


@pytest.mark.skipif(TORCH, reason="a process has one device")
@on_clusters("two_by_two")
def test_a_grid_that_workers_cannot_have(cluster):
    def program(strategy):
        own = model_parallel("auto", 2, strategy)
        grid = own.mesh.shape, len(own.mesh.own_devices), own.num_replicas_in_sync
        spanned = model_parallel("auto", 4, strategy)
        if not TENSORFLOW:
            problem = "takes the devices of several workers"
            with pytest.raises(RuntimeError, match=problem):
                spanned.run(lambda: 0)
        with pytest.raises(ValueError, match="does not divide the number of devices"):
            model_parallel("auto", 3, strategy)
        return grid, spanned.num_replicas_in_sync

    for found in cluster(program):
        # On TensorFlow each device is a replica.
        assert found == ((((2, 2), 2, 4), 4) if TENSORFLOW else (((2, 2), 2, 2), 1))


# Over the devices of one worker, and where replicas gather them, of all.
LOOPS = {
    "jax": [("two_by_two", "auto", 2, True)],
    "torch": [("two", "fsdp", 1, False), ("two", "auto", 2, False)],
    "tensorflow": [
        ("two_by_two", "auto", 2, True),
        ("two", "fsdp", 1, True),
        ("two_by_two", "auto", 4, True),
        ("two_by_two", "fsdp", 2, False),
    ],
}[BACKEND]
#: The last batch has one row fewer than replicas, or does not divide.
ROWS = {"jax": 4, "torch": 7, "tensorflow": 6}[BACKEND]


def looped(own, is_compiled):
    """Losses and weights; gradients are clipped by the norm of all of them."""
    model = network(own)
    with own.scope():
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse")
    x = np.arange(8 * ROWS, dtype="float32").reshape(ROWS, 8) / 32

    def replica_step(rows):
        def loss_fn():
            return ks.compute_average_loss(keras.ops.mean(model(rows) ** 2, axis=-1))

        loss, gradients = ks.value_and_grad(loss_fn, model.trainable_variables)()
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    def step(rows):
        return own.reduce("SUM", own.run(replica_step, args=(rows,)))

    step = ks.function(step) if is_compiled else step
    dataset = own.make_experimental_numpy_dataset(x)
    losses = [
        float(step(rows))
        for _ in range(3)
        for rows in own.experimental_distribute_dataset(dataset.batch(4))
    ]
    return as_arrays({"losses": losses, "weights": values(model.weights)})


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["two_by_two-auto-2-True", "two-fsdp-1-False"])
@with_clusters("cluster layout_map width is_compiled", LOOPS)
def test_custom_loops(cluster, layout_map, width, is_compiled):
    def program(strategy):
        return looped(model_parallel(layout_map, width, strategy), is_compiled)

    assert_workers(looped(one_device(), is_compiled), cluster(program), 1e-4)
