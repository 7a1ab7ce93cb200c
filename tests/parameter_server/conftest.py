"""Clusters for tests of parameter servers: processes are forked, clusters shared."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import backend_tables
from harness.forker import Forker

from keras_strategies.parameter_server.coordinator import process_cluster as cluster
from parameter_server import clusters
from parameter_server.forked_cluster import ForkedProcesses

#: What runs on every backend (see `backend_tables`): steps that a worker traces and
#: compiles, updates that servers make with Keras's optimizers, and one test each of
#: what the coordinator does around them.
EVERYWHERE = {
    "test_checkpoints": (),
    "test_captured_state": (),
    "test_composite_tensors": (),
    "test_faults": (
        "test_a_push_counts_once_when_its_closure_runs_again",
        "test_nothing_is_lost_that_is_in_a_snapshot",
        "test_fit_and_evaluate_are_exact_while_workers_die",
    ),
    "test_fit": ("test_a_step_that_raises_reaches_the_caller_and_fit_works_again",),
    "test_functions": (
        "test_a_function_uses_the_iterator_that_it_refers_to_now",
        "test_an_exhausted_iterator_is_an_error_of_its_own",
        "test_results_of_the_script_arrive_as_they_are",
        "test_variables_and_metrics_are_arguments",
        "test_models_and_optimizers_are_arguments",
        "test_methods_of_models_say_where_to_call_them[fit]",
        "test_methods_of_models_say_where_to_call_them[predict]",
    ),
    "test_jax_programs": ("test_batches_of_dtypes_that_jax_converts_alike",),
    "test_keras_rs": (),
    "test_loss_scale": (
        "test_without_staleness_it_equals_one_device[two servers-clipped]",
    ),
    "test_memory": (),
    "test_optimizer_updates": (
        "test_updates_are_those_of_one_device[adafactor_accumulating]",
        "test_updates_are_those_of_one_device[muon]",
        "test_updates_are_those_of_one_device[nadam]",
        "test_gradients_of_shards_are_clipped_together[global_clipnorm]",
    ),
    "test_optimizers": (
        "test_an_optimizer_does_what_it_does_on_one_device[adafactor_accumulating]",
        "test_what_several_variables_share_is_refused",
    ),
    "test_partitioners": ("test_dtypes_of_every_framework",),
    "test_pull_ahead": (
        "test_a_step_misses_the_update_before_it_and_no_other[True-1]",
    ),
    "test_resizing": (),
    "test_resume": (),
    "test_row_positions": (),
    "test_progress": (),
    "test_released": (),
    "test_rows": (),
    "test_shared_buffers": (),
    "test_snapshots": (),
    "test_step_timeouts": (),
    "test_steps_that_differ": (),
    "test_store": (),
    "test_streams": ("test_every_batch_is_seen_once[generator]",),
    "test_tensorflow_objects": (
        "test_a_dataset_is_each_workers",
        "test_preprocessing_layers_run_on_workers",
        "test_a_model_of_strings_equals_one_device",
        "test_a_model_without_compile_predicts_strings",
        "test_methods_of_modules_are_scheduled",
    ),
    "test_training": (
        "test_every_kind_of_input[arrays]",
        "test_every_kind_of_input[tf_data]",
        "test_every_kind_of_input[distributed]",
        "test_methods_on_batches_and_weights_of_rows",
        "test_arrays_of_64_bits_in_batches_and_in_fit[int64]",
        "test_several_steps_in_one_message",
        "test_schedules_count_all_workers_steps",
        "test_compiled_steps[True]",
        "test_a_step_of_ones_own",
        "test_a_table_of_ones_own_is_looked_up_by_rows",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    backend_tables.mark_nightly(items, Path(__file__).parent, EVERYWHERE)


@pytest.fixture(scope="package")
def forker() -> Iterator[Forker]:
    with Forker() as made:
        yield made


@pytest.fixture(scope="package", autouse=True)
def forks(forker: Forker) -> Iterator[None]:
    """Clusters of these tests fork their processes."""
    forked = functools.partial(ForkedProcesses, forker)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "ClusterProcesses", forked)
        yield


@pytest.fixture(scope="package")
def synchronous(forks):
    """One step after the other, variables in two parts on two servers."""
    with clusters.start_synchronous() as strategy:
        yield strategy


@pytest.fixture(scope="package")
def asynchronous(forks, tmp_path_factory):
    """Steps without order; what dies here comes back, servers from snapshots."""
    with clusters.start(
        workers=2,
        ps=1,
        snapshot_seconds=clusters.SNAPSHOT_SECONDS,
        snapshot_folder=str(tmp_path_factory.mktemp("snapshots")),
        silence_seconds=5.0,
    ) as strategy:
        yield strategy
        clusters.assert_nothing_broke(strategy)


@pytest.fixture
def recovered(asynchronous):
    """The asynchronous cluster with all of its processes, before and after a fault."""
    clusters.wait_until_whole(asynchronous)
    yield asynchronous
    clusters.wait_until_whole(asynchronous)
