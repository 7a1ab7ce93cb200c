"""Pictures of what a terminal shows, drawn from the text of a page.

    python docs/terminal.py

A picture is the first block of text of a page that begins with given words.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
#: The page of each picture, and the begin of the text.
PICTURES = {
    "top.svg": ("guides/multi-worker.md", "train.py: 2 workers"),
    "verify_report.svg": ("guides/verify.md", "Verification of"),
}
_LINE, _COLUMN, _EDGE = 18, 7.3, 16


def text_of(name: str) -> str:
    """The text that a picture shows.

    Raises:
        LookupError: if its page has no such text.
    """
    page, begin = PICTURES[name]
    for block in re.findall(r"```text\n(.*?)\n```", (DOCS / page).read_text(), re.S):
        if block.startswith(begin):
            return str(block)
    raise LookupError(f"{page} has no text that begins with {begin!r}")


def _fixed(line: str) -> str:
    """A line in which renderers do not join spaces."""
    return escape(line).replace(" ", "\N{NO-BREAK SPACE}")


def picture(text: str) -> str:
    """An SVG of a terminal with a text."""
    lines = text.splitlines()
    width = round(2 * _EDGE + _COLUMN * max(map(len, lines)))
    height = 2 * _EDGE + _LINE * len(lines)
    rows = "\n".join(
        f'<text x="{_EDGE}" y="{_EDGE + _LINE * i + 13}">{_fixed(line)}</text>'
        for i, line in enumerate(lines)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="12" '
        'fill="#e6edf3">\n'
        f"<title>{escape(lines[0])}</title>\n"
        f'<rect width="{width}" height="{height}" rx="8" fill="#0e2236"/>\n'
        f"{rows}\n</svg>\n"
    )


if __name__ == "__main__":
    for name in PICTURES:
        (DOCS / "img" / name).write_text(picture(text_of(name)))
