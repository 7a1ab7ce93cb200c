"""Code of the README, the home page and the guides runs when it is pasted.

By day JAX runs all of it. Torch and TensorFlow run the first screens, and what is for
them; the rest of the pages at night.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.forker import run_code
from pages.pasted import (
    BLOCK,
    FIRST_SCREENS,
    PAGES,
    code_blocks,
    is_diff,
    side_of_diff,
)

from keras_strategies.engines import get_engine
from keras_strategies.runtime.engine import Feature

BACKEND = keras.backend.backend()
ONLY_ON_JAX = {
    "docs/guides/model-parallel.md",
    "docs/guides/tpu.md",
    "docs/migrating-from-keras-distribution.md",
}
ONLY_ON_TORCH = {"docs/migrating-from-torch.md"}
BY_DAY = {*FIRST_SCREENS, *ONLY_ON_TORCH}

RUNNING = [page for page in PAGES if code_blocks(page)]
ALONE = [page for page in PAGES if code_blocks(page, "runs alone")]


class Script:
    """Code that is pasted into files of a folder: `tf.function` reads its source.

    Args:
        folder: Path of the folder.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._count = 0

    def run(self, code: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
        """Runs code with names of code before it, if any; returns all names."""
        names = {"__name__": "__main__"} if names is None else names
        self._count += 1
        file = self._folder / f"pasted_{self._count}.py"
        file.write_text(code)
        exec(compile(code, str(file), "exec"), names)
        return names


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def with_marks(page: str) -> Any:
    is_quick = BACKEND == "jax" or page in BY_DAY
    return pytest.param(page, marks=() if is_quick else pytest.mark.nightly)


@pytest.mark.nightly(unless=["docs/index.md", "docs/migrating-from-torch.md"])
@pytest.mark.parametrize("page", [with_marks(page) for page in RUNNING])
def test_code_of_a_page_runs(page: str, script: Script) -> None:
    if page in ONLY_ON_JAX and BACKEND != "jax":
        pytest.skip("for JAX, as the page says")
    if page in ONLY_ON_TORCH and BACKEND != "torch":
        pytest.skip("for Torch, as the page says")
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in code_blocks(page):
        script.run(code, None if page in FIRST_SCREENS else names)


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.parametrize("page", ALONE)
def test_code_of_a_page_that_starts_processes_runs(page: str, tmp_path: Path) -> None:
    # Files of the script belong to the test.
    start = f"import os\nos.chdir({str(tmp_path)!r})\n"
    for code in code_blocks(page, "runs alone"):
        run_code(tmp_path, start + code, timeout=300)


@pytest.mark.one_backend
def test_four_lines_of_a_script_change_and_no_number(script: Script) -> None:
    short, diff = (
        code
        for page in FIRST_SCREENS
        for _, code in BLOCK.findall(PAGES[page])
        if is_diff(code)
    )
    lines = diff.splitlines()
    assert len([line for line in lines if line[0] == "+"]) == 4
    # The README has the lines that change, and the script after the change.
    assert short.splitlines() == [line for line in lines if line[0] in "+-"]
    script_of_readme, after = code_blocks("README.md")[0], side_of_diff(diff, "+")
    assert script_of_readme.split() == after.split()
    weights = [
        script.run(side_of_diff(diff, sign))["model"].get_weights() for sign in "-+"
    ]
    for before, after in zip(*weights, strict=True):
        np.testing.assert_allclose(after, before, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.one_backend
def test_scripts_of_the_readme_run_in_an_interactive_interpreter() -> None:
    for code in code_blocks("README.md"):
        process = subprocess.run(
            [sys.executable, "-i", "-q"],
            input=code,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert "Error" not in process.stderr, process.stderr
        assert re.search("loss: 0|^0", process.stdout, re.M), process.stdout


#: The column of the home page's table, and what an engine lacks where it says "no".
COLUMNS = {
    "several devices": None,
    "several workers": Feature.WORKERS,
    "elastic workers": Feature.ELASTIC_WORKERS,
    "model parallel": Feature.SHARDED_VARIABLES,
    "sharded checkpoints": Feature.SHARDED_CHECKPOINTS,
    "parameter servers": Feature.PARAMETER_SERVERS,
    "TPU": Feature.TPUS,
    "`sync_batch_norm=False`": Feature.SEPARATE_BATCH_NORM,
}


def test_the_table_of_what_works_where_is_what_the_package_says() -> None:
    table = PAGES["docs/index.md"].partition("<!-- what works where -->\n")[2]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.lstrip().partition("\n\n")[0].splitlines()
    ]
    names = {"JAX": "jax", "Torch": "torch", "TensorFlow": "tensorflow"}
    assert header[1:] == list(names)
    assert [row[0] for row in rows] == list(COLUMNS)
    engine = get_engine()
    column = [names.get(name) for name in header].index(engine.name)
    said = {row[0] for row in rows if row[column] == "no"}
    lacks = {name for name, feature in COLUMNS.items() if feature in engine.lacks}
    assert said == lacks
    (is_memory_only,) = {
        row[column] == "memory only" for row in rows if row[0] == "model parallel"
    }
    assert is_memory_only == engine.gathers_shards
    # What the table leaves out is how a dataset is iterated.
    assert {*COLUMNS.values()} - {None} == set(Feature)
