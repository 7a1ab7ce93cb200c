"""Tests that take long wait for the night."""

from __future__ import annotations

from harness.by_day import durations, left_to_night

SLOW = "tests/a.py::test_slow"
LONG = "tests/a.py::test_long"
RECORDED = {
    **{f"{b} {SLOW}[{i}]": 0.4 for b in ("jax", "torch") for i in range(6)},
    "jax tests/a.py::test_slow[6]": 30.0,
    **{f"{b} {LONG}": 10.0 for b in ("jax", "torch")},
    f"tensorflow {LONG}": 0.4,
    "tensorflow tests/b.py::test_alone": 10.0,
    "tensorflow tests/b.py::test_hours": 30.0,
}
KNOWN = durations(RECORDED)
PARAMETERS = [f"{i}]" for i in range(7)]


def by_day(backend: str, test: str, parameters: list[str]) -> set[str]:
    return set(parameters) - left_to_night(backend, test, parameters, KNOWN)


def test_parameters_that_fit_run_by_day() -> None:
    found = by_day("jax", SLOW, PARAMETERS)
    assert len(found) == 2 and "6]" not in found


def test_other_backends_run_other_parameters() -> None:
    first, second = (by_day(b, SLOW, PARAMETERS[:6]) for b in ("jax", "torch"))
    assert first != second


def test_the_quickest_runs_on_each_backend_even_if_all_take_long() -> None:
    known = durations({f"jax {SLOW}[{i}]": 5.0 + i for i in range(3)})
    assert left_to_night("jax", SLOW, PARAMETERS[:3], known) == {"1]", "2]"}


def test_a_long_test_runs_on_one_backend_and_where_it_is_not_long() -> None:
    found = [b for b in ("jax", "torch") if by_day(b, LONG, [""])]
    assert len(found) == 1
    assert by_day("tensorflow", LONG, [""])


def test_a_long_test_of_one_backend_runs_there() -> None:
    assert by_day("tensorflow", "tests/b.py::test_alone", [""])


def test_a_test_that_takes_very_long_waits_for_the_night() -> None:
    test = "tests/b.py::test_hours"
    assert not by_day("tensorflow", test, [""])
    assert not left_to_night("tensorflow", test, [""], KNOWN, 40.0)
    assert not left_to_night("tensorflow", test, [""], KNOWN, is_marked=True)


def test_tests_without_a_record_run() -> None:
    assert by_day("jax", "tests/new.py::test_new", ["a]", "b]"]) == {"a]", "b]"}


def test_a_mark_gives_seconds_on_each_backend() -> None:
    for backend in ("jax", "torch"):
        assert not left_to_night(backend, LONG, [""], KNOWN, 1.0)
        assert not left_to_night(backend, SLOW, PARAMETERS[:6], KNOWN, 9.0)
