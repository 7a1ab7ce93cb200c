"""Mutants: the table of suites that find them, and the code that they replace."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest
from mutants import Outcome

pytestmark = pytest.mark.one_backend


@pytest.mark.parametrize(
    ("test", "suite"),
    [
        ("tests/test_values.py::test_a[sizes/b-c]", "test_values"),
        ("tests/multi_worker/test_input.py::test_a", "multi_worker"),
        ("tests/backends/tensorflow/test_tensorflow_copies.py::test_a", "backends"),
        ("tests/parameter_server/test_store.py", "parameter_server"),
    ],
)
def test_a_suite_is_a_folder_or_a_file_in_none(test: str, suite: str) -> None:
    assert mutants.suite_of(test) == suite


def test_the_table_has_the_backends_on_which_a_suite_found_a_mutant() -> None:
    run = "tests/custom_loops/test_run.py::test_a"
    outcomes = [
        Outcome("seeds_equal", "jax", "found", run),
        Outcome("seeds_equal", "torch", "found", run),
        Outcome("seeds_equal", "tensorflow", "found", "tests/test_values.py::test_b"),
        Outcome("mean_of_means", "jax", "alive", ""),
        Outcome("mean_of_means", "torch", "clean?", run),
        Outcome("lost", "torch", "found", "tests/cluster/test_group.py::test_c"),
    ]
    assert mutants.table(outcomes).splitlines() == [
        "| mutant        | cluster | custom_loops | test_values |",
        "| ------------- | ------- | ------------ | ----------- |",
        "| seeds_equal   |         | jax, torch   | tensorflow  |",
        "| mean_of_means |         |              |             |",
        "| lost          | torch   |              |             |",
    ]


def test_every_mutant_can_be_planted(tmp_path: Path) -> None:
    for mutant in mutants.MUTANTS:
        file = tmp_path / "keras_strategies" / mutant.file
        file.parent.mkdir(parents=True, exist_ok=True)
        source = (mutants.ROOT / "keras_strategies" / mutant.file).read_text()
        file.write_text(source)
        mutant.plant(tmp_path)
        assert file.read_text() != source
