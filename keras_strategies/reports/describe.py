"""`strategy.describe(model)`: table of the placement of variables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.layouts import Axes, VariableMesh
from keras_strategies.runtime.data_parallel.call_notes import (
    ONE_PROGRAM,
    notes_of,
    parallel_share,
    reason,
    share_text,
)
from keras_strategies.runtime.data_parallel.row_parts import joins_of
from keras_strategies.runtime.placement import axes_of, check_layouts
from keras_strategies.text_tables import ShownAsTable, Table, counted, readable_bytes

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

_SIZE = "bytes per device"
_CALLS = "calls"
_HEADER = ("variable", "shape", "dtype", "placement", _SIZE)
MESH_HEADER = ("variable", "shape", "dtype", "layout", _SIZE)
NUMBERS = frozenset({_SIZE})


@dataclass(frozen=True, repr=False)
class Description(ShownAsTable):
    """A table of variables; prints as text, and as a table in a notebook.

    Args:
        title: str, the strategy and its replicas.
        rows: tuple of tuples of str: name, shape, dtype, devices, bytes; where
            variables are sharded over a mesh, the layout in place of the devices; and
            how their layer was called, once it was.
        totals: dict from device name to the bytes that variables take there.
        step_copies: tuple of str, devices that also get copies for the time of a
            step.
        mesh: the mesh that variables are sharded over; None where they are not.
        joins: tuple of str, lines that needed all rows of outputs of the model on one
            device, and the outputs' shapes, so far.
        all_rows: tuple of str, the layers that were called with all rows on one device,
            and why.
        parallel: float, the share of the multiplications by weights, in calls so far,
            that replicas have divided; None before a call, on one replica, and on JAX,
            where XLA divides the step.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    totals: dict[str, int]
    step_copies: tuple[str, ...] = ()
    mesh: VariableMesh | None = None
    joins: tuple[str, ...] = ()
    all_rows: tuple[str, ...] = ()
    parallel: float | None = None

    def _table(self) -> Table:
        header: tuple[str, ...] = _HEADER if self.mesh is None else MESH_HEADER
        is_called = bool(self.rows) and len(self.rows[0]) > len(header)
        end = ("",) if is_called else ()
        totals = tuple(
            ("total" if i == 0 else "", "", "", device, readable_bytes(nbytes), *end)
            for i, (device, nbytes) in enumerate(self.totals.items())
        )
        facts = []
        if self.parallel is not None:
            facts.append(("in parallel", f"{share_text(self.parallel)}, so far"))
        elif is_called and any(row[-1] == ONE_PROGRAM for row in self.rows):
            facts.append(("in parallel", "not counted: XLA divides the program"))
        facts += [("all rows", text) for text in self.all_rows]
        notes: list[str] = []
        if self.step_copies:
            notes.append(
                "During a step, copies of the variables that it reads are also on "
                f"{', '.join(self.step_copies)}."
            )
        if self.joins:
            notes.append(
                "All rows of outputs were joined on one device of each worker for "
                f"{', '.join(self.joins)}."
            )
        if is_called:
            header = (*header, _CALLS)
        note = " ".join(notes)
        return Table(self.title, header, self.rows, NUMBERS, totals, tuple(facts), note)


def layout_text(axes: Axes, rank: int) -> str:
    """A layout as text: `(-, model)`; `replicated` for a copy on every device."""
    if not any(axes):
        return "replicated"
    full = [*axes, *[None] * (rank - len(axes))]
    return f"({', '.join(axis or '-' for axis in full)})"


def describe(strategy: StrategyCore, model: Any) -> Description:
    """The table of a model's, its optimizer's and its metrics' variables."""
    variables = all_variables(model)
    if not variables:
        raise InvalidArgumentError(
            f"Model {model.name!r} has no variables yet. Build it first, with "
            "`model.build(input_shape)` or a first `fit`."
        )
    check_layouts(strategy.placement, model)
    mesh = strategy.placement.mesh
    rows = []
    totals: dict[str, int] = {}
    inside = sublayers(model)
    notes = notes_of(inside) if strategy.num_replicas_in_sync > 1 else {}
    how = {id(v): note.how for layer, note in notes.items() for v in layer.variables}
    for variable in variables:
        copies = strategy.drivers.fit.copies(variable)
        for copy in copies:
            totals[copy.device] = totals.get(copy.device, 0) + copy.nbytes
        sizes = {readable_bytes(copy.nbytes) for copy in copies}
        shape = "x".join(str(n) for n in variable.shape) or "scalar"
        where = ", ".join(copy.device for copy in copies)
        if mesh is not None:
            where = layout_text(axes_of(mesh, variable), len(variable.shape))
        called = (how.get(id(variable), ""),) if notes else ()
        size = " / ".join(sorted(sizes))
        rows.append((variable.path, shape, variable.dtype, where, size, *called))
    homes = set(totals)
    visited = [str(d) for d in strategy.placement.replicas if str(d) not in homes]
    title = title_of(strategy, model)
    return Description(
        title,
        tuple(rows),
        totals,
        tuple(visited),
        mesh,
        tuple(f"{line} (shape {shape})" for line, shape in joins_of(inside).items()),
        tuple(reason(*each) for each in notes.items() if each[1].why),
        parallel_share(notes.values()),
    )


def title_of(strategy: StrategyCore, model: Any) -> str:
    """`MirroredStrategy: 2 replicas, model 'digits'`, and the mesh, if any."""
    name, mesh = type(strategy).__name__, strategy.placement.mesh
    if mesh is not None:
        grid = " x ".join(f"{size} {axis}" for axis, size in mesh.sizes.items())
        name += f" {mesh.rule.name!r}, {grid}"
    replicas = counted(strategy.num_replicas_in_sync, "replica")
    return f"{name}: {replicas}, model {model.name!r}"


def all_variables(model: Any) -> list[Any]:
    """Variables of a model, its optimizer and its metrics, each once."""
    found = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        found += model.optimizer.variables
    found += model.metrics_variables
    return list({id(variable): variable for variable in found}.values())
