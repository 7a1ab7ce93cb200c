"""References are kept by everything that they depend on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from harness import references
from harness.fork_server import PLAIN_GRAPHS

pytestmark = pytest.mark.one_backend


def folder() -> Path:
    return references._folder.__wrapped__("exactness.cases")


@pytest.mark.parametrize("name", ["XLA_FLAGS", PLAIN_GRAPHS])
def test_the_folder_depends_on_options_of_compilers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = folder()
    monkeypatch.setenv(name, "--other")
    assert folder() != before


@pytest.mark.parametrize("name", ["harness.case", "harness.tensorflow_graphs"])
def test_the_folder_depends_on_sources(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = folder()
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    read = Path.read_bytes

    def changed(path: Path) -> bytes:
        return read(path) + b"#" * (path == Path(spec.origin))

    monkeypatch.setattr(Path, "read_bytes", changed)
    assert folder() != before
