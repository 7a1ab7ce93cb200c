"""A custom loop over a `DataLoader` reads own rows, and gets those of one device."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import torch
from multi_worker import loaders
from multi_worker.clusters import ALL, one_device
from multi_worker.loaders import BATCH, ROWS, forks, index_of

pytestmark = pytest.mark.one_backend

#: Passes over the loader, and steps of each.
PASSES, STEPS = 3, 5


def rows_of(strategy: Any, batch: Any) -> list[np.ndarray]:
    """The rows of this worker in each part of a batch."""
    local = strategy.experimental_local_results(batch)
    parts = zip(*[map(np.asarray, each) for each in local], strict=True)
    return [np.concatenate(each) for each in parts]


def looped(
    strategy: Any,
    kind: str,
    spec_by: tuple[int, ...] = (),
    spec_in: int = 1,
    counts: tuple[int, ...] = (STEPS,) * PASSES,
    seed_of_worker: bool = False,
    **options: Any,
) -> tuple[list[Any], int, list[float]]:
    """The rows of this worker in each step, how many were read, and draws after it.

    `spec_by` are the workers that read the specification before pass `spec_in`, and
    `counts` the steps of each pass.
    """
    seed = 5 + seed_of_worker * index_of(strategy)
    keras.utils.set_random_seed(seed)
    torch.manual_seed(seed)  # Keras seeds it on its own backend only.
    dataset = loaders.dataset_of(kind)
    given = loaders.loader(dataset, **options)
    batches = strategy.experimental_distribute_dataset(given)
    steps = []
    for i, count in enumerate(counts):
        if i == spec_in and index_of(strategy) in spec_by:
            assert keras.tree.flatten(batches.element_spec)
        for batch in itertools.islice(batches, count):
            steps.append(rows_of(strategy, batch))
    return steps, len(dataset.read), loaders.draws()


def check(alone: Any, every: list[Any], draws_alike: bool = True) -> None:
    """Workers have the rows of one device, and draw its numbers after the loop."""
    expected, _, draws = alone
    for found, _, own in every:
        assert len(found) == len(expected)
        assert own == draws or not draws_alike
    for step, whole in enumerate(expected):
        for i, rows in enumerate(whole):
            joined = np.concatenate([found[step][i] for found, _, _ in every])
            np.testing.assert_array_equal(joined, rows)


@pytest.mark.nightly(unless=["two"])
@pytest.mark.slow(seconds=6)
@ALL
def test_a_worker_reads_its_own_rows(cluster: Any) -> None:
    alone = looped(one_device(), "rows")
    every = cluster(looped, "rows")
    assert len(alone[0]) == PASSES * STEPS
    check(alone, every)
    # The last batch of a pass has fewer rows than four replicas: all of its three.
    assert max(read for _, read, _ in every) <= 0.65 * alone[1] + 3 * PASSES
    assert sum(read for _, read, _ in every) <= alone[1] + 3 * PASSES * len(every)


@pytest.mark.nightly(unless=["two-rows-False"])
@forks
@pytest.mark.parametrize(("kind", "persistent"), [("rows", False), ("torch", True)])
def test_processes_of_a_loader_in_a_loop(cluster, kind, persistent) -> None:
    def program(strategy: Any) -> Any:
        options = {"num_workers": 2, "persistent_workers": persistent}
        return looped(strategy, kind, **options)

    check(program(one_device()), cluster(program))


@pytest.mark.parametrize(
    ("kind", "spec_by", "spec_in"),
    [("rows", (0, 1), 1), ("torch", (0,), 0), ("torch", (1,), 0), ("torch", (1,), 1)],
)
def test_a_pass_of_which_a_batch_was_read_for_its_specification(
    cluster, kind, spec_by, spec_in
) -> None:
    alone = looped(one_device(), kind, (0,), spec_in)
    every = cluster(looped, kind, spec_by, spec_in)
    check(alone, every)
    # Own rows of three passes, and one batch for the specification.
    for _, read, _ in every if kind == "rows" else ():
        assert read <= 0.65 * PASSES * ROWS + 3 * PASSES + BATCH


def test_passes_that_end_early_in_a_loop(cluster: Any) -> None:
    def program(strategy: Any) -> Any:
        return looped(strategy, "rows", counts=(2, STEPS, 1))

    alone = program(one_device())
    assert len(alone[0]) == 3 + STEPS
    check(alone, cluster(program), draws_alike=False)


@pytest.mark.parametrize("kind", ["rows", "torch"])
def test_generators_of_workers_may_differ_where_nothing_is_shuffled(cluster, kind):
    """Rows are augmented with the chief's numbers: those of one device."""

    def program(strategy: Any) -> Any:
        options = {"counts": (STEPS,), "seed_of_worker": True, "shuffle": False}
        return looped(strategy, kind, **options)

    check(program(one_device()), cluster(program), draws_alike=False)
