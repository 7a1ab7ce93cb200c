"""Text tables of `describe`, `plan`, `status` and `doctor`.

A title, a rule, columns two spaces apart with numbers to the right; totals and then
facts, a name and a value each, under further rules. Sizes are in binary units with one
decimal, counts have thousands separators.
"""

from __future__ import annotations

import abc
import html
from collections.abc import Sequence
from dataclasses import dataclass

_GAP = "  "
Row = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Prints as text, and as a table in a notebook.

    Args:
        title: str, what the table is of.
        header: tuple of str, the names of the columns.
        rows: tuple of tuples of str.
        numbers: the columns, by name, that are aligned to the right.
        totals: tuple of tuples of str, rows under the others.
        facts: tuple of pairs of str, names and values under the table.
        note: str, a line at the end; may be empty.
    """

    title: str
    header: Row
    rows: tuple[Row, ...]
    numbers: frozenset[str] = frozenset()
    totals: tuple[Row, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    note: str = ""

    def __str__(self) -> str:
        shown = [self.header, *map(self._formatted, (*self.rows, *self.totals))]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = [self._line(cells, widths) for cells in shown]
        facts = fact_lines(self.facts)
        line = rule(max(map(len, (self.title, *lines, *facts))))
        body, sums = lines[1 : 1 + len(self.rows)], lines[1 + len(self.rows) :]
        parts = [[lines[0]], body, sums, facts]
        text = [self.title]
        for part in parts:
            text += [line, *part] if part else []
        return "\n".join([*text, self.note] if self.note else text)

    def _repr_html_(self) -> str:
        body = "".join(self._html(self._formatted(row), "td") for row in self.rows)
        sums = "".join(self._html(self._formatted(row), "th") for row in self.totals)
        facts = "".join(
            f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for name, value in self.facts
        )
        return (
            f"<table><caption>{html.escape(self.title)}</caption>"
            f"<thead>{self._html(self.header, 'th')}</thead>"
            f"<tbody>{body}</tbody><tfoot>{sums}</tfoot></table>"
            + (f"<table><tbody>{facts}</tbody></table>" if facts else "")
            + (f"<p>{html.escape(self.note)}</p>" if self.note else "")
        )

    def _line(self, cells: Row, widths: Sequence[int]) -> str:
        aligned = (
            cell.rjust(width) if name in self.numbers else cell.ljust(width)
            for name, cell, width in zip(self.header, cells, widths, strict=True)
        )
        return _GAP.join(aligned).rstrip()

    def _formatted(self, cells: Row) -> Row:
        return tuple(
            readable_count(int(cell))
            if name in self.numbers and cell.isdigit()
            else cell
            for name, cell in zip(self.header, cells, strict=True)
        )

    def _html(self, cells: Row, tag: str) -> str:
        inner = "".join(
            f'<{tag} style="text-align:{"right" if name in self.numbers else "left"}">'
            f"{html.escape(cell)}</{tag}>"
            for name, cell in zip(self.header, cells, strict=True)
        )
        return f"<tr>{inner}</tr>"


class ShownAsTable(abc.ABC):
    """A report that prints as a table, and in a notebook is one."""

    @abc.abstractmethod
    def _table(self) -> Table:
        """The table."""

    def __str__(self) -> str:
        return str(self._table())

    def __repr__(self) -> str:
        return str(self._table())

    def _repr_html_(self) -> str:
        return self._table()._repr_html_()


def rule(width: int) -> str:
    """The line between the parts of a table."""
    return "-" * width


def fact_lines(facts: Sequence[tuple[str, str]], least: int = 0) -> list[str]:
    """Names and values in two columns; further lines of a value are indented.

    Args:
        facts: pairs of str.
        least: int, the least width of the names.
    """
    width = max([least, *(len(name) for name, _ in facts)])
    lines = []
    for name, value in facts:
        names = [name, *[""] * value.count("\n")]
        for left, right in zip(names, value.split("\n"), strict=True):
            lines.append(f"{left.ljust(width)}{_GAP}{right}".rstrip())
    return lines


def readable_bytes(nbytes: float) -> str:
    """A size: `512 B`, `1.5 KiB`, `3.0 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def readable_count(count: int) -> str:
    """A number of things: `1,800`."""
    return f"{count:,}"


def counted(count: int, what: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{readable_count(count)} {what}{'s' * (count != 1)}"
