"""Rules of operations that fill, repeat, reshape and move tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    SAME,
    ZERO,
    GraphPlacement,
    Kind,
    MixesRowsError,
    NoRuleError,
)
from keras_strategies.engines.tensorflow.row_proofs.node import (
    Node,
    Result,
    Rule,
    rules,
)


def filled(
    node: Node, shapes: Sequence[Sequence[int]], value: GraphPlacement
) -> GraphPlacement:
    """The placement of equal entries in a shape that may have rows."""
    axis = node.row_axis(shapes)
    if axis is None:
        return value.without_values()
    return axis.but(power=value.power, is_zero=value.is_zero)


def fill(node: Node) -> Result:
    """`Fill(dims, value)`."""
    sizes, value = node.inputs
    if value.kind is not Kind.SAME:
        raise MixesRowsError(f"a tensor filled with {value}")
    if sizes.is_plain and sizes.values is None:
        return value.without_values()
    return filled(node, node.numbers(0), value)


def empty(node: Node) -> Result:
    """`Empty(shape)`, with attribute `init`: zeros."""
    if not node.attribute("init"):
        raise NoRuleError("a tensor without values")
    return filled(node, node.numbers(0), ZERO)


def broadcast_to(node: Node) -> Result:
    """`BroadcastTo(input, shape)`."""
    given, shapes = node.inputs[0], node.numbers(1)
    added = len(shapes[0]) - node.rank(0)
    found = node.row_axis(shapes)
    if given.has_rows:
        axis = given.axis + added
        if found is None or (found.axis, found.multiple) != (axis, given.multiple):
            raise MixesRowsError("rows are broadcast along other rows")
        return given.but(axis=axis, values=None)
    if found is None:
        return given.without_values()
    own_axis = found.axis - added
    if given.kind is not Kind.SAME or (own_axis >= 0 and node.sizes(0)[own_axis] != 1):
        raise MixesRowsError(f"{given} broadcast to rows")
    return found.but(power=given.power, is_zero=given.is_zero)


def tile(node: Node) -> Result:
    """`Tile(input, multiples)`."""
    given, multiples = node.inputs[0], node.numbers(1)
    if given.has_rows:
        if node.row_axis(multiples) or any(each[given.axis] != 1 for each in multiples):
            raise MixesRowsError("rows are repeated")
        return given.without_values()
    if node.row_axis(multiples) is None:
        return given.without_values()
    if given.kind is not Kind.SAME:
        raise MixesRowsError(f"{given} repeated")
    sizes = [_known(size) for size in node.sizes(0)]
    shapes = [[a * b for a, b in zip(each, sizes, strict=True)] for each in multiples]
    found = filled(node, shapes, given)
    if found.has_rows and found.multiple % sizes[found.axis]:
        raise MixesRowsError("a constant is repeated for a part of the rows")
    return found


def reshape(node: Node) -> Result:
    """`Reshape(tensor, shape)`."""
    given, shapes = node.inputs[0], node.shapes(0)
    targets = _targets(node)
    if not given.has_rows and _has_no_rows(node, targets):
        return given.without_values()
    if given.is_zero and not any(-1 in target for target in targets):
        return filled(node, targets, given)
    if not given.has_rows:
        raise MixesRowsError(f"{given} reshaped to rows")
    if shapes is None or any(target.count(-1) > 1 for target in targets):
        raise NoRuleError("a reshape of unknown sizes")
    full = [_completed(t, s) for t, s in zip(targets, shapes, strict=True)]
    if given.outer > 1:
        if given.axis or any(a[0] != b[0] for a, b in zip(full, shapes, strict=True)):
            raise MixesRowsError("rows are reshaped with their repetitions")
        return given.without_values()
    axis = node.row_axis(full)
    before = math.prod(shapes[0][: given.axis])
    if axis is None or math.prod(full[0][: axis.axis]) != before:
        raise MixesRowsError(f"{shapes[0]} is reshaped to {full[0]}, across rows")
    return given.but(axis=axis.axis, multiple=axis.multiple, values=None)


def _targets(node: Node) -> list[list[int]]:
    if node.inputs[1].values is not None:
        return node.numbers(1)
    if node.inputs[1].kind is not Kind.SAME or node.inputs[1].power:
        raise NoRuleError("a reshape to unknown sizes")
    sizes = [-1 if size is None else size for size in node.output_sizes()]
    return [sizes for _ in node.counts]


def _has_no_rows(node: Node, targets: Sequence[Sequence[int]]) -> bool:
    """Whether no size of the target depends on the number of rows."""
    return all(list(target) == list(targets[0]) for target in targets)


def _completed(target: Sequence[int], shape: Sequence[int]) -> list[int]:
    """A target shape with the size that -1 stands for."""
    if -1 not in target:
        return list(target)
    rest = -math.prod(target)
    return [math.prod(shape) // rest if d == -1 else d for d in target] if rest else []


def expand_dims(node: Node) -> Result:
    """`ExpandDims(input, axis)`."""
    given, new = node.inputs[0], node.axes(1, node.rank(0) + 1)[0]
    return given.but(axis=given.axis + (new <= given.axis), values=None)


def squeeze(node: Node) -> Result:
    """`Squeeze(input)`, with attribute `squeeze_dims`."""
    given, sizes = node.inputs[0], node.sizes(0)
    gone = [axis % len(sizes) for axis in node.attribute("squeeze_dims")] or [
        axis for axis, size in enumerate(sizes) if size == 1
    ]
    if given.axis in gone:
        raise MixesRowsError("the axis of the rows is squeezed")
    return given.but(axis=given.axis - sum(k < given.axis for k in gone), values=None)


def transpose(node: Node) -> Result:
    """`Transpose(x, perm)`."""
    given = node.inputs[0]
    return given.but(axis=node.axes(1, 0).index(given.axis), values=None)


def _alike(node: Node, tensors: Sequence[int]) -> GraphPlacement:
    """The placement of a concatenation of inputs, if they are placed alike."""
    given = [node.inputs[i] for i in tensors]
    counted = [each for each in given if not each.is_zero] or given[:1]
    first = counted[0].but(values=None, is_zero=all(each.is_zero for each in given))
    traits = {(p.kind, p.axis, p.multiple, p.power, p.outer) for p in counted}
    if len(traits) > 1 or first.kind not in (Kind.SAME, Kind.ROWS, Kind.PART):
        raise MixesRowsError("a concatenation of " + _listed(given))
    for i, each in zip(tensors, given, strict=True):
        if each.has_rows == first.has_rows:
            continue
        # A zero, which has another shape unless its sizes are unknown.
        if each.has_rows or node.sizes(i)[first.axis] is not None:
            raise MixesRowsError("a concatenation of " + _listed(given))
    return first


def _listed(placements: Sequence[GraphPlacement]) -> str:
    return ", ".join(dict.fromkeys(map(str, placements)))


def pack(node: Node) -> Result:
    """`Pack(values)`, with attribute `axis`."""
    new = node.attribute("axis") % (node.rank(0) + 1)
    found = _alike(node, range(len(node.inputs)))
    if not found.has_rows:
        return found
    return found.but(axis=found.axis + (new <= found.axis))


def unpack(node: Node) -> Result:
    """`Unpack(value)`, with attribute `axis`."""
    given, gone = node.inputs[0], node.attribute("axis") % node.rank(0)
    if given.axis == gone:
        raise MixesRowsError("rows are unstacked")
    return given.but(axis=given.axis - (gone < given.axis), values=None)


def concatenate(node: Node) -> Result:
    """`ConcatV2(values, axis)`."""
    last = len(node.inputs) - 1
    found = _alike(node, range(last))
    if found.has_rows and node.axes(last, node.rank(0))[0] == found.axis:
        raise MixesRowsError("a concatenation along the rows")
    return found


def split(node: Node) -> Result:
    """`Split(split_dim, value)`, `SplitV(value, size_splits, split_dim)`."""
    value, axis = (1, 0) if node.type == "Split" else (0, 2)
    given = node.inputs[value]
    if given.kind is Kind.PART or (given.kind is Kind.SAME):
        return given.without_values()
    if node.axes(axis, node.rank(value))[0] == given.axis:
        raise MixesRowsError("a split along the rows")
    return given.without_values()


def space_to_batch(node: Node) -> Result:
    """`SpaceToBatchND(input, block_shape, paddings)`."""
    given = node.inputs[0]
    if given.axis or given.multiple > 1 or given.outer > 1:
        raise MixesRowsError("blocks of rows that are not along axis 0")
    return given.but(outer=math.prod(node.numbers(1)[0]), values=None)


def batch_to_space(node: Node) -> Result:
    """`BatchToSpaceND(input, block_shape, crops)`."""
    given = node.inputs[0]
    if given.axis or given.outer != math.prod(node.numbers(1)[0]):
        raise MixesRowsError("rows are split into blocks")
    return given.but(outer=1, values=None)


def range_(node: Node) -> Result:
    """`Range(start, limit, delta)`, with as many entries as rows.

    The gradients of `top_k` and of a gather with batch dimensions address entries of
    flattened rows by numbers that begin at 0 on each replica.
    """
    starts, limits, steps = (node.numbers(i) for i in range(3))
    if "gradient_tape" not in node.operation.name or any(start[0] for start in starts):
        raise MixesRowsError("numbers of rows")
    if len({step[0] for step in steps}) > 1:
        raise MixesRowsError("numbers of rows")
    lengths = [
        [-(-(limit[0] - start[0]) // step[0])]
        for start, limit, step in zip(starts, limits, steps, strict=True)
    ]
    axis = node.row_axis(lengths)
    if axis is None:
        return SAME
    return axis.but(offset=steps[0][0] * axis.multiple)


def _known(size: int | None) -> int:
    if size is None:
        raise NoRuleError("unknown sizes")
    return size


RULES: dict[str, Rule] = {
    **rules("Fill", fill, takes_counts=True),
    **rules("Empty", empty, takes_counts=True),
    **rules("BroadcastTo", broadcast_to, moves=0, takes_counts=True),
    **rules("Tile", tile, moves=0, takes_counts=True),
    **rules(
        "Reshape",
        reshape,
        moves=0,
        takes_counts=True,
        keeps_outer=True,
        takes_offsets=True,
    ),
    **rules("ExpandDims", expand_dims, moves=0, keeps_outer=True, takes_offsets=True),
    **rules("Squeeze", squeeze, moves=0, keeps_outer=True, takes_offsets=True),
    **rules("Transpose ConjugateTranspose", transpose, moves=0),
    **rules("Pack", pack),
    **rules("Unpack", unpack, moves=0),
    **rules("ConcatV2", concatenate),
    **rules("Split", split, moves=1),
    **rules("SplitV", split, moves=0),
    **rules("SpaceToBatchND", space_to_batch),
    **rules("BatchToSpaceND", batch_to_space, keeps_outer=True),
    **rules("Range", range_, takes_counts=True),
}
