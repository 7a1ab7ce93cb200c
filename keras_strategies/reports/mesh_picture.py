"""A picture of a mesh of devices and of how variables are sharded over it."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.layouts import Axes, VariableMesh

# Colours of devices; a picture seldom has more.
_COLOURS = "tab20"


def draw(
    mesh: VariableMesh | None,
    variables: Sequence[tuple[str, tuple[int, ...], Axes]],
    largest: int,
) -> Any:
    """Draws the mesh, and the largest variables as rectangles, a part for each shard.

    A shard has the colour of the first device that holds it and the names of all.

    Args:
        mesh: the mesh of devices.
        variables: path, shape and layout of each.
        largest: int, how many to draw.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    if mesh is None:
        raise InvalidArgumentError(
            "There is no mesh to draw: this strategy does not shard variables. "
            "`ks.ModelParallelStrategy` does."
        )
    chosen = sorted(variables, key=lambda v: -math.prod(v[1]))
    chosen = [v for v in chosen if len(v[1]) > 0][: max(largest, 1)]
    columns = min(3, len(chosen))
    rows = math.ceil(len(chosen) / columns) if columns else 0
    figure = _figure(11, 2.2 + 2.6 * rows)
    heights = [0.8, *[1.0] * rows]
    grid = figure.add_gridspec(rows + 1, max(columns, 1), height_ratios=heights)
    _draw_mesh(figure.add_subplot(grid[0, :]), mesh)
    for i, (path, shape, axes) in enumerate(chosen):
        place = figure.add_subplot(grid[1 + i // columns, i % columns])
        _draw_variable(place, mesh, path, shape, axes)
    return figure


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that a notebook shows, also before it has used `pyplot`."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return Picture(figsize=(width, height), layout="constrained")


def _colour(mesh: VariableMesh, device: Any) -> Any:
    import matplotlib

    return matplotlib.colormaps[_COLOURS](mesh.devices.index(device) % 20)


def _draw_mesh(place: Any, mesh: VariableMesh) -> None:
    from matplotlib.patches import Rectangle

    rows = mesh.rows
    for i, row in enumerate(rows):
        for j, device in enumerate(row):
            y = len(rows) - 1 - i
            place.add_patch(
                Rectangle((j, y), 0.94, 0.9, color=_colour(mesh, device), alpha=0.75)
            )
            place.text(j + 0.47, y + 0.45, str(device), ha="center", va="center")
        place.text(
            -0.1,
            len(rows) - 0.55 - i,
            f"rows {i + 1}/{len(rows)} of a batch",
            ha="right",
            va="center",
        )
    place.set_xlim(-0.1, len(rows[0]))
    place.set_ylim(-0.05, len(rows))
    place.set_aspect("auto")
    sizes = ", ".join(f"{axis}: {size}" for axis, size in mesh.sizes.items())
    place.set_title(f"The mesh of devices ({sizes})", fontsize=11)
    place.axis("off")


def _draw_variable(
    place: Any, mesh: VariableMesh, path: str, shape: tuple[int, ...], axes: Axes
) -> None:
    from matplotlib.patches import Rectangle

    full = (*axes, *[None] * (len(shape) - len(axes)))
    down, across = _drawn_axes(full, len(shape))
    down_parts = _parts(mesh, full, down)
    across_parts = _parts(mesh, full, across)
    for i in range(down_parts):
        for j in range(across_parts):
            devices = _shard_devices(mesh, full, {down: i, across: j})
            y = 1 - (i + 1) / down_parts
            place.add_patch(
                Rectangle(
                    (j / across_parts, y),
                    0.98 / across_parts,
                    0.98 / down_parts,
                    color=_colour(mesh, devices[0]),
                    alpha=0.75,
                )
            )
            place.text(
                (j + 0.5) / across_parts,
                y + 0.5 / down_parts,
                _names(devices, 1 if across_parts > 2 else 2),
                ha="center",
                va="center",
                fontsize=7,
            )
    place.set_xlim(0, 1)
    place.set_ylim(0, 1)
    place.set_xticks([])
    place.set_yticks([])
    _label(place.set_ylabel, shape, full, down)
    _label(place.set_xlabel, shape, full, across)
    name = "/".join(path.split("/")[-3:])
    size = " x ".join(map(str, shape))
    kept = "replicated" if not any(full) else ""
    place.set_title("\n".join(filter(None, [name, size, kept])), fontsize=8)


def _drawn_axes(full: Axes, rank: int) -> tuple[int | None, int]:
    """Two axes of a variable, sharded ones first; one for a vector."""
    if rank == 1:
        return None, 0
    sharded = [i for i, axis in enumerate(full) if axis is not None]
    rest = [i for i in reversed(range(rank)) if i not in sharded]
    first, second = sorted([*sharded, *rest][:2])
    return first, second


def _parts(mesh: VariableMesh, full: Axes, axis: int | None) -> int:
    name = None if axis is None else full[axis]
    return mesh.sizes[name] if name else 1


def _shard_devices(
    mesh: VariableMesh, full: Axes, part: dict[int | None, int]
) -> list[Any]:
    """The devices of one shard of a variable."""
    found = []
    for number, device in enumerate(mesh.devices):
        where: dict[str, int] = {}
        rest = number
        for axis, size in reversed(list(mesh.sizes.items())):
            rest, where[axis] = divmod(rest, size)
        sharded = {i: name for i, name in enumerate(full) if name is not None}
        if all(where[sharded[i]] == n for i, n in part.items() if i in sharded):
            found.append(device)
    return found


def _names(devices: Sequence[Any], per_line: int) -> str:
    names = [str(device) for device in devices[:8]]
    if len(devices) > 8:
        names.append(f"and {len(devices) - 8}")
    lines = [", ".join(names[i : i + per_line]) for i in range(0, len(names), per_line)]
    return "\n".join(lines)


def _label(
    set_label: Any, shape: tuple[int, ...], full: Axes, axis: int | None
) -> None:
    if axis is None:
        return
    sharded = f", sharded along {full[axis]!r}" if full[axis] else ""
    set_label(f"axis {axis}: {shape[axis]}{sharded}", fontsize=7)
