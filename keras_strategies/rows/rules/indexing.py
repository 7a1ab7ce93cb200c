"""Entries by their numbers: slices, indices, gathers and scatters."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_strategies.rows.placed import (
    Placed,
    joined,
    mixed,
    rows_of_shapes,
)
from keras_strategies.rows.propagation import Step, numbers_as_array, rule
from keras_strategies.rows.row_tensors import (
    RowCount,
    RowTensor,
    is_array,
    shape_of,
)


@rule("Slice")
def _sliced(step: Step) -> Placed:
    step.static("start_indices")
    return step.placed("inputs")[0]


@rule("SliceUpdate")
def _slice_updated(step: Step) -> Placed:
    step.static("start_indices")
    leaves = step.leaves("inputs", "updates")
    placed = joined(leaves, step.rank("inputs"))
    if placed.is_rows and not all(each.is_rows for each, _ in leaves):
        return mixed("replaces entries of rows by a constant")
    return placed


@rule("GetItem")
def _item(step: Step) -> Placed:
    (placed,), rank = step.placed("x"), step.rank("x")
    return _indexed(step, placed, [_expanded(key, rank) for key in step.values("key")])


def _expanded(key: Any, rank: int) -> list[Any]:
    """The parts of a key, one for each axis and each new axis."""
    parts = list(key) if isinstance(key, (tuple, list)) else [key]
    parts = [numbers_as_array(part) for part in parts]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    rest = [slice(None)] * (rank - used)
    numbers = (i for i, part in enumerate(parts) if part is Ellipsis)
    at = next(numbers, len(parts))
    return parts[:at] + rest + parts[at + 1 :]


def _has_count(part: slice) -> bool:
    """Whether it has a number of rows, which may be less than the length."""
    return RowCount in map(type, (part.start, part.stop, part.step))


def _has_no_bounds(part: slice) -> bool:
    """Whether it is all entries, however many there are."""
    return part.start in (None, 0) and isinstance(part.stop, (type(None), RowCount))


def _indexed(step: Step, placed: Placed, keys: list[list[Any]]) -> Placed:
    axis, by_numbers = 0, False
    picked: list[tuple[Placed, int]] = []
    for parts in zip(*keys, strict=True):
        part = parts[0]
        is_row_axis = placed.is_rows and placed.axis == axis
        if part is None:
            continue
        if isinstance(part, slice):
            sizes = [shape[axis] for shape in step.shapes("x")]
            ranges = [s.indices(size) for s, size in zip(parts, sizes, strict=True)]
            if is_row_axis:
                if ranges != [(0, size, 1) for size in sizes]:
                    return mixed("takes some rows")
                if step.placements.is_any and not all(map(_has_no_bounds, parts)):
                    return mixed("takes at most a number of rows")
            elif len(set(ranges)) > 1 or _has_count(part):
                return mixed("takes as many entries as there are rows")
        elif is_row_axis and not (isinstance(part, RowTensor) or is_array(part)):
            return mixed("takes one row")
        elif isinstance(part, (int, np.integer)):
            if len(set(parts)) > 1:
                return mixed("takes an entry by the number of rows")
        elif is_row_axis:
            if placed.layout != (1, 1) or not step.placements.are_row_numbers(parts):
                return mixed("takes rows by their numbers")
            by_numbers, shapes = True, [shape_of(each) for each in parts]
            picked.append((rows_of_shapes(shapes, step.counts), len(shapes[0])))
        else:
            picked.append((step.placements.placed(parts)[0], len(shape_of(part))))
        axis += 1
    index = joined(picked, max((rank for _, rank in picked), default=0))
    if by_numbers:  # Entries of each row; other indices may have the rows, too.
        return step.moved(index).times(placed.power)
    if index.is_mixed:
        return index
    if index.is_rows and not placed.is_constant:
        return mixed("takes entries of rows by row")
    if len(picked) > 1 and placed.is_rows:
        return mixed("takes entries by several indices")
    return step.moved(index if index.is_rows else placed)


@rule("Take")
def _taken(step: Step) -> Placed:
    (x,), rank, axis = step.placed("x"), step.rank("x"), step.attribute("axis")
    if axis is None and x.is_rows:
        return mixed("takes entries of all rows")
    before = [slice(None)] * (int(axis or 0) % max(rank, 1))
    indices = step.values("indices")
    return _indexed(step, x, [_expanded([*before, each], rank) for each in indices])


@rule("OneHot MultiHot")
def _one_hot(step: Step) -> Placed:
    placed, rank = step.leaves()[0]
    return step.moved(joined([(placed, rank)], rank))


@rule("Digitize SearchSorted IsIn")
def _by_table(step: Step) -> Placed:
    names = {"Digitize": ("x", "bins"), "IsIn": ("x1", "x2")}
    values, table = names.get(step.name, ("values", "sorted_sequence"))
    (edges,) = step.placed(table)
    if not edges.is_constant:
        return mixed("compares with all rows")
    return joined(step.leaves(values), step.rank(values))


@rule("Scatter ScatterUpdate")
def _scattered(step: Step) -> Placed:
    (index,) = step.placed("indices")
    updates = next(name for name in ("values", "updates") if name in step.arguments[0])
    (placed,), rank = step.placed(updates), step.rank(updates)
    depth = step.shapes("indices")[0][-1]
    into = step.placed("inputs") if step.name == "ScatterUpdate" else []
    if not index.is_constant:
        return mixed("scatters to rows")
    if placed.is_rows:
        before = step.rank("indices") - 1
        if placed.axis < before:
            return mixed("scatters rows")
        placed = placed.at(placed.axis - before + depth)
    rank = rank - step.rank("indices") + 1 + depth
    found = joined([(placed, rank), *((each, rank) for each in into)], rank)
    if found.is_rows and found.axis < depth:
        return mixed("scatters to rows")
    if found.is_rows and any(each.is_same for each in [placed, *into]):
        return mixed("scatters rows to a constant")
    return found


@rule("SegmentSum SegmentMax SegmentMin SegmentProd")
def _segments(step: Step) -> Placed:
    (data,), (segments,) = step.placed("data"), step.placed("segment_ids")
    if segments.is_same and not (data.is_rows and data.axis == 0):
        if segments.power or data.power:
            return mixed("depends on the number of rows")
        return joined([(data, 0)], 0) if data.is_sum else data
    return mixed("goes over all rows")
