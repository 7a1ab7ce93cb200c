"""The figure of the package's README: folders and their imports, as Mermaid text.

PYTHONPATH=tests python tests/architecture/figure.py    # writes it there
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

from architecture.import_graph import import_graph
from architecture.package_source import REPOSITORY, package_source

README = REPOSITORY / "keras_strategies" / "README.md"
BEGIN, END = "<!-- figure: begin -->\n", "<!-- figure: end -->"
# The boxes, from the top down; a module that is in no box is left out.
ROWS = (
    ("tools", "experimental"),
    ("parameter_server",),
    ("strategies",),
    ("training", "reports"),
    ("input", "collectives"),
    ("engines",),
    ("runtime",),
    ("processes",),
    ("cluster", "keras_compat"),
)
VOCABULARY = "vocabulary"
WORDS = ("errors", "user_warnings", "types", "devices", "values", "layouts", "context")


def box_of(module: str) -> str | None:
    folder = module.partition(".")[0]
    if folder in WORDS:
        return VOCABULARY
    return folder if any(folder in row for row in ROWS) else None


def edges(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Imports between boxes that point down, without those that others imply."""
    height = {box: i for i, row in enumerate(reversed(ROWS), 1) for box in row}
    height[VOCABULARY] = 0
    counts: Counter[tuple[str, str]] = Counter()
    for module, targets in graph.items():
        for target in targets:
            pair = box_of(module), box_of(target)
            if None not in pair and pair[0] != pair[1]:
                counts[pair] += 1  # type: ignore[index]
    down = {(a, b) for a, b in counts if height[a] > height[b]}
    below: dict[str, set[str]] = {}
    for box in sorted(height, key=height.__getitem__):
        direct = {b for a, b in down if a == box}
        below[box] = direct.union(*(below[b] for b in direct))
    return {
        (a, b)
        for a, b in down
        if not any(b in below[c] for a2, c in down if a2 == a and c != b)
    }


def figure(graph: dict[str, set[str]]) -> str:
    lines = ["```mermaid", "flowchart TD"]
    for i, row in enumerate((*ROWS, (VOCABULARY,))):
        lines.append(f"    subgraph row{i}[ ]")
        lines += [f"        {box}" for box in row]
        lines.append("    end")
    lines += [f"    {a} --> {b}" for a, b in sorted(edges(graph))]
    lines += [f"    row{i} ~~~ row{j}" for i, j in pairwise(range(len(ROWS) + 1))]
    return "\n".join([*lines, "```"]) + "\n"


def with_figure(text: str, drawn: str) -> str:
    """The text of the README with a figure between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{drawn}{END}{after}"


def current() -> str:
    return figure(import_graph(package_source()))


if __name__ == "__main__":
    path = Path(README)
    path.write_text(with_figure(path.read_text(), current()))
