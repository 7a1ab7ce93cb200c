"""Which tests run on every backend, and which on Torch alone until the night.

What several processes say to one another is mostly the same on all backends, and on
Torch, which compiles nothing, it is tested soonest. So the tests of a folder run in
full there. Its table names, for each file, what also runs on JAX and TensorFlow: a
test for each place where their code is their own. The rest runs there at night. A file
that is not in the table runs in full everywhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import pytest

FULL_ON = "torch"

#: By file, what runs on every backend: names of tests, or of tests and parameters.
Table = Mapping[str, tuple[str, ...]]

_JAX = ("jax",)
_TENSORFLOW = ("tensorflow",)
_BOTH = ("jax", "tensorflow")

#: By file, tests that run on these backends at night only: what they test besides code
#: that all backends share is tested there by another test, which the comment names.
SHARED_CODE: dict[str, dict[str, tuple[str, ...]]] = {
    "custom_loops/test_checkpoints.py": {
        # Keras's files; metrics of loops: `test_training.py`.
        "test_a_metric_goes_on_counting_from_a_file": _TENSORFLOW,
    },
    "custom_loops/test_loops_over_datasets.py": {
        # A loader's batches: case `feeds` of `test_exactness.py`.
        "test_a_loop_over_a_dataset_equals_one_device[loader]": _BOTH,
        "test_a_loop_over_a_dataset_equals_one_device[arrays]": _TENSORFLOW,
    },
    "custom_loops/test_training.py": {
        # `run` calls the function itself.
        "test_the_portable_loop_equals_one_device[one_device-35-16-True]": _BOTH,
        # Gradients and updates are those of the portable loop.
        "test_gradients_that_are_accumulated_by_hand": _BOTH,
        "test_two_optimizers_as_in_a_gan": _BOTH,
    },
    "input/test_datasets.py": {
        # As above, and it imports PyTorch for one batch.
        "test_each_kind_is_split_by_rows[loader]": _BOTH,
    },
    "input/test_model_input.py": {
        # `fit` on a split dataset: its other forms. It imports TensorFlow.
        "test_fit_on_a_split_dataset[tf_data]": _JAX,
        # Case `fit_options` of `test_exactness.py`.
        "test_class_weight": _TENSORFLOW,
    },
    "tf_distribute/test_cases.py": {
        # Hundreds of programs; `test_reduced_values.py` and others run there by day.
        "test_cases_that_differ_are_on_the_page": _BOTH,
    },
    "model_parallel/test_plan.py": {
        "test_a_plan_says_what_then_is[central-True]": _TENSORFLOW,
        "test_a_plan_says_what_then_is[mirrored_2-False]": _TENSORFLOW,
    },
    "multi_worker/test_hosts.py": {
        # Addresses are given to each engine alike; what TensorFlow's does when a
        # worker falls silent: `backends/tensorflow/test_tensorflow_lost_workers.py`.
        "test_workers_on_two_hosts_train_and_see_that_the_cable_is_cut": _TENSORFLOW,
    },
    "multi_worker/test_preemption.py": {
        # JAX has it by day, because its runtime handles signals, too.
        "test_preempted_training_takes_the_steps_that_were_left[fit-2]": _TENSORFLOW,
    },
    "multi_worker/test_row_proofs.py": {
        "test_a_problem_that_one_worker_finds_counts_on_all[two-all]": _TENSORFLOW,
    },
    "parameter_server/test_training.py": {
        # JAX compiles every step.
        "test_compiled_steps[True]": _JAX,
    },
    "test_bad_input.py": {
        "test_a_generator_whose_parts_have_different_lengths": _TENSORFLOW,
        "test_two_strategies_nested": _TENSORFLOW,
    },
    "exactness/test_exactness.py": {
        # `backends/tensorflow/test_tensorflow_no_rows.py` and "mixed_float16_skips".
        "test_same_as_one_device[sizes-mirrored_4]": _TENSORFLOW,
    },
    "test_model_integration.py": {
        # On two replicas; cases of one device and of central storage are exact.
        "test_compile_outside_of_the_scope_and_fit_again[one_device]": _TENSORFLOW,
        "test_compile_outside_of_the_scope_and_fit_again[central]": _TENSORFLOW,
        "test_a_saved_model_opens_with_and_without_a_strategy[central]": _TENSORFLOW,
        # Keras's callbacks see logs, weights and files, which others compare.
        "test_callbacks_do_what_they_do_on_one_device": _TENSORFLOW,
        "test_tensorboard_writes_its_events": _TENSORFLOW,
        # Programs of `fit` and `evaluate` in turn: `multi_worker/test_callbacks.py`.
        "test_a_callback_evaluates_predicts_saves_and_changes_the_rate": _TENSORFLOW,
    },
    "row_proofs/test_unsplit_layers.py": {
        # One of outputs, one of state and one of losses stay.
        "test_layers_that_mix_rows_are_exact[Centered]": _TENSORFLOW,
        "test_layers_that_mix_rows_are_exact[Ranked]": _TENSORFLOW,
    },
    "training/test_sidecar.py": {
        "test_each_checkpoint_gives_what_training_saw[{epoch}.weights.h5]": _TENSORFLOW,
    },
}


def runs_everywhere(name: str, table: Table, file: str) -> bool:
    if file not in table:
        return True
    return name in table[file] or name.partition("[")[0] in table[file]


def mark_nightly(items: Iterable[pytest.Item], folder: Path, table: Table) -> None:
    """Marks what does not run on this backend by day.

    Raises:
        UsageError: if the table names a test that does not exist.
    """
    known: dict[str, object] = {}
    for item in items:
        if item.path.parent != folder:
            continue
        known[item.path.stem] = getattr(item, "module", None)
        if keras.backend.backend() == FULL_ON:
            continue
        if not runs_everywhere(item.name, table, item.path.stem):
            item.add_marker(pytest.mark.nightly)
    for file, module in known.items():
        for name in table.get(file, ()):
            if not hasattr(module, name.partition("[")[0]):
                raise pytest.UsageError(f"{file} has no test {name!r}")


def mark_shared_code(items: Iterable[pytest.Item], root: Path) -> None:
    """Marks what `SHARED_CODE` leaves to the night on this backend.

    Raises:
        UsageError: if it names a test that does not exist.
    """
    found: dict[str, set[str]] = {}
    for item in items:
        file = item.path.relative_to(root).as_posix()
        names = found.setdefault(file, set())
        names |= {item.name, item.name.partition("[")[0]}
        if keras.backend.backend() in SHARED_CODE.get(file, {}).get(item.name, ()):
            item.add_marker(pytest.mark.nightly)
    for file, names in found.items():
        unknown = SHARED_CODE.get(file, {}).keys() - names
        if unknown and not any("::" in argument for argument in sys.argv):
            raise pytest.UsageError(f"{file} has no tests {sorted(unknown)}")


def on_torch_by_day(test: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a test of a file without a table that other backends run at night."""
    if keras.backend.backend() == FULL_ON:
        return test
    return pytest.mark.nightly(test)
