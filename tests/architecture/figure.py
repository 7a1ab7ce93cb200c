"""The figure of the package's README: folders and their imports, as Mermaid text.

PYTHONPATH=tests python tests/architecture/figure.py    # writes it there
"""

from __future__ import annotations

from itertools import pairwise

from architecture.import_graph import import_graph
from architecture.package_source import REPOSITORY, package_source

README = REPOSITORY / "keras_strategies" / "README.md"
BEGIN, END = "<!-- figure: begin -->\n", "<!-- figure: end -->"
#: The layers from the top down: names of boxes, which are modules or folders at the top
#: of the package, or `GROUPS` of them.
LAYERS = (
    ("tools",),
    ("public modules",),
    ("verification",),
    ("parameter_server",),
    ("strategies",),
    ("training", "reports"),
    ("input", "collectives"),
    ("engines",),
    ("loaders",),
    ("runtime",),
    ("rows",),
    ("processes", "communication"),
    ("cluster", "keras_compat"),
    ("lead",),
    ("timeline",),
    ("vocabulary",),
)
GROUPS = {
    "tools": {"tools", "__main__"},
    "public modules": {
        *("__init__", "callbacks", "layers"),
        *("cluster_resolver", "coordinator", "experimental"),
    },
    "vocabulary": {
        *("devices", "errors", "layouts", "text_tables"),
        *("types", "user_warnings", "values"),
    },
}


def box_of(module: str) -> str:
    """The box of a module.

    Raises:
        LookupError: for a folder or a module at the top that no layer has.
    """
    top = module.partition(".")[0]
    for layer in LAYERS:
        for box in layer:
            if top in GROUPS.get(box, {box}):
                return box
    raise LookupError(f"{module} is in no layer; add {top} to LAYERS")


def height_of(box: str) -> int:
    """The layer of a box, from 0 at the bottom."""
    [height] = [i for i, layer in enumerate(reversed(LAYERS)) if box in layer]
    return height


def edges(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """Imports between boxes, without those downward ones that others imply."""
    every = {
        (box_of(module), box_of(target))
        for module, targets in graph.items()
        for target in targets
    }
    every = {(a, b) for a, b in every if a != b}
    down = {(a, b) for a, b in every if height_of(a) > height_of(b)}
    below: dict[str, set[str]] = {}
    for box in sorted({box for pair in down for box in pair}, key=height_of):
        direct = {b for a, b in down if a == box}
        below[box] = direct.union(*(below[b] for b in direct))
    implied = {(a, b) for a, b in down for a2, c in down if a2 == a and b in below[c]}
    return every - implied


def _id(box: str) -> str:
    return box.replace(" ", "_")


def _node(box: str) -> str:
    return box if _id(box) == box else f"{_id(box)}[{box}]"


def figure(graph: dict[str, set[str]]) -> str:
    lines = ["```mermaid", "flowchart TD"]
    for i, layer in enumerate(LAYERS):
        lines.append(f"    subgraph row{i}[ ]")
        lines += [f"        {_node(box)}" for box in layer]
        lines.append("    end")
    lines += [f"    {_id(a)} --> {_id(b)}" for a, b in sorted(edges(graph))]
    lines += [f"    row{i} ~~~ row{j}" for i, j in pairwise(range(len(LAYERS)))]
    return "\n".join([*lines, "```"]) + "\n"


def with_figure(text: str, drawn: str) -> str:
    """The text of the README with a figure between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{drawn}{END}{after}"


def current() -> str:
    return figure(import_graph(package_source()))


if __name__ == "__main__":
    README.write_text(with_figure(README.read_text(), current()))
