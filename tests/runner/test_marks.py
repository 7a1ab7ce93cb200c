"""Marks say which tests run on which backend."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from harness import marks

pytestmark = pytest.mark.one_backend
FILE = "tests/test_a.py"
CASES = [f"case-{i}" for i in range(9)]


class Item:
    """What `marks` uses of a test."""

    def __init__(self, case: str, *own: pytest.MarkDecorator) -> None:
        self.nodeid = f"tests/test_a.py::test_a[{case}]"
        self.callspec = SimpleNamespace(id=case)
        self.own_markers = [each.mark for each in own]

    def iter_markers_with_node(self, name: str) -> Iterator[tuple[Item, pytest.Mark]]:
        return ((self, mark) for mark in self.own_markers if mark.name == name)

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.own_markers if mark.name == name), None)

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.own_markers.append(mark.mark)


def by_day(items: list[Any], backend: str = "torch", *arguments: str) -> list[str]:
    """The cases that `-m "not nightly"` leaves."""
    config: Any = SimpleNamespace(args=[*arguments, FILE])
    marks.apply(config, items, backend)
    return [i.callspec.id for i in items if not i.get_closest_marker("nightly")]


def shared(*backends: str) -> list[Item]:
    mark = pytest.mark.one_backend
    return [Item(case, mark(*backends) if backends else mark) for case in CASES]


def test_each_case_runs_on_one_backend_and_on_each_in_turn(monkeypatch) -> None:
    seen: dict[str, list[str]] = {backend: [] for backend in marks.BACKENDS}
    for day in range(20, 23):
        monkeypatch.setenv(marks.ROTATION, str(day))
        found = {backend: by_day(shared(), backend) for backend in seen}
        assert sorted(case for each in found.values() for case in each) == CASES
        for backend, cases in found.items():
            seen[backend] += cases
    assert all(sorted(cases) == CASES for cases in seen.values())


def test_a_file_with_the_mark_runs_on_one_backend(monkeypatch) -> None:
    class OfFile(Item):
        def iter_markers_with_node(self, name: str) -> Any:
            node: Any = SimpleNamespace(nodeid=FILE)
            return iter([(node, pytest.mark.one_backend.mark)])

    monkeypatch.setenv(marks.ROTATION, "7")
    found = [by_day([OfFile(case) for case in CASES], name) for name in marks.BACKENDS]
    assert sorted(found) == [[], [], CASES]


def test_without_a_day_every_backend_runs_every_case(monkeypatch) -> None:
    monkeypatch.delenv(marks.ROTATION, raising=False)
    assert by_day(shared("jax")) == CASES


def test_cases_that_the_mark_names_run_by_day() -> None:
    mark = pytest.mark.nightly(unless=["a-*", "[b]"])
    cases = ["a-1", "a-2", "b-1", "[b]", "b"]
    assert by_day([Item(case, mark) for case in cases]) == ["a-1", "a-2", "[b]"]


def test_a_name_of_no_case_is_an_error_where_all_cases_are() -> None:
    def items() -> list[Item]:
        return [Item("b", pytest.mark.nightly(unless=["a"]))]

    with pytest.raises(pytest.UsageError, match="test_a: `unless` names none of its"):
        by_day(items())
    assert by_day(items(), "torch", f"{FILE}::test_a[b]") == []


def test_an_unknown_backend_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv(marks.ROTATION, "1")
    with pytest.raises(pytest.UsageError, match=r"\{'numpy'\} are no backends"):
        by_day(shared("numpy"))
