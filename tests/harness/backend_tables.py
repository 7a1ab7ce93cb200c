"""Which tests run on every backend, and which on Torch alone until the night.

What several processes say to one another is mostly the same on all backends, and on
Torch, which compiles nothing, it is tested soonest. So the tests of a folder run in
full there. Its table names, for each file, what also runs on JAX and TensorFlow: a
test for each place where their code is their own. The rest runs there at night. A file
that is not in the table runs in full everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import pytest

FULL_ON = "torch"

#: By file, what runs on every backend: names of tests, or of tests and parameters.
Table = Mapping[str, tuple[str, ...]]


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


def on_torch_by_day(test: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a test of a file without a table that other backends run at night."""
    if keras.backend.backend() == FULL_ON:
        return test
    return pytest.mark.nightly(test)
