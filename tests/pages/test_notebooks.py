"""Every notebook runs from top to bottom on the backend under test.

One that chooses its backend itself is run with that one. They run at night, in kernels
of their own.
"""

from __future__ import annotations

import re
from pathlib import Path

import keras
import pytest

pytestmark = pytest.mark.one_backend

_CHOICE = re.compile(r'environ\[\\"KERAS_BACKEND\\"\] = \\"(\w+)\\"')


def _is_for_this_backend(path: Path) -> bool:
    choice = _CHOICE.search(path.read_text())
    return choice is None or choice[1] == keras.backend.backend()


FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = [
    path for path in sorted(FOLDER.glob("*.ipynb")) if _is_for_this_backend(path)
]


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_draws(path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    # The kernel inherits KERAS_BACKEND.
    client = NotebookClient(notebook, timeout=600, kernel_name="python3")
    client.execute(cwd=str(path.parent))
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert pictures
    assert not [o for o in outputs if o.output_type == "error"]
