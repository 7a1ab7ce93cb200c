"""The picture of a report: kinds of values in the order of computation."""

from __future__ import annotations

import html
from collections.abc import Mapping

from keras_strategies.verification.trainings import KINDS

EQUAL, DIFFERENT, BEHIND = "#2e7d32", "#c62828", "#9e9e9e"
_WIDTH, _HEIGHT, _GAP = 92, 44, 12
# Boxes in a line: the pages of notebooks are narrow.
_COLUMNS = 7


def picture(gaps: Mapping[str, float]) -> str:
    """An SVG with a box for each kind: equal, different, or behind what differs.

    Args:
        gaps: the largest difference of each kind that differs, at first the first one
            in the order of computation; empty if all are equal.
    """
    kinds = [*KINDS, *(kind for kind in gaps if kind not in KINDS)]
    first = kinds.index(next(iter(gaps))) if gaps else len(kinds)
    across, down = _WIDTH + _GAP, _HEIGHT + _GAP
    width, height = _COLUMNS * across, -(-len(kinds) // _COLUMNS) * down
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" style="max-width: 100%; height: auto" '
        'font-family="sans-serif" font-size="11" text-anchor="middle" fill="white">'
    ]
    for i, kind in enumerate(kinds):
        if kind in gaps:
            color, text = DIFFERENT, f"{gaps[kind]:.1e}"
        elif i < first:
            color, text = EQUAL, "equal"
        else:
            color, text = BEHIND, ""
        left, top = i % _COLUMNS * across, i // _COLUMNS * down
        middle = left + _WIDTH / 2
        parts.append(
            f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" '
            f'fill="{color}"/>'
            f'<text x="{middle}" y="{top + 18}">{html.escape(kind)}</text>'
            f'<text x="{middle}" y="{top + 34}">{text}</text>'
        )
    return "".join([*parts, "</svg>"])
