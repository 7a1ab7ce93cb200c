"""A custom loop over a `DataLoader` reads own rows, and gets those of one device."""

from __future__ import annotations

import itertools
import random
from typing import Any

import keras
import numpy as np
import pytest
import torch
from harness.worker_pool import WorkerPool
from multi_worker.loaders import BATCH, ROWS, Noisy, Rows, X, forks, loader

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

ALL = pytest.mark.parametrize(
    "cluster", ["two", "three", "two_by_two"], indirect=True, scope="session"
)
#: Passes over the loader, and steps of each.
PASSES, STEPS = 3, 5


def looped(
    strategy: Any,
    kind: str,
    spec_by: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
    spec_in: int = 1,
) -> tuple[list[Any], int, list[float]]:
    """The rows of this worker in each step, how many were read, and draws after it.

    Args:
        strategy: the strategy.
        kind: of `Noisy`, or "rows".
        spec_by: the workers that read the specification.
        options: those of the loader.
        spec_in: the pass before which they do.
    """
    keras.utils.set_random_seed(5)
    torch.manual_seed(5)
    dataset: Any = Rows() if kind == "rows" else Noisy(kind)
    batches = strategy.experimental_distribute_dataset(
        loader(dataset, **(options or {}))
    )
    index = 0 if strategy.workers is None else strategy.workers.group.index
    steps = []
    for i in range(PASSES):
        if i == spec_in and index in spec_by:
            assert keras.tree.flatten(batches.element_spec)
        for batch in batches:
            local = strategy.experimental_local_results(batch)
            parts = zip(*[map(np.asarray, each) for each in local], strict=True)
            steps.append([np.concatenate(each) for each in parts])
    draws = [random.random(), np.random.rand(), float(torch.rand(()))]
    return steps, len(dataset.read), draws


def check(alone: Any, every: list[Any]) -> None:
    """Workers have the rows of one device, and draw its numbers after the loop."""
    expected, _, draws = alone
    assert len(expected) == PASSES * STEPS
    for found, _, own in every:
        assert len(found) == len(expected)
        assert own == draws
    for step, whole in enumerate(expected):
        for i, rows in enumerate(whole):
            joined = np.concatenate([found[step][i] for found, _, _ in every])
            np.testing.assert_array_equal(joined, rows)


@pytest.mark.nightly(unless=["two"])
@pytest.mark.slow(seconds=6)
@ALL
def test_a_worker_reads_its_own_rows(cluster: Any) -> None:
    alone = looped(ks.OneDeviceStrategy("cpu:0"), "rows")
    every = cluster(looped, "rows")
    check(alone, every)
    # The last batch of a pass has fewer rows than four replicas: all of its three.
    assert max(read for _, read, _ in every) <= 0.65 * alone[1] + 3 * PASSES
    assert sum(read for _, read, _ in every) <= alone[1] + 3 * PASSES * len(every)


@pytest.mark.parametrize("kind", ["torch", "numpy", "generator", "keras global"])
def test_draws_of_samples_are_those_of_one_device(cluster: Any, kind: str) -> None:
    alone = looped(ks.OneDeviceStrategy("cpu:0"), kind)
    every = cluster(looped, kind)
    check(alone, every)
    assert max(read for _, read, _ in every) <= 0.65 * alone[1] + 3 * PASSES


def test_a_late_draw_is_that_of_one_device(cluster: Any) -> None:
    alone = looped(ks.OneDeviceStrategy("cpu:0"), "of one row")
    every = cluster(looped, "of one row")
    check(alone, every)


@pytest.mark.nightly(unless=["two-rows-False"])
@forks
@pytest.mark.parametrize(
    ("kind", "persistent"), [("rows", False), ("rows", True), ("torch", False)]
)
def test_processes_of_a_loader_in_a_loop(
    cluster: Any, kind: str, persistent: bool
) -> None:
    options = {"num_workers": 2, "persistent_workers": persistent}
    alone = looped(ks.OneDeviceStrategy("cpu:0"), kind, (), options)
    check(alone, cluster(looped, kind, (), options))


@pytest.mark.parametrize("spec_by", [(0,), (1,), (0, 1)])
def test_a_pass_of_which_a_batch_was_read_for_its_specification(
    cluster: Any, spec_by: tuple[int, ...]
) -> None:
    alone = looped(ks.OneDeviceStrategy("cpu:0"), "rows", (0,))
    every = cluster(looped, "rows", spec_by)
    check(alone, every)
    # Own rows of three passes, and one batch for the specification.
    for _, read, _ in every:
        assert read <= 0.65 * PASSES * ROWS + 3 * PASSES + BATCH


