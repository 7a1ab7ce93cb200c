"""Tables of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; short rows end with empty cells."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for row in rows:
        cells = [*row, *[""] * (len(header) - len(row))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
