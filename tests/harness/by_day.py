"""Which tests wait for the night because they take long, by recorded durations.

`make test` has fifteen minutes for three backends on two cores. So of a test with many
parameters a backend runs by day as many as fit into a few seconds, other backends
others where they can. A test that takes half a second with any parameters runs by day
on one of the backends where it does, and one that takes twelve at night only.
Everything runs at night. `@pytest.mark.by_day(60)` gives a test more seconds, on each
of its backends, for what the library promises first. With `by_day` alone a test that
takes very long runs on one backend.

`python tests/run.py --record` writes the durations, `slow_tests.json`.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[1] / "slow_tests.json"
#: Seconds for the parameters of one test on one backend.
PARAMETERS = 1.0
#: Seconds of a test that runs by day on one of its backends.
LONG = 0.5
#: Seconds of a test that runs at night.
VERY_LONG = 12.0
#: Tests of fewer seconds have no entry in the file.
SHORT = 0.5
#: Seconds for the cases of a suite of exactness.
CASES = 25.0

#: Seconds of a test by backend, name of the test and parameters.
Durations = Mapping[str, Mapping[str, Mapping[str, float]]]


def durations(seconds: Mapping[str, float]) -> Durations:
    """Sorts recorded seconds of `jax tests/a.py::test_b[c]`."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for key, each in seconds.items():
        backend, _, name = key.partition(" ")
        test, _, parameters = name.partition("[")
        found.setdefault(backend, {}).setdefault(test, {})[parameters] = each
    return found


def left_to_night(
    backend: str,
    test: str,
    parameters: Sequence[str],
    known: Durations,
    given: float | None = None,
    is_marked: bool = False,
) -> set[str]:
    """The parameters of a test that a backend leaves to the night.

    Args:
        backend: str, one of those that tests run on.
        test: str, such as `tests/a.py::test_b`.
        parameters: those that it has by day, as in `jax tests/a.py::test_b[c]` behind
            the bracket.
        known: recorded durations.
        given: seconds for all parameters, on each backend; None for the default.
        is_marked: bool, whether it runs by day however long it takes.
    """
    seconds = known.get(backend, {}).get(test, {})
    # Others are short, or are skipped.
    long = {each: seconds[each] for each in parameters if each in seconds}
    if not long:
        return set()
    least = min(long.values())
    if given is None:
        if least >= VERY_LONG and not is_marked:
            return set(long)
        if least >= LONG and not _is_chosen(backend, test, known):
            return set(long)
    quickest = min(long, key=lambda each: long[each])
    kept, total = {quickest}, long[quickest]
    for each in _from_another_place(backend, list(long), known):
        if each not in kept and total + long[each] <= (given or PARAMETERS):
            kept.add(each)
            total += long[each]
    return set(long) - kept


def needs_case(backend: str, case: str) -> bool:
    """Whether a test of exactness runs by day on a case, such as `conv_bn`."""
    known = recorded()
    for test, seconds in known.get(backend, {}).items():
        if test.endswith("::test_same_as_one_device"):
            night = left_to_night(backend, test, list(seconds), known, CASES)
            own = {each for each in seconds if each.startswith(f"{case}-")}
            if own - night:
                return True
    return False


def _is_chosen(backend: str, test: str, known: Durations) -> bool:
    """Whether a long test runs on this backend; its name says on which."""
    backends = sorted(
        name
        for name, tests in known.items()
        if tests.get(test) and min(tests[test].values()) >= LONG
    )
    return backend == backends[zlib.crc32(test.encode()) % len(backends)]


def _from_another_place(
    backend: str, parameters: Sequence[str], known: Durations
) -> list[str]:
    """Parameters in an order that begins elsewhere on each backend."""
    backends = sorted(known)
    start = len(parameters) * backends.index(backend) // len(backends)
    return [*parameters[start:], *parameters[:start]]


@functools.cache
def recorded() -> Durations:
    """What `slow_tests.json` has."""
    return durations(json.loads(FILE.read_text()))


def mark_long(items: Iterable[pytest.Item], root: Path, backend: str) -> None:
    """Marks tests that wait for the night by their durations."""
    known = recorded()
    if backend not in known:
        return
    tests: dict[str, dict[str, pytest.Item]] = {}
    for item in items:
        if any(map(item.get_closest_marker, ("nightly", "gpu"))):
            continue
        name = f"{item.path.relative_to(root.parent).as_posix()}::{item.name}"
        test, _, parameters = name.partition("[")
        tests.setdefault(test, {})[parameters] = item
    for test, own in tests.items():
        mark = next(iter(own.values())).get_closest_marker("by_day")
        given = float(mark.args[0]) if mark and mark.args else None
        night = left_to_night(backend, test, list(own), known, given, bool(mark))
        for parameters in night:
            own[parameters].add_marker(pytest.mark.nightly)
