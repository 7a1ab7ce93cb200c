"""Scripts whose functions the commands call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def script(request, tmp_path: Path, monkeypatch) -> Iterator[str]:
    """The file of the `SCRIPT` of the test's module, whose import is taken back."""
    path = tmp_path / "called_script.py"
    path.write_text(request.module.SCRIPT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield str(path)
    sys.modules.pop(path.stem, None)
