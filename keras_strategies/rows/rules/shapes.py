"""Operations that change shapes: the rows may move to another axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from keras_strategies.rows.placed import (
    Placed,
    are_equal,
    as_sum,
    axes_of,
    joined,
    mixed,
    rows_of_shapes,
    varying_axis,
)
from keras_strategies.rows.rules.step import Step, rule


@rule("Reshape Ravel")
def _reshaped(step: Step) -> Placed:
    (placed,) = step.placed("x")
    if not placed.has_axis:
        return placed
    into = varying_axis(step.out_shapes())
    before, after = step.shapes("x")[0], step.out_shapes()[0]
    if into is None:
        return mixed("loses the rows")
    blocks = math.prod(before[: placed.axis]) * placed.blocks
    multiple = math.prod(before[placed.axis + 1 :]) * placed.multiple
    blocks, rest = divmod(blocks, math.prod(after[:into]))
    multiple, other_rest = divmod(multiple, math.prod(after[into + 1 :]))
    if rest or other_rest:
        return mixed("splits the rows in another order")
    return replace(placed, axis=into, blocks=blocks, multiple=multiple)


def _permuted(step: Step, order: Sequence[int]) -> Placed:
    placed = step.placed()[0]
    if placed.axis is None or not placed.is_rows:
        return placed
    return placed.at(list(order).index(placed.axis))


@rule("Transpose")
def _transposed(step: Step) -> Placed:
    rank, axes = step.rank("x"), step.attribute("axes")
    return _permuted(step, axes_of(axes, rank) if axes else range(rank)[::-1])


@rule("Swapaxes Moveaxis Rot90")
def _swapped(step: Step) -> Placed:
    rank = step.rank_of_first
    # An array whose shape has the number of each axis.
    numbered = np.broadcast_to(np.empty((1,) * rank), range(2, rank + 2))
    if step.name == "Swapaxes":
        moved = np.swapaxes(numbered, step.attribute("axis1"), step.attribute("axis2"))
    elif step.name == "Moveaxis":
        source = step.attribute("source")
        moved = np.moveaxis(numbered, source, step.attribute("destination"))
    else:
        axes, k = step.attribute("axes"), step.attribute("k")
        placed = step.placed()[0]
        if placed.is_rows and placed.axis in axes_of(list(axes), rank):
            return mixed("turns the rows")
        moved = np.rot90(numbered, k, axes)
    return _permuted(step, [size - 2 for size in moved.shape])


@rule("ExpandDims Squeeze")
def _other_rank(step: Step) -> Placed:
    (placed,) = step.placed("x")
    if not placed.has_axis:
        return placed
    rank = step.rank("x")
    if step.name == "ExpandDims":
        added = set(axes_of(step.attribute("axis"), step.out_rank))
        kept = [axis for axis in range(step.out_rank) if axis not in added]
        return placed.at(kept[placed.axis])
    axis = step.attribute("axis")
    shape = step.shapes("x")[-1]
    gone = axes_of(axis, rank)
    if axis is None:
        gone = [i for i in range(rank) if shape[i] == 1]
        if step.placements.is_any:
            return mixed("drops the rows where there is one")
    if placed.axis in gone:
        return mixed("drops the rows")
    return placed.at(placed.axis - sum(each < placed.axis for each in gone))


@rule("BroadcastTo")
def _broadcast(step: Step) -> Placed:
    ((placed, rank),) = step.leaves("x")
    axis = varying_axis(step.out_shapes())
    if axis is not None and not placed.is_rows:
        if placed.is_constant:
            return rows_of_shapes(step.out_shapes(), step.counts)
        return mixed("repeats a value for each row")
    if placed.is_sum or not placed.is_rows:
        return placed
    return joined([(placed, rank)], step.out_rank)


@rule("Repeat Tile Pad")
def _longer(step: Step) -> Placed:
    (placed,), before, after = step.placed("x"), step.shapes("x"), step.out_shapes()
    if step.name == "Pad":
        value = step.static("constant_values")
        if placed.is_sum and (value or step.attribute("mode") != "constant"):
            return mixed("pads a sum over rows")
        if placed.power and value:
            return mixed("pads what depends on the number of rows")
    into = varying_axis(after)
    if step.name == "Repeat" and (placed.has_axis or into is None):
        counts = [node.operation.repeats for node in step.nodes]
        if not all(are_equal(counts[0], each) for each in counts):
            return mixed("repeats as often as the number of rows says")
    if not placed.has_axis:
        if into is None:
            return placed
        is_one = ((1,) * len(after[0]) + before[0])[into - len(after[0])] == 1
        if placed.is_constant and is_one and step.name != "Pad":
            return rows_of_shapes(after, step.counts)
        return mixed("repeats by the rows")
    axis = placed.axis + len(after[0]) - len(before[0])
    if step.name == "Repeat" and step.attribute("axis") is None:
        return mixed("repeats entries of all rows")
    repeats = step.attribute("repeats")
    if step.name == "Repeat" and int(step.attribute("axis")) % len(after[0]) != axis:
        return placed.at(axis)
    ratio, rest = divmod(after[0][axis], before[0][placed.axis])
    if step.name != "Repeat" and ratio == 1 and not rest:
        return placed.at(axis)
    if step.name == "Repeat" and isinstance(repeats, int):
        return replace(placed, axis=axis, multiple=placed.multiple * ratio)
    if step.name == "Tile" and not rest:
        return replace(placed, axis=axis, blocks=placed.blocks * ratio)
    return mixed("changes the number of rows")


@rule("Concatenate Append Hstack Vstack Dstack Stack")
def _concatenated(step: Step) -> Placed:
    leaves = step.leaves()
    rank, out_rank = leaves[0][1], step.out_rank
    fixed = {"Hstack": 1 if rank > 1 else 0, "Vstack": 0, "Dstack": 2}
    axis = fixed.get(step.name, step.attribute("axis"))
    if axis is None:
        return mixed("appends flat rows")
    axis = int(axis) % out_rank
    sums = [each for each, _ in leaves if each.is_sum]
    if sums and all(as_sum(each, sums[0].power) for each, _ in leaves):
        return sums[0]
    powers = {each.power for each, _ in leaves}
    found = joined(leaves, rank, same_power=len(powers) > 1)
    if found.has_axis:
        if any(each.is_same for each, _ in leaves):
            return mixed("joins rows with a constant")
        if step.name == "Stack":
            found = found.at(found.axis + (axis <= found.axis))
        elif found.axis == axis:
            return mixed("has rows of one argument after those of another")
    return found.times(max(powers)) if len(powers) == 1 else found


@rule("Split ArraySplit Hsplit Vsplit Dsplit Unstack")
def _split(step: Step) -> Placed:
    (placed,), rank = step.placed("x"), step.rank("x")
    fixed = {"Hsplit": 1 if rank > 1 else 0, "Vsplit": 0, "Dsplit": 2}
    axis = fixed.get(step.name, step.attribute("axis", 0)) % rank
    if not placed.has_axis:
        return placed
    if placed.axis == axis:
        return mixed("takes rows apart")
    return placed.at(placed.axis - (step.name == "Unstack" and axis < placed.axis))


@rule("Diagonal Trace")
def _diagonal(step: Step) -> Placed:
    (placed,), rank = step.placed("x"), step.rank("x")
    pair = axes_of([step.attribute("axis1"), step.attribute("axis2")], rank)
    if not placed.has_axis:
        return placed
    if placed.axis in pair:
        return mixed("takes a diagonal of the rows")
    return placed.at(placed.axis - sum(axis < placed.axis for axis in pair))
