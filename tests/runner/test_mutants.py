"""Mutants: the table of suites that find them, and the code that they replace."""

from __future__ import annotations

from pathlib import Path

import mutants
import pytest

pytestmark = pytest.mark.one_backend


def test_every_mutant_can_be_planted(tmp_path: Path) -> None:
    for mutant in mutants.MUTANTS:
        file = tmp_path / "keras_strategies" / mutant.file
        file.parent.mkdir(parents=True, exist_ok=True)
        source = (mutants.ROOT / "keras_strategies" / mutant.file).read_text()
        file.write_text(source)
        mutant.plant(tmp_path)
        assert file.read_text() != source
