"""The table of losses and metrics on the page of split calls.

PYTHONPATH=tests python -m row_parts.page_table

writes it; `test_page_table.py` compares it with the tested lists.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from row_parts.functions import LABELS, LOSSES, METRICS, NEWER_LOSSES, Function

PAGE = Path(__file__).parents[2] / "docs" / "contributors" / "split-calls.md"
_BLOCK = re.compile(
    r"(<!-- losses and metrics: begin -->\n).*(<!-- losses and metrics: end -->)",
    re.DOTALL,
)
#: Why a function gets all rows, for the problem of its proof.
_REASONS = {
    "reads the value of a tensor": "it compares each row with the others",
    "with other rows": "it compares each row with the others",
    "a sum over rows": "it divides sums over all rows",
    LABELS: "it looks whether all labels are 0 or 1",
}
_OWN = "on own rows"
#: The losses of the table.
LISTED_LOSSES = [loss for loss in LOSSES if loss not in NEWER_LOSSES]


def table() -> str:
    """Each loss and metric, where it is computed, and why, as Markdown."""
    return "\n".join(["| | Torch | TensorFlow |", "|---|---|---|", *_rows()]) + "\n"


def with_table(text: str) -> str:
    """The page with the table as the lists are now."""
    return _BLOCK.sub(lambda found: f"{found[1]}\n{table()}\n{found[2]}", text)


def _rows() -> Iterator[str]:
    for function in LISTED_LOSSES:
        yield _row("losses", function)
    yield f"| `losses.CTC` | {_OWN} | all rows: no rule covers its operations |"
    for function in METRICS:
        yield _row("metrics", function)


def _row(module: str, function: Function) -> str:
    place = _OWN
    if function.joined:
        place = f"all rows: {_REASONS[function.joined]}"
    return f"| `{module}.{function.name}` | {place} | {place} |"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
