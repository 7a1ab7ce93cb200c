"""Writes the table of versions of docs/versions.md from what CI runs.

    python tests/packaging/versions.py            # write
    python tests/packaging/versions.py --check    # exit with 1 if the table differs

Ranges are those of pyproject.toml, pins those of constraints.txt, and Python and
releases those of the matrices of .github/workflows/ci.yml. CI checks the table.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "versions.md"
_BLOCK = re.compile(r"(<!-- versions -->\n).*?(<!-- end -->)", re.DOTALL)
_PACKAGES = ("keras", "jax", "torch", "tensorflow")


def table() -> str:
    """The Markdown of the table."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    changes = jobs["test"]["strategy"]["matrix"]["include"]
    nights = jobs["nightly"]["strategy"]["matrix"]
    pythons = sorted({row["python"] for row in changes})
    lines = [
        "| | the wheel allows | tested with each change | tested each night |",
        "|---|---|---|---|",
        f"| Python | {project['requires-python']} | {', '.join(pythons)} | "
        f"{', '.join(nights['python'])} |",
    ]
    newest = any(row.get("releases") == "newest" for row in changes)
    for name in _PACKAGES:
        pin = _pin(name)
        by_day, night = [pin], [pin]
        if name == "keras":
            by_day += _nightly(row["keras"] for row in changes)
            night += _nightly(nights["keras"])
        if newest:
            by_day.append("the newest allowed")
        cells = [name, _range(project, name), ", ".join(by_day), ", ".join(night)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _nightly(given: Any) -> list[str]:
    return ["keras-nightly, which may fail"] if "nightly" in set(given) else []


def _range(project: dict[str, Any], name: str) -> str:
    lines = project["optional-dependencies"].get(name, project["dependencies"])
    (found,) = [Requirement(line) for line in lines if Requirement(line).name == name]
    return ", ".join(sorted(map(str, found.specifier), reverse=True))


def _pin(name: str) -> str:
    text = (ROOT / "constraints.txt").read_text()
    found = re.search(rf"^{name}==(\S+)$", text, re.MULTILINE)
    assert found is not None, f"constraints.txt does not pin {name}"
    return found[1]


def rewritten(text: str) -> str:
    """The page with the table as it is now."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{table()}\n\n{found[2]}", text)


def main() -> None:
    text = PAGE.read_text()
    if "--check" not in sys.argv:
        PAGE.write_text(rewritten(text))
    elif rewritten(text) != text:
        sys.exit(f"Run `python tests/packaging/versions.py`: {PAGE} differs.")


if __name__ == "__main__":
    main()
