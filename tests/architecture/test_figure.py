"""The package's README and the decisions name what exists."""

from __future__ import annotations

import re

import pytest
from architecture.figure import README, current, with_figure
from architecture.package_source import PACKAGE, REPOSITORY, package_source

pytestmark = pytest.mark.one_backend("jax")

PACKAGE_FOLDER = REPOSITORY / PACKAGE
DECISIONS = sorted((REPOSITORY / "docs" / "contributors" / "decisions").glob("*.md"))
FILES = {
    path.relative_to(REPOSITORY).as_posix()
    for folder in ("keras_strategies", "tests", "benchmarks", "docs")
    for path in (REPOSITORY / folder).rglob("*")
    if path.is_file()
}


def test_the_figure_is_that_of_the_imports() -> None:
    text = README.read_text()
    assert text == with_figure(text, current()), (
        "Run `PYTHONPATH=tests python tests/architecture/figure.py`."
    )


def test_files_that_are_named_exist() -> None:
    missing = [
        f"{page.relative_to(REPOSITORY)}: {name}"
        for page in (README, *DECISIONS)
        for name in re.findall(r"`([\w/]+\.(?:py|png))`", page.read_text())
        if not any(f"/{file}".endswith(f"/{name}") for file in FILES)
    ]
    assert not missing, "\n".join(missing)


def test_every_folder_is_named_in_the_row_of_the_outer_folder() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", README.read_text(), re.MULTILINE)
    missing = []
    for folder in {module.path.parent for module in package_source().modules}:
        path = f"{folder.relative_to(PACKAGE_FOLDER).as_posix()}/"
        name = f"`{folder.name}/`"
        if not any(
            f"`{path}" in title or name in text
            for title, text in rows
            for start in re.findall(r"`([\w/]+/)`", title)
            if path.startswith(start) or start.startswith(path)
        ):
            missing.append(path)
    assert sorted(missing) == ["./"]


def test_each_decision_is_in_the_index() -> None:
    index = next(path for path in DECISIONS if path.stem == "index").read_text()
    pages = [path for path in DECISIONS if path.stem != "index"]
    assert [path.name for path in pages if f"({path.name})" not in index] == []
    numbers = [int(path.name[:3]) for path in pages]
    # Those of decisions that others have replaced are not given again.
    assert numbers == sorted(set(numbers))
