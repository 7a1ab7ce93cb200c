"""Pages of the site whose sources are outside of `docs/`: notebooks and changes.

A hook of MkDocs. Notebooks come with the outputs that `notebooks/execute.py` has
stored; the last picture of each is that of the gallery. Nothing is executed here.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]


def last_picture(notebook: Path) -> bytes:
    """The last PNG that the cells of a notebook have drawn."""
    cells = json.loads(notebook.read_text())["cells"]
    drawn = [
        output["data"]["image/png"]
        for cell in cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    if not drawn:
        raise ValueError(f"{notebook} has no picture: run notebooks/execute.py.")
    return base64.b64decode("".join(drawn[-1]))


@event_priority(100)  # Before the plugin that makes pages of notebooks.
def on_files(files: Any, config: Any) -> Any:
    """Adds changelog.md, notebooks/NAME.ipynb and img/tutorials/NAME.png."""
    changes = (ROOT / "CHANGELOG.md").read_text().replace("](docs/", "](")
    changes = changes.replace("](notebooks)", "](tutorials/index.md)")
    files.append(File.generated(config, "changelog.md", content=changes))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = File(
            f"notebooks/{notebook.name}",
            str(ROOT),
            config.site_dir,
            config.use_directory_urls,
        )
        files.append(page)
        picture = f"img/tutorials/{notebook.stem}.png"
        files.append(File.generated(config, picture, content=last_picture(notebook)))
    return files
