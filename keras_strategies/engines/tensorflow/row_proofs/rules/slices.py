"""Rules of slices, padding, and operations along axes."""

from __future__ import annotations

from dataclasses import dataclass

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    GraphPlacement,
    Kind,
    MixesRowsError,
)
from keras_strategies.engines.tensorflow.row_proofs.node import (
    Node,
    Result,
    Rule,
    rules,
)

_BY_NUMBER = "rows are chosen by their number"
_BY_COUNT = "a size or position that is computed from the number of rows"


@dataclass(frozen=True)
class _Axis:
    """An axis of a strided slice.

    Args:
        source: int, the axis of the unsliced tensor.
        target: int, the axis of the slice; None for an index, whose axis is dropped.
        entry: int, the entry of `begin`, `end` and `strides`; None for a full axis.
    """

    source: int
    target: int | None
    entry: int | None


class _StridedSlice:
    """The slice of a `StridedSlice`, or of its gradient."""

    def __init__(self, node: Node, is_gradient: bool):
        self._masks = {
            name: node.attribute(f"{name}_mask")
            for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
        }
        self._strides = node.numbers(3)
        count = len(self._strides[0])
        self._begin, self._end = (
            node.numbers(i) if node.inputs[i].values is not None else None
            for i in (1, 2)
        )
        rank = node.output_rank() if is_gradient else node.rank(0)
        self.axes = self._found_axes(count, rank)

    def _has(self, mask: str, entry: int) -> bool:
        return bool(self._masks[mask] >> entry & 1)

    def _found_axes(self, count: int, rank: int) -> list[_Axis]:
        given = sum(
            not (self._has("new_axis", i) or self._has("ellipsis", i))
            for i in range(count)
        )
        axes: list[_Axis] = []
        source = target = 0
        entries: list[int | None] = list(range(count))
        for i in range(count):
            if self._has("ellipsis", i):
                entries[i : i + 1] = [None] * (rank - given)
                break
        else:
            entries += [None] * (rank - given)
        for entry in entries:
            if entry is not None and self._has("new_axis", entry):
                target += 1
                continue
            if entry is not None and self._has("shrink_axis", entry):
                axes.append(_Axis(source, None, entry))
            else:
                axes.append(_Axis(source, target, entry))
                target += 1
            source += 1
        return axes

    def is_fixed(self, axis: _Axis) -> bool:
        """Whether the entries of an axis do not depend on the number of rows."""
        i = axis.entry
        if i is None:
            return True
        if len({stride[i] for stride in self._strides}) > 1:
            return False
        return all(
            self._has(mask, i)
            or bounds is None
            or len({bound[i] for bound in bounds}) == 1
            for mask, bounds in (("begin", self._begin), ("end", self._end))
        )

    def is_full(self, axis: _Axis, sizes: list[int]) -> bool:
        """Whether all entries of an axis, of such sizes, are taken in their order."""
        i = axis.entry
        if i is None:
            return True
        if axis.target is None or any(stride[i] != 1 for stride in self._strides):
            return False
        begins = self._has("begin", i) or (
            self._begin is not None and not any(begin[i] for begin in self._begin)
        )
        ends = self._has("end", i) or (
            self._end is not None
            and all(end[i] >= size for end, size in zip(self._end, sizes, strict=True))
        )
        return begins and ends


def strided_slice(node: Node) -> Result:
    """`StridedSlice(input, begin, end, strides)` and `StridedSliceGrad`."""
    is_gradient = node.type == "StridedSliceGrad"
    given = node.inputs[4 if is_gradient else 0]
    if not given.has_rows:
        raise MixesRowsError(_BY_COUNT)
    slices = _StridedSlice(node, is_gradient)
    found: GraphPlacement | None = None
    sizes = [given.multiple * count for count in node.counts]
    for axis in slices.axes:
        here = axis.target if is_gradient else axis.source
        if here != given.axis:
            if not slices.is_fixed(axis):
                raise MixesRowsError(_BY_COUNT)
            continue
        if not slices.is_full(axis, sizes):
            raise MixesRowsError(_BY_NUMBER)
        new = axis.source if is_gradient else axis.target
        assert new is not None
        found = given.but(axis=new, values=None)
    if found is None:
        raise MixesRowsError(_BY_NUMBER)
    return found


