"""Operations that change shapes: the rows may move to another axis."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from keras_strategies.rows.placed import (
    Placed,
    added,
    axes_of,
    joined,
    mixed,
    place_constant,
    rows_of_shapes,
    varying_axis,
)
from keras_strategies.rows.propagation import Step, of_axis, rule


@of_axis("Rearrange", "tensor")
def _rearranged(step: Step, placed: Placed) -> Placed:
    sides = step.static("pattern").split("->")
    before, after = (re.findall(r"\w+|\(.*?\)", side) for side in sides)
    own = before[placed.axis]
    if own not in after:
        return mixed("takes rows apart")
    return placed.at(after.index(own))


@of_axis("Reshape Ravel")
def _reshaped(step: Step, placed: Placed) -> Placed:
    before, shapes = step.shapes("x")[0], step.out_shapes()
    into, after = varying_axis(shapes), shapes[0]
    if into is None:
        return mixed("loses the rows")
    blocks = math.prod(before[: placed.axis]) * placed.blocks
    multiple = math.prod(before[placed.axis + 1 :]) * placed.multiple
    # If they do not divide, the rows are not as many as the entries there.
    blocks //= math.prod(after[:into])
    multiple //= math.prod(after[into + 1 :])
    return replace(placed, axis=into, blocks=blocks, multiple=multiple)


@of_axis("Transpose Swapaxes Moveaxis ExpandDims Squeeze")
@of_axis("Split ArraySplit Hsplit Vsplit Dsplit Unstack")
def _permuted(step: Step, placed: Placed) -> Placed:
    is_squeeze = step.name == "Squeeze" and step.attribute("axis") is None
    if is_squeeze and step.placements.is_any:
        return mixed("drops the rows where there is one")
    return step.moved(placed)


@rule("BroadcastTo")
def _broadcast(step: Step) -> Placed:
    ((placed, rank),) = step.leaves("x")
    axis = varying_axis(step.out_shapes())
    if axis is not None and not placed.is_rows:
        if placed.is_constant:
            return rows_of_shapes(step.out_shapes(), step.counts)
        return mixed("repeats a value for each row")
    return joined([(placed, rank)], step.out_rank) if placed.is_rows else placed


@rule("Repeat Tile Pad")
def _longer(step: Step) -> Placed:
    (placed,), before, after = step.placed("x"), step.shapes("x"), step.out_shapes()
    if step.name == "Pad":
        value = step.static("constant_values")
        is_linear = not value and step.attribute("mode") == "constant"
        if (placed.is_sum or placed.power) and not is_linear:
            return mixed("pads a sum over rows, or what depends on their number")
    into = varying_axis(after)
    if step.name == "Repeat" and (placed.is_rows or into is None):
        repeats = [node.operation.repeats for node in step.nodes]
        if not place_constant(repeats, step.counts).is_constant:
            return mixed("repeats as often as the number of rows says")
    if not placed.is_rows:
        if into is None:
            return placed
        is_one = ((1,) * len(after[0]) + before[0])[into - len(after[0])] == 1
        if placed.is_constant and is_one and step.name != "Pad":
            return rows_of_shapes(after, step.counts)
        return mixed("repeats by the rows")
    axis = placed.axis + len(after[0]) - len(before[0])
    if step.name == "Repeat" and step.attribute("axis") is None:
        return mixed("repeats entries of all rows")
    ratio = after[0][axis] // before[0][placed.axis]
    if step.name == "Repeat" and int(step.attribute("axis")) % len(after[0]) == axis:
        if not isinstance(step.attribute("repeats"), int):
            return mixed("changes the number of rows")
        return replace(placed, axis=axis, multiple=placed.multiple * ratio)
    if step.name == "Pad" and ratio != 1:
        return mixed("changes the number of rows")
    return replace(placed, axis=axis, blocks=placed.blocks * ratio)


@rule("Concatenate Append Hstack Vstack Dstack Stack")
def _concatenated(step: Step) -> Placed:
    leaves = step.leaves()
    found = added(leaves, leaves[0][1])
    if found.is_rows and any(each.is_same for each, _ in leaves):
        return mixed("joins rows with a constant")
    return step.moved(found)


@of_axis("Diagonal Trace")
def _diagonal(step: Step, placed: Placed) -> Placed:
    pair = [step.attribute("axis1"), step.attribute("axis2")]
    if placed.axis in axes_of(pair, step.rank("x")):
        return mixed("takes a diagonal of the rows")
    return step.moved(placed)