@pytest.mark.parametrize("spec_by", [(0,), (1,)])
@pytest.mark.parametrize("spec_in", [0, 1])
def test_a_batch_that_was_read_for_a_specification_and_draws(
    cluster: Any, spec_by: tuple[int, ...], spec_in: int
) -> None:
    alone = looped(ks.OneDeviceStrategy("cpu:0"), "torch", (0,), None, spec_in)
    check(alone, cluster(looped, "torch", spec_by, None, spec_in))


def ended_early(strategy: Any) -> list[np.ndarray]:
    """The rows of this worker in passes of two, of all and of one batch."""
    keras.utils.set_random_seed(5)
    torch.manual_seed(5)
    batches = strategy.experimental_distribute_dataset(loader(Rows()))
    found = []
    for steps in (2, STEPS, 1):
        for batch in itertools.islice(batches, steps):
            local = strategy.experimental_local_results(batch)
            found.append(np.concatenate([np.asarray(each[0]) for each in local]))
    return found


def test_passes_that_end_early_in_a_loop(cluster: Any) -> None:
    alone = ended_early(ks.OneDeviceStrategy("cpu:0"))
    every = cluster(ended_early)
    assert len(alone) == 3 + STEPS
    for step, rows in enumerate(alone):
        joined = np.concatenate([found[step] for found in every])
        np.testing.assert_array_equal(joined, rows)


def trained(strategy: Any) -> Any:
    """Weights after a loop of `run` over a loader, with dropout."""
    keras.utils.set_random_seed(5)
    torch.manual_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input(X.shape[1:]), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        )
        optimizer = keras.optimizers.SGD(0.05)

    def step(batch: Any) -> Any:
        x, y, weight = batch

        def loss_of() -> Any:
            error = keras.ops.square(model(x, training=True) - y)[:, 0] * weight
            return ks.compute_average_loss(error)

        loss, gradients = ks.value_and_grad(loss_of, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    batches = strategy.experimental_distribute_dataset(loader(Rows()))
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, (batch,)), axis=None))
        for _ in range(2)
        for batch in batches
    ]
    return losses, [np.asarray(weight) for weight in model.get_weights()]


@pytest.mark.one_backend("torch")
@ALL
def test_a_loop_trains_as_on_one_device(cluster: Any) -> None:
    losses, weights = trained(ks.OneDeviceStrategy("cpu:0"))
    for found, own in cluster(trained):
        np.testing.assert_allclose(found, losses, rtol=1e-5)
        for value, expected in zip(own, weights, strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def distributed_again(strategy: Any) -> int:
    """Rows that this worker reads of a dataset that was distributed before."""
    dataset = Rows()
    once = strategy.experimental_distribute_dataset(loader(dataset, shuffle=False))
    again = strategy.experimental_distribute_dataset(once)
    assert len(list(again)) == STEPS
    return len(dataset.read)


def test_a_distributed_dataset_is_distributed_again(cluster: Any) -> None:
    assert max(cluster(distributed_again)) < 0.65 * ROWS


def in_another_order(strategy: Any) -> None:
    """A loop over a loader that each worker shuffles by itself."""
    torch.manual_seed(strategy.workers.group.index)
    list(strategy.experimental_distribute_dataset(loader(Rows())))


@pytest.mark.slow(seconds=6)
def test_other_orders_are_an_error_in_a_loop(forker: Any) -> None:
    pool = WorkerPool(forker, 2)
    try:
        outcomes = pool.cluster(1).outcomes(in_another_order)
    finally:
        pool.close()
    errors = [error for error, _ in outcomes]
    assert all("different batches, of 5 and 5 rows" in each for each in errors), errors
    assert all("seed the loader's `generator`" in each for each in errors), errors


def unequal_states(strategy: Any, kind: str) -> list[np.ndarray]:
    """The rows of this worker, whose generators are in a state of their own."""
    index = 0 if strategy.workers is None else strategy.workers.group.index
    keras.utils.set_random_seed(5 + index)
    # Keras seeds it on its own backend only.
    torch.manual_seed(5 + index)
    dataset: Any = Rows() if kind == "rows" else Noisy(kind)
    given = torch.utils.data.DataLoader(dataset, BATCH)
    found = []
    for batch in strategy.experimental_distribute_dataset(given):
        local = strategy.experimental_local_results(batch)
        found.append(np.concatenate([np.asarray(each[0]) for each in local]))
    return found


@pytest.mark.parametrize("kind", ["rows", "torch"])
def test_generators_of_workers_may_differ_where_nothing_is_shuffled(
    cluster: Any, kind: str
) -> None:
    """Rows are augmented with the chief's numbers: those of one device."""
    alone = unequal_states(ks.OneDeviceStrategy("cpu:0"), kind)
    every = cluster(unequal_states, kind)
    for step, expected in enumerate(alone):
        joined = np.concatenate([rows[step] for rows in every])
        np.testing.assert_array_equal(joined, expected)
