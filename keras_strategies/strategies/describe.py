"""`strategy.describe(model)`: where the variables of a model are, as a table."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.layouts import Axes, VariableMesh
from keras_strategies.strategies.picture import draw

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy

_HEADER = ("variable", "shape", "dtype", "lives on", "bytes per device")
_MESH_HEADER = ("variable", "shape", "dtype", "layout", "bytes per device")


@dataclass(frozen=True)
class Description:
    """A table of variables; prints as text, and as a table in a notebook.

    Args:
        title: str, the strategy and its replicas.
        rows: tuple of tuples of str: name, shape, dtype, devices, bytes; where
            variables are cut over a mesh, the layout in place of the devices.
        totals: dict from device name to the bytes that variables take there.
        step_copies: tuple of str, devices that also get copies for the time of a
            step.
        mesh: the grid that variables are cut over; None where they are whole.
        layouts: path, shape and layout of each variable of the model, for `plot`.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    totals: dict[str, int]
    step_copies: tuple[str, ...] = ()
    mesh: VariableMesh | None = None
    layouts: tuple[tuple[str, tuple[int, ...], Axes], ...] = ()

    def plot(self, largest: int = 6) -> Any:
        """A picture of the mesh and of how the largest variables are cut.

        Args:
            largest: int, how many variables to draw.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ValueError: if the strategy has no mesh.
        """
        return draw(self.mesh, self.layouts, largest)

    @property
    def _header(self) -> tuple[str, ...]:
        return _MESH_HEADER if self.mesh is not None else _HEADER

    def _total_rows(self) -> list[tuple[str, ...]]:
        return [
            ("sum" if i == 0 else "", "", "", device, readable_bytes(nbytes))
            for i, (device, nbytes) in enumerate(self.totals.items())
        ]

    def _note(self) -> str:
        if not self.step_copies:
            return ""
        return (
            "During a step, copies of the variables that it reads are also on "
            f"{', '.join(self.step_copies)}."
        )

    def __str__(self) -> str:
        header = self._header
        rows = [header, *self.rows, *self._total_rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]

        def line(row: tuple[str, ...]) -> str:
            cells = [c.ljust(w) for c, w in zip(row[:-1], widths, strict=False)]
            return "  ".join([*cells, row[-1].rjust(widths[-1])]).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        body = [line(row) for row in self.rows]
        sums = [line(row) for row in self._total_rows()]
        lines = [self.title, rule, line(header), rule, *body, rule, *sums]
        return "\n".join([*lines, self._note()] if self._note() else lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            inner = "".join(
                f'<{tag} style="text-align:{"right" if i == 4 else "left"}">'
                f"{html.escape(cell)}</{tag}>"
                for i, cell in enumerate(cells)
            )
            return f"<tr>{inner}</tr>"

        body = "".join(row(cells, "td") for cells in self.rows)
        sums = "".join(row(cells, "th") for cells in self._total_rows())
        return (
            f"<table><caption>{html.escape(self.title)}</caption>"
            f"<thead>{row(self._header, 'th')}</thead><tbody>{body}</tbody>"
            f"<tfoot>{sums}</tfoot></table><p>{html.escape(self._note())}</p>"
        )


def layout_text(axes: Axes, rank: int) -> str:
    """A layout for people: `(-, model)`; `whole` for a copy on every device."""
    if not any(axes):
        return "whole"
    full = [*axes, *[None] * (rank - len(axes))]
    return f"({', '.join(axis or '-' for axis in full)})"


def readable_bytes(nbytes: int) -> str:
    """A size for people: `512 B`, `1.5 KiB`, `3.0 GiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{nbytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def describe(strategy: Strategy, model: Any) -> Description:
    """The table of a model's, its optimizer's and its metrics' variables."""
    variables = all_variables(model)
    if not variables:
        raise InvalidArgumentError(
            f"Model {model.name!r} has no variables yet. Build it first, with "
            "`model.build(input_shape)` or a first `fit`."
        )
    strategy.trainer.check_layouts(model)
    mesh = strategy.placement.mesh
    rows = []
    totals: dict[str, int] = {}
    for variable in variables:
        copies = strategy.trainer.copies(variable)
        for copy in copies:
            totals[copy.device] = totals.get(copy.device, 0) + copy.nbytes
        sizes = {readable_bytes(copy.nbytes) for copy in copies}
        shape = "x".join(str(n) for n in variable.shape) or "scalar"
        where = ", ".join(copy.device for copy in copies)
        if mesh is not None:
            where = layout_text(strategy.trainer.axes(variable), len(variable.shape))
        rows.append(
            (variable.path, shape, variable.dtype, where, " / ".join(sorted(sizes)))
        )
    layouts: tuple[tuple[str, tuple[int, ...], Axes], ...] = ()
    if mesh is not None:
        layouts = tuple(
            (v.path, tuple(v.shape), strategy.trainer.axes(v)) for v in model.variables
        )
    homes = set(totals)
    visited = [str(d) for d in strategy.placement.replicas if str(d) not in homes]
    count = strategy.num_replicas_in_sync
    title = (
        f"{type(strategy).__name__}: {count} replica{'s' * (count != 1)}, "
        f"model {model.name!r}"
    )
    return Description(title, tuple(rows), totals, tuple(visited), mesh, layouts)


def all_variables(model: Any) -> list[Any]:
    """Variables of a model, its optimizer and its metrics, each once."""
    found = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        found += model.optimizer.variables
    found += model.metrics_variables
    return list({id(variable): variable for variable in found}.values())
