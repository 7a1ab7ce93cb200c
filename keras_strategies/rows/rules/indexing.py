"""Entries by their numbers: slices, indices, gathers and scatters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_strategies.rows.placed import (
    SUM,
    Placed,
    as_array,
    joined,
    mixed,
    not_along,
    rows_of_shapes,
    varying_axis,
)
from keras_strategies.rows.row_tensors import (
    RowCount,
    RowTensor,
    is_array,
    shape_of,
)
from keras_strategies.rows.rules.step import Step, numbers_as_array, rule


@rule("Slice")
def _sliced(step: Step) -> Placed:
    (placed,), start = step.placed("inputs"), step.static("start_indices")
    if not placed.has_axis:
        is_fixed = varying_axis(step.out_shapes()) is None
        return placed if is_fixed else mixed("takes as much as there are rows")
    axis = placed.axis or 0
    pairs = zip(step.shapes("inputs"), step.out_shapes(), strict=True)
    if all(before[axis] == after[axis] for before, after in pairs):
        return placed
    return mixed(f"takes rows from {start}")


@rule("SliceUpdate")
def _slice_updated(step: Step) -> Placed:
    step.static("start_indices")
    placed = joined(step.leaves("inputs", "updates"), step.rank("inputs"))
    if not placed.has_axis:
        return placed
    axis = placed.axis or 0
    leaves = step.placed("inputs", "updates")
    if not all(each.is_rows for each in leaves):
        return mixed("replaces entries of rows by a constant")
    pairs = zip(step.shapes("inputs"), step.shapes("updates"), strict=True)
    if all(one[axis] == two[axis] for one, two in pairs):
        return placed
    return mixed("replaces rows")


@rule("GetItem")
def _item(step: Step) -> Placed:
    (placed,), rank = step.placed("x"), step.rank("x")
    return _indexed(step, placed, [_expanded(k, rank) for k in step.values("key")])


def _expanded(key: Any, rank: int) -> list[Any]:
    """The parts of a key, one for each axis and each new axis."""
    parts = list(key) if isinstance(key, (tuple, list)) else [key]
    parts = [numbers_as_array(part) for part in parts]
    used = sum(part is not None and part is not Ellipsis for part in parts)
    rest = [slice(None)] * (rank - used)
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        return parts[:at] + rest + parts[at + 1 :]
    return parts + rest


def _has_count(part: slice) -> bool:
    """Whether it has a number of rows, which may be less than the length."""
    return RowCount in map(type, (part.start, part.stop, part.step))


def _has_no_bounds(part: slice) -> bool:
    """Whether it is all entries, however many there are."""
    return part.start in (None, 0) and isinstance(part.stop, (type(None), RowCount))


def _is_tensor(part: Any) -> bool:
    return isinstance(part, RowTensor) or is_array(part)


def _indexed(step: Step, placed: Placed, keys: list[list[Any]]) -> Placed:
    axis = out = 0
    found, by_numbers = placed, False
    picked: list[tuple[int, list[Any]]] = []
    for parts in zip(*keys, strict=True):
        part = parts[0]
        is_row_axis = placed.is_rows and placed.axis == axis
        if part is None:
            out += 1
            continue
        if isinstance(part, slice):
            sizes = [shape[axis] for shape in step.shapes("x")]
            ranges = [s.indices(size) for s, size in zip(parts, sizes, strict=True)]
            if is_row_axis:
                if any(
                    r != (0, size, 1) for r, size in zip(ranges, sizes, strict=True)
                ):
                    return mixed("takes some rows")
                if step.placements.is_any and not all(map(_has_no_bounds, parts)):
                    return mixed("takes at most a number of rows")
                found = placed.at(out)
            elif len(set(ranges)) > 1 or _has_count(part):
                return mixed("takes as many entries as there are rows")
            out += 1
        elif is_row_axis and not _is_tensor(part):
            return mixed("takes one row")
        elif isinstance(part, (int, np.integer)):
            if len(set(parts)) > 1:
                return mixed("takes an entry by the number of rows")
        elif is_row_axis and not step.placements.are_row_numbers(parts):
            return mixed("takes rows by their numbers")
        else:
            by_numbers = by_numbers or is_row_axis
            picked.append((out, list(parts)))
            out += len(shape_of(part)) if len(picked) == 1 else 0
        axis += 1
    if by_numbers and placed.layout == (1, 1):
        return _own_entries(step, picked).times(placed.power)
    return _picked(step, placed, found, picked)


def _own_entries(step: Step, picked: list[Any]) -> Placed:
    """Entries of each row: its number is an index, and others may have the rows."""
    indices = []
    for _, parts in picked:
        if step.placements.are_row_numbers(parts):
            each = rows_of_shapes([shape_of(part) for part in parts], step.counts)
        else:
            each = step.placements.placed(parts)[0]
        indices.append((each, len(shape_of(parts[0]))))
    index = joined(indices, max(rank for _, rank in indices))
    return index.at(index.axis + picked[0][0]) if index.axis is not None else index


def _picked(step: Step, placed: Placed, found: Placed, picked: list[Any]) -> Placed:
    """The result of indices that are tensors."""
    if not picked:
        return found
    place = picked[0][0]
    ranks = [len(shape_of(parts[0])) for _, parts in picked]
    indices = [
        (step.placements.placed(parts)[0], rank)
        for (_, parts), rank in zip(picked, ranks, strict=True)
    ]
    if any("bool" in str(getattr(parts[0], "dtype", "")) for _, parts in picked):
        return mixed("takes as many entries as a mask says")
    index = joined(indices, max(ranks))
    if index.is_mixed:
        return index
    if index.is_rows and not placed.is_constant:
        return mixed("takes entries of rows by row")
    if len(picked) > 1 and found.is_rows:
        return mixed("takes entries by several indices")
    if index.has_axis:
        return index.at(index.axis + place)
    return index if index.is_rows else found


@rule("Take")
def _taken(step: Step) -> Placed:
    (x, rank), (index, index_rank) = step.leaves("x", "indices")
    axis = step.attribute("axis")
    if x.is_mixed or index.is_mixed:
        return x if x.is_mixed else index
    if index.power or (x.power and index.is_rows):
        return mixed("depends on the number of rows")
    if axis is None:
        if x.is_rows:
            return mixed("takes entries of all rows")
        axis = 0
    axis = int(axis) % max(rank, 1)
    if index.is_rows:
        if not x.is_same:
            hidden = x.is_rows and x.axis is None and index == x
            return index if hidden else mixed("takes entries of rows by row")
        return index if index.axis is None else index.at(index.axis + axis)
    if index.is_sum:
        return mixed("takes an entry by a sum over rows")
    if x.has_axis:
        if x.axis == axis:
            return mixed("takes rows by their numbers")
        return x.at(x.axis + (index_rank - 1 if axis < x.axis else 0))
    return x


@rule("OneHot MultiHot")
def _one_hot(step: Step) -> Placed:
    placed, rank = step.leaves()[0]
    placed = joined([(placed, rank)], rank)
    if not placed.has_axis:
        return placed
    if step.name == "MultiHot" and placed.axis == rank - 1:
        return mixed("encodes all rows at once")
    return step.moved(placed)


@rule("Digitize SearchSorted IsIn")
def _by_table(step: Step) -> Placed:
    names = {"Digitize": ("x", "bins"), "IsIn": ("x1", "x2")}
    values, table = names.get(step.name, ("values", "sorted_sequence"))
    (edges,) = step.placed(table)
    if not edges.is_constant:
        return edges if edges.is_mixed else mixed("compares with all rows")
    return joined(step.leaves(values), step.rank(values))


@rule("InTopK")
def _in_top_k(step: Step) -> Placed:
    targets, predictions = step.placed("targets")[0], step.placed("predictions")[0]
    placed = joined([(targets, 0), (predictions, 0)], 0)
    return not_along(placed, -1, step.rank("predictions"))


@rule("Scatter ScatterUpdate")
def _scattered(step: Step) -> Placed:
    (index,) = step.placed("indices")
    updates = next(name for name in ("values", "updates") if name in step.arguments[0])
    (placed,), rank = step.placed(updates), step.rank(updates)
    depth = step.shapes("indices")[0][-1]
    into = step.placed("inputs") if step.name == "ScatterUpdate" else []
    if not index.is_constant:
        return index if index.is_mixed else mixed("scatters to rows")
    if placed.has_axis:
        before = step.rank("indices") - 1
        if placed.axis < before:
            return mixed("scatters rows")
        placed = placed.at(placed.axis - before + depth)
    rank = rank - step.rank("indices") + 1 + depth
    found = joined([(placed, rank), *((each, rank) for each in into)], rank)
    if found.has_axis and found.axis is not None and found.axis < depth:
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
    both = joined([(data, 0), (segments, 0)], 0)
    is_sum = step.name == "SegmentSum" and data.is_rows and segments.is_rows
    if both.has_axis and is_sum and data == segments:
        if step.attribute("num_segments") is None:
            return mixed("goes over rows")
        return SUM
    return both if both.is_mixed else mixed("goes over all rows")


def are_row_numbers(values: Sequence[Any], counts: Sequence[int]) -> bool:
    """Whether an index is 0, 1, ..., n - 1 along one axis."""
    return all(map(is_array, values)) and all(
        np.array_equal(as_array(value).reshape(-1), np.arange(n))
        for value, n in zip(values, counts, strict=True)
    )
