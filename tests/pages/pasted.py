"""Code of the README and the pages, as a reader pastes it.

A mark above a block says where the tests run it:

    <!-- runs -->         in a process of the tests; the blocks of a page share their
                          names, those of the README and the home page are alone
    <!-- runs alone -->   as a script of its own, at night: it starts processes
    <!-- runs on ray -->  on a Ray cluster, at night, in `ray_engine/test_pages.py`
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
#: A mark, if any, and the code below it.
BLOCK = re.compile(
    r"^(?:<!-- (runs[\w ]*) -->\n)?```(?:python|diff)\n(.*?)^```$", re.DOTALL | re.M
)
#: Pages that a reader pastes a block of, without those before it.
FIRST_SCREENS = ("README.md", "docs/index.md")


def code_blocks(page: str, marked: str = "runs") -> list[str]:
    """The code of a page; of a diff, the script after the change."""
    found = [code for mark, code in BLOCK.findall(PAGES[page]) if mark == marked]
    return [side_of_diff(code, "+") if is_diff(code) else code for code in found]


def is_diff(code: str) -> bool:
    return all(line[:1] in " +-" for line in code.splitlines())


def side_of_diff(code: str, sign: str) -> str:
    lines = [line[1:] for line in code.splitlines() if line[:1] in ("", " ", sign)]
    return "\n".join(lines) + "\n"
