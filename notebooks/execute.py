"""Execute notebooks and store their outputs in them.

    KERAS_BACKEND=jax python notebooks/execute.py notebooks/01_mirrored_fit.ipynb

A digest of the code goes to the metadata. A test compares it with the code, so that
outputs of another version of a notebook are not committed.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from pathlib import Path
from typing import Any

KEY = "keras_strategies"
# Of Gloo, and of Ray.
LOGS = re.compile(r"\[Gloo\]|\(raylet\)")


def digest(notebook: Any) -> str:
    """A name for the code of a notebook."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def without_logs(outputs: list[Any]) -> list[Any]:
    """The outputs without what frameworks log, on either stream."""
    kept = []
    for output in outputs:
        if output.output_type == "stream":
            lines = output.text.splitlines(keepends=True)
            output.text = "".join(line for line in lines if not LOGS.search(line))
            if output.name == "stderr" or not output.text:
                continue
        kept.append(output)
    return kept


def execute(path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False
    )
    client.execute(cwd=str(path.parent))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = without_logs(cell.outputs)
    notebook.metadata[KEY] = {
        "backend": os.environ.get("KERAS_BACKEND", "chosen in the notebook"),
        "code": digest(notebook),
    }
    # Of the Python that ran it.
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


def main() -> None:
    for name in sys.argv[1:]:
        execute(Path(name))


if __name__ == "__main__":
    main()
