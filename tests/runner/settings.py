"""Settings of a run of the tests."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".test-logs"
DURATIONS = ROOT / "tests" / "durations.json"
BACKENDS = ("jax", "torch", "tensorflow")
# The quickest tests that pass through most of the library: `make check`.
CHECK = (
    "tests/architecture/test_layers.py",
    "tests/test_contexts.py",
    "tests/test_values.py",
    "tests/exactness/test_exactness.py::test_same_as_one_device[size_3-mirrored_2]",
    "tests/collectives/test_collectives.py::test_reduce_along_an_axis_has_the_true_denominator",
    *(
        f"tests/custom_loops/{name}"
        for name in (
            "test_training.py::"
            "test_the_portable_loop_equals_one_device[mirrored_2-35-16-True]",
            "test_run.py::test_run_reduce_and_gather_inside_a_function",
            "test_run.py::test_random_layers_draw_a_mask_of_each_replicas_own",
            "test_run.py::test_on_read_variables_are_brought_together_when_read",
            "test_run.py::test_an_exception_in_one_replica_reaches_the_caller",
            "test_optimizers.py::test_gradients_are_summed_before_they_are_clipped",
        )
    ),
    *(
        f"tests/input/test_datasets.py::{name}"
        for name in (
            "test_the_last_batch_is_smaller_and_nothing_is_dropped",
            "test_a_function_is_called_once_and_its_batches_are_not_split",
            "test_what_is_no_dataset",
        )
    ),
    "tests/test_model_integration.py::"
    "test_a_saved_model_opens_with_and_without_a_strategy[mirrored_2]",
)


@dataclass(frozen=True)
class Settings:
    """What is run, and how."""

    paths: tuple[str, ...]
    lint: bool
    check: bool
    nightly: bool
    record: bool
    backends: tuple[str, ...]
    jobs: int
    timeout: float

    @classmethod
    def from_command_line(cls, description: str) -> Settings:
        parser = argparse.ArgumentParser(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("paths", nargs="*")
        for option in ("lint", "check", "nightly", "record"):
            parser.add_argument(f"--{option}", action="store_true")
        given = parser.parse_args()
        for path in given.paths:
            if not (ROOT / path.partition("::")[0]).exists():
                parser.error(f"there is no {path!r} below {ROOT}")
        chosen = os.environ.get("KS_BACKENDS") or ",".join(BACKENDS)
        backends = tuple(name.strip() for name in chosen.split(","))
        if unknown := sorted(set(backends) - set(BACKENDS)):
            parser.error(f"KS_BACKENDS is {chosen!r}: {unknown} not among {BACKENDS}")
        return cls(
            paths=tuple(given.paths) or (CHECK if given.check else ()),
            lint=given.lint,
            check=given.check,
            nightly=given.nightly,
            record=given.record,
            backends=backends,
            jobs=int(os.environ.get("KS_JOBS") or 1 + min(2, os.cpu_count() or 1)),
            timeout=float(
                os.environ.get("KS_TIMEOUT") or (7200 if given.nightly else 1500)
            ),
        )