def slice_(node: Node) -> Result:
    """`Slice(input, begin, size)`."""
    given, begins, sizes = node.inputs[0], node.numbers(1), node.numbers(2)
    if not given.has_rows:
        raise MixesRowsError(_BY_COUNT)
    axis = given.axis
    others = [
        (begin[:axis] + begin[axis + 1 :], size[:axis] + size[axis + 1 :])
        for begin, size in zip(begins, sizes, strict=True)
    ]
    if any(each != others[0] for each in others):
        raise MixesRowsError(_BY_COUNT)
    for begin, size, count in zip(begins, sizes, node.counts, strict=True):
        if begin[axis] or size[axis] not in (-1, given.multiple * count):
            raise MixesRowsError(_BY_NUMBER)
    return given.without_values()


def update_slice(node: Node) -> Result:
    """`XlaDynamicUpdateSlice(input, update, indices)`, of slices with all rows."""
    given, update = node.inputs[:2]
    starts = node.numbers(2)
    if not (given.has_rows and update.has_rows) or given.axis != update.axis:
        raise MixesRowsError(f"{update} put into {given}")
    if any(start != starts[0] for start in starts):
        raise MixesRowsError(_BY_COUNT)
    if starts[0][given.axis] or given.multiple != update.multiple:
        raise MixesRowsError(_BY_NUMBER)
    if given.power != update.power:
        raise MixesRowsError(f"{update} put into {given}")
    return given.but(values=None, is_zero=False)


def pad(node: Node) -> Result:
    """`Pad`, `PadV2`, `MirrorPad` and its gradient: `(input, paddings, ...)`."""
    given, paddings = node.inputs[0], node.numbers(1)
    if not given.has_rows:
        raise MixesRowsError(f"{given} is padded")
    if any(each != paddings[0] for each in paddings):
        raise MixesRowsError(_BY_COUNT)
    if any(paddings[0][2 * given.axis : 2 * given.axis + 2]):
        raise MixesRowsError("rows are padded")
    if len(node.inputs) > 2 and not node.inputs[2].is_plain:
        raise MixesRowsError(f"rows are padded with {node.inputs[2]}")
    if given.power and node.type == "PadV2":
        raise MixesRowsError(f"{given} is padded")
    return given.without_values()


def along(axis_input: int) -> Rule:
    """The rule of operations along the axes that an input numbers."""

    def apply(node: Node) -> Result:
        given = node.inputs[0]
        if any(not each.is_plain for each in node.inputs[1:]):
            raise MixesRowsError(_BY_COUNT)
        if given.kind is Kind.PART or given.power:
            raise MixesRowsError(f"of {given}")
        if given.axis in node.axes(axis_input, node.rank(0)):
            raise MixesRowsError("along the rows")
        return given.without_values()

    return Rule(apply)


def linear_along(axis_input: int) -> Rule:
    """As `along`, for operations that are linear."""

    def apply(node: Node) -> Result:
        if any(not each.is_plain for each in node.inputs[1:]):
            raise MixesRowsError(_BY_COUNT)
        given = node.inputs[0]
        if given.axis in node.axes(axis_input, node.rank(0)):
            raise MixesRowsError("along the rows")
        return given.without_values()

    return Rule(apply, moves=0)


RULES: dict[str, Rule] = {
    **rules("StridedSlice", strided_slice, moves=0, takes_counts=True),
    **rules("StridedSliceGrad", strided_slice, moves=4, takes_counts=True),
    **rules("Slice", slice_, moves=0, takes_counts=True),
    **rules("XlaDynamicUpdateSlice", update_slice, takes_counts=True),
    **rules("Pad MirrorPad MirrorPadGrad", pad, moves=0, takes_counts=True),
    **rules("PadV2", pad, takes_counts=True),
    "Cumsum": linear_along(1),
    "ReverseV2": linear_along(1),
    "Roll": linear_along(2),
    "Cumprod": along(1),
    "CumulativeLogsumexp": along(1),
}
