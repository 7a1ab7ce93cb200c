"""The page of frameworks' state names all that there is, as the code has it.

A name that is missing is state of a new release. See whether threads of replicas need
it (`engines/*/replicas`, `keras_compat/thread_state.py`), and add a row to the page.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import keras
import pytest
from architecture.framework_state import FOLDERS, state_of

pytestmark = pytest.mark.one_backend("jax")

REPOSITORY = Path(__file__).parents[2]
[PAGE] = (REPOSITORY / "docs/contributors/decisions").glob(
    "*-state-of-threads-and-of-the-process.md"
)
TEXT = PAGE.read_text()
ROWS = re.findall(r"^\| `([^`]+)` \| (.+) \|$", TEXT, re.M)
#: Lists of state in a module, which the page repeats: `<!-- module: heading -->`.
LISTS = re.findall(
    r"^<!-- (keras_strategies\S+): (.+) -->\n((?:\n|[-* ].*\n)*)", TEXT, re.M
)
#: A test needs the source that the backend's environment has.
PACKAGES = {"keras", keras.backend.backend()} & set(FOLDERS)


def matching(name: str) -> list[str]:
    """The rows that name a state, or its package."""
    return [
        row
        for row, _ in ROWS
        if row == name or (row.endswith(".*") and name.startswith(row[:-1]))
    ]


@pytest.fixture(scope="module")
def states() -> dict[str, set[str]]:
    return {package: state_of(package) for package in PACKAGES}


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_state_has_a_row(states, package: str) -> None:
    missing = [name for name in sorted(states[package]) if not matching(name)]
    assert not missing, f"No row of {PAGE.name} names: {missing}"


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_every_row_names_a_state(states, package: str) -> None:
    used = {row for name in states[package] for row in matching(name)}
    prefix = "keras state", f"{package}."
    rows = {
        row
        for row, reason in ROWS
        if row.startswith(prefix[package != "keras" :]) and is_in_this_keras(reason)
    }
    assert sorted(rows - used) == []


def is_in_this_keras(reason: str) -> bool:
    """Whether a row is of this Keras: its reason may begin with `Keras 3.15: `."""
    [version] = re.findall(r"^Keras (\d+\.\d+): ", reason) or [keras.__version__]
    return f"{keras.__version__}.".startswith(f"{version}.")


def test_rows_are_unique_and_have_a_reason() -> None:
    names = [name for name, _ in ROWS]
    assert len(names) == len(set(names)) > 100
    assert all(len(reason) > 3 for _, reason in ROWS)


def test_lists_are_those_of_the_modules() -> None:
    assert len(LISTS) == 3
    for module, heading, items in LISTS:
        path = REPOSITORY / (module.replace(".", "/") + ".py")
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        assert docstring is not None
        [section] = re.findall(rf"# {heading}\n\n((?:[- ] ?.*\n?)+)", docstring)
        assert items_of(section) == items_of(items), (module, heading)


def items_of(text: str) -> list[str]:
    """The items of a list, each in one line."""
    return [
        " ".join(item.split())
        for item in re.split(r"^- ", text, flags=re.M)
        if item.strip()
    ]
