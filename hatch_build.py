"""Metadata of the wheel that depend on the address of the project.

`KS_PROJECT_URL=https://host/owner/name python -m build` puts links to the source, the
pages, the issues and the changes into the wheel, and makes the links of the README
absolute, which are relative to the repository. Without it the wheel has none.
`KS_SITE_URL` is the address of the pages, where they are published as a site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

# Of a link or a picture to a file of the repository.
_LINK = re.compile(r"(!?)(\[[^]]*\]\()(?!https?://|#)([^)]+\))")


class ProjectAddress(MetadataHookInterface):
    """Sets the fields `urls` and `readme`."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text()
        address = os.environ.get("KS_PROJECT_URL", "").rstrip("/")
        if address:
            tag = f"v{metadata['version']}"
            text = _LINK.sub(
                lambda found: (
                    f"{found[1]}{found[2]}{address}/"
                    f"{'raw' if found[1] else 'blob'}/{tag}/{found[3]}"
                ),
                text,
            )
            metadata["urls"] = {
                "Source": address,
                "Documentation": os.environ.get(
                    "KS_SITE_URL", f"{address}/blob/{tag}/docs/index.md"
                ),
                "Changes": f"{address}/blob/{tag}/CHANGELOG.md",
                "Issues": f"{address}/issues",
            }
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
