"""Prints the table of the field suite: `python -m tests.field.table [FOLDER]`.

The tests append a line for each case and backend to `.test-logs/field/BACKEND.jsonl`,
or to the folder KS_FIELD_RESULTS. The last line of a case counts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

BACKENDS = ("jax", "torch", "tensorflow")
HEADER = (
    *("case", "backend", "weights", "disturbed", "loss"),
    *("split calls", "first fit alone", "first fit", "verdict"),
)


def read(folder: Path) -> list[dict[str, Any]]:
    """The last result of each case and backend, by case."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for backend in BACKENDS:
        path = folder / f"{backend}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            found[row["name"], backend] = row
    names = dict.fromkeys(name for name, _ in found)
    return [found[n, b] for n in names for b in BACKENDS if (n, b) in found]


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = [row[key] for key in ("weights", "disturbed", "loss")]
    return (
        row["name"],
        row["backend"],
        *("" if value is None else f"{value:.1e}" for value in numbers),
        f"{row['split']} of {row['calls']}" if row["calls"] else "",
        f"{row['seconds_alone']:.1f} s",
        f"{row['seconds']:.1f} s",
        row["verdict"] + (", unsplit" if row["unsplit"] else ""),
    )


def text(rows: list[dict[str, Any]]) -> str:
    """The table, with a line that counts the verdicts of each backend."""
    lines = [HEADER, *map(cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADER))]
    lines.insert(1, tuple("-" * width for width in widths))
    table = [
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    for backend in BACKENDS:
        own = [row for row in rows if row["backend"] == backend]
        good = sum(row["verdict"] in ("equal", "rounding") for row in own)
        if own:
            table.append(f"{backend}: {good} of {len(own)} as on one device")
            table += _shares(backend, own)
    return "\n".join(table)


def _shares(backend: str, rows: list[dict[str, Any]]) -> list[str]:
    """How many cases are split, in whole or but for layers that a warning names."""
    proved = [row for row in rows if row["calls"]]
    if not proved:
        return []
    whole = sum(row["split"] == row["calls"] for row in proved)
    unnamed = [row["name"] for row in proved if row["unnamed"]]
    named = len(proved) - whole - len(unnamed)
    layers = sum(row["split"] for row in proved), sum(row["calls"] for row in proved)
    return [
        f"{backend}: every call split in {whole} of {len(proved)} cases, all but named "
        f"ones in {named}, unnamed in {len(unnamed)} {' '.join(unnamed)}; "
        f"{layers[0]} of {layers[1]} layers"
    ]


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    given = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("KS_FIELD_RESULTS")
    print(text(read(Path(given) if given else root / ".test-logs" / "field")))


if __name__ == "__main__":
    main()
