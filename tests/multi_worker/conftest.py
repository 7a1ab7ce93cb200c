"""Clusters of real processes, started once for all tests of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness import backend_tables
from harness.forker import Forker
from harness.worker_pool import Cluster, WorkerPool

# Workers, and devices of each. The first two have the same processes.
CLUSTERS = {"two": (2, 1), "two_by_two": (2, 2), "three": (3, 1), "four": (4, 1)}
DEVICES = {2: 2, 3: 1, 4: 1}

#: What runs on every backend (see `backend_tables`); tests of what is lost, on JAX and
#: TensorFlow, are also in `tests/backends`.
EVERYWHERE = {
    "test_callbacks": (
        "test_callbacks_may_evaluate_and_predict_on_every_worker",
        "test_decisions_are_the_chiefs",
    ),
    "test_failures": (
        # Two others wait in an engine's collectives, which each engine ends its way.
        "test_the_others_name_the_lost_worker_and_its_step[kill-callback-1_of_3]",
        "test_the_others_name_the_lost_worker_and_its_step[hang-callback-1_of_2]",
    ),
    "test_preemption": (
        "test_preempted_training_takes_the_steps_that_were_left[fit-2]",
    ),
    "test_restarts": (),
    "test_comparisons_of_steps": ("test_a_step_awaits_no_comparison",),
    "test_slow_workers": (
        # Engines show their waits in different ways.
        "test_a_slow_worker_is_named_once_and_an_equal_one_never[three]",
    ),
    "test_float8": ("test_variables_are_overwritten_as_on_one_device[two-fitted]",),
    "test_row_parts": (
        "test_outputs_stay_on_their_workers[two-True]",
        "test_a_step_that_reads_outputs_has_all_of_them",
    ),
    "test_row_proofs": ("test_a_problem_that_one_worker_finds_counts_on_all",),
    "test_input": (
        "test_workers_with_different_amounts_of_data_stay_in_step[two]",
        "test_separate_batches_stay_on_their_workers[two-counts0-1]",
        "test_separate_batches_stay_on_their_workers[two-counts2-1]",
        "test_files_are_divided_and_each_row_is_read_once",
        "test_fit_reads_files_of_its_own",
        "test_datasets_from_a_function_are_not_divided_again",
        "test_batches_that_differ_are_an_error_at_once[two-contents-different"
        " contents]",
        "test_another_number_of_rows_is_an_error_before_the_first_step",
        "test_other_values_of_arrays_are_an_error_that_names_them[two-fit-y]",
        "test_shuffled_batches_are_the_same_without_a_seed",
    ),
}


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Starts scripts in processes that have imported Keras already."""
    with Forker() as forker:
        yield forker


@pytest.fixture(scope="session")
def pool_of(forker) -> Iterator[Callable[[int], WorkerPool]]:
    """The processes for a number of workers."""
    pools: dict[int, WorkerPool] = {}

    def start(workers: int) -> WorkerPool:
        if workers not in pools:
            pools[workers] = WorkerPool(forker, workers, DEVICES[workers])
        return pools[workers]

    yield start
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def cluster(request, pool_of) -> Cluster:
    """The cluster that a test names, by `indirect` parametrization."""
    workers, devices = CLUSTERS[request.param]
    return pool_of(workers).cluster(devices)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    # A test that does not name one gets two workers.
    marks = metafunc.definition.iter_markers("parametrize")
    named = any("cluster" in mark.args[0] for mark in marks)
    if "cluster" in metafunc.fixturenames and not named:
        metafunc.parametrize("cluster", ["two"], indirect=True, scope="session")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    backend_tables.mark_nightly(items, Path(__file__).parent, EVERYWHERE)
