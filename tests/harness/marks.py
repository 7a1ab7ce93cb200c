"""Marks that say when a test runs.

    no mark                          `make test` runs it on every backend
    one_backend                      code that all backends share: `make test` runs each
                                     of its cases, or the file that has the mark, on one
                                     backend, which rotates by day
    one_backend("jax", "torch")      the same, on one of these
    nightly                          `make test` leaves it out, `make test-full` has it
    nightly(unless=["adam-*", "b"])  so are its cases, but for those with these ids
    slow(seconds=7)                  it takes longer than 5 seconds, with each case

`make test-full` and plain pytest run everything on every backend. `tests/run.py` gives
the day in `KS_ROTATION`, and prints it: set it to repeat another day's choice.
"""

from __future__ import annotations

import fnmatch
import os
import zlib
from collections.abc import Sequence

import pytest

BACKENDS = ("jax", "torch", "tensorflow")
ROTATION = "KS_ROTATION"


def apply(config: pytest.Config, items: Sequence[pytest.Item], backend: str) -> None:
    """Leaves the mark `nightly` on the tests that wait for the night, and no others.

    Raises:
        UsageError: if no case of a test has an id that its mark names, or a mark names
            an unknown backend.
    """
    unknown: dict[str, list[bool]] = {}
    for item in items:
        if item.get_closest_marker("skip"):
            continue  # Also a test without parameters on this backend.
        for mark in [mark for mark in item.own_markers if mark.name == "nightly"]:
            if "unless" in mark.kwargs:
                runs = _is_one_of(item, mark.kwargs["unless"])
                unknown.setdefault(item.nodeid.partition("[")[0], []).append(runs)
                if runs:
                    item.own_markers.remove(mark)
        if not runs_on(item, backend):
            item.add_marker(pytest.mark.nightly)
    # Of a test that is named, perhaps not all cases are here.
    if not any("::" in argument for argument in config.args):
        for test, runs in unknown.items():
            if not any(runs):
                raise pytest.UsageError(f"{test}: `unless` names none of its cases")


def runs_on(item: pytest.Item, backend: str) -> bool:
    """Whether a test is this backend's today; without a day, it is every backend's."""
    found = next(item.iter_markers_with_node("one_backend"), None)
    if found is None or ROTATION not in os.environ:
        return True
    node, mark = found
    backends = mark.args or BACKENDS
    if unknown := set(backends) - set(BACKENDS):
        raise pytest.UsageError(f"{item.nodeid}: {unknown} are no backends")
    # That of a file, which may have what its tests share, if the file has the mark.
    turn = zlib.crc32(node.nodeid.encode()) + int(os.environ[ROTATION])
    return bool(backend == backends[turn % len(backends)])


def _is_one_of(item: pytest.Item, ids: Sequence[str]) -> bool:
    name = item.callspec.id if hasattr(item, "callspec") else ""
    return any(fnmatch.fnmatchcase(name, each.replace("[", "[[]")) for each in ids)
