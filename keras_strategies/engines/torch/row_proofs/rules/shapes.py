"""Operations that move entries: views, pieces, and tensors made of others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras_strategies.engines.torch.row_proofs.recorded_operation import (
    Operand,
    Operation,
    Varying,
)
from keras_strategies.engines.torch.row_proofs.rules.registry import rule
from keras_strategies.engines.torch.row_proofs.value_placements import (
    ZERO,
    MixesRows,
    NoRule,
    Placed,
    Shape,
    rows_of_shapes,
)

_ALONG = "along the rows"
_BY_NUMBER = "of rows by their numbers"


@rule(
    "view _unsafe_view unsafe_view reshape _reshape_alias",
    sizes=["size", "shape", "stride"],
)
def _reshape(op: Operation) -> Placed:
    source = op["self"]
    placed = source.placed
    if op.get("size") is None and op.get("shape") is None:
        return _in_other_dtype(op, source)
    if not placed.is_rows:
        if any(shape != op.shapes[0] for shape in op.shapes):
            raise MixesRows("to a shape that depends on the number of rows")
        return placed  # type: ignore[no-any-return]
    return reshaped(placed, source.shapes[0], op.shapes, op.counts)


def _in_other_dtype(op: Operation, source: Operand) -> Placed:
    """A view of the memory of each entry, or of those along the last axis."""
    if not source.placed.is_equal and not source.placed.is_rows:
        raise MixesRows("of a sum over rows")
    if source.placed.power:
        raise MixesRows("with the number of rows")
    own = source.dtype, op.dtypes[0]
    if len({dtype.itemsize for dtype in own}) == 1:  # type: ignore[union-attr]
        return source.placed.changed(is_zero=False)  # type: ignore[no-any-return]
    return along(op, source, [source.rank - 1]).changed(is_zero=False)


def reshaped(
    placed: Placed, source: Shape, shapes: Sequence[Shape], counts: Sequence[int]
) -> Placed:
    """The placement of a reshaped tensor with rows.

    Args:
        placed: its placement before.
        source: its shape with the first number of rows.
        shapes: the new shape with each number of rows.
        counts: the numbers of rows.
    """
    before = math.prod(source[: placed.axis]) * placed.blocks
    for axis, size in enumerate(shapes[0]):
        outer = math.prod(shapes[0][:axis])
        if outer == 0 or before % outer:
            continue
        blocks = before // outer
        if size == 0 or size % (blocks * counts[0]):
            continue
        multiple = size // (blocks * counts[0])
        found = placed.changed(axis=axis, blocks=blocks, multiple=multiple)
        if found.fits(shapes, counts):
            return found
    raise MixesRows("across rows")


@rule("expand broadcast_to", sizes=["size"])
def _expand(op: Operation) -> Placed:
    source = op["self"]
    placed, offset = source.placed, op.rank - source.rank
    if placed.is_rows:
        return placed.at(placed.axis + offset)  # type: ignore[no-any-return]
    target = rows_of_shapes(op.shapes, op.counts)
    if not target.is_rows:
        return placed  # type: ignore[no-any-return]
    if placed.is_sum:
        raise MixesRows("of a sum over rows to rows")
    own = target.axis - offset
    if own >= 0 and source.size(own) != 1:
        raise MixesRows("to a shape that depends on the number of rows")
    return target.changed(power=placed.power, is_zero=placed.is_zero)


@rule("expand_as")
def _expand_as(op: Operation) -> Placed:
    return _expand(op)  # type: ignore[return-value]


@rule("permute")
def _permute(op: Operation) -> Placed:
    placed = op["self"].placed
    return placed.at(op.axes("dims", op.rank).index(placed.axis))  # type: ignore


@rule("transpose swapaxes")
def _transpose(op: Operation) -> Placed:
    return _swapped(
        op["self"].placed, op.axis("dim0", op.rank), op.axis("dim1", op.rank)
    )


@rule("t numpy_T")
def _t(op: Operation) -> Placed:
    return op["self"].placed if op.rank < 2 else _swapped(op["self"].placed, 0, 1)


@rule("mT adjoint")
def _matrix_t(op: Operation) -> Placed:
    return _swapped(op["self"].placed, op.rank - 2, op.rank - 1)


def _swapped(placed: Placed, one: int, other: int) -> Placed:
    if placed.axis not in (one, other):
        return placed
    return placed.at(other if placed.axis == one else one)


@rule("unsqueeze")
def _unsqueeze(op: Operation) -> Placed:
    placed, axis = op["self"].placed, op.axis("dim", op.rank)
    return placed.at(placed.axis + (axis <= placed.axis))  # type: ignore[no-any-return]


@rule("squeeze")
def _squeeze(op: Operation) -> Placed:
    source = op["self"]
    removed = [axis for axis in op.axes("dim", source.rank) if source.size(axis) == 1]
    return without_axes(source.placed, removed)


def without_axes(placed: Placed, removed: Sequence[int]) -> Placed:
    """The placement after axes other than that of the rows are removed."""
    if not placed.is_rows:
        return placed
    if placed.axis in removed:
        raise MixesRows(_ALONG)
    return placed.at(placed.axis - sum(axis < placed.axis for axis in removed))


@rule("as_strided", sizes=["size", "stride", "storage_offset"])
def _as_strided(op: Operation) -> Placed:
    """Entries by their positions in memory, those of each row in its own part."""
    source = op["self"]
    placed = source.placed
    if not source.is_dense:
        raise NoRule
    if not placed.is_rows:
        if any(isinstance(v, Varying) for v in (*op["size"], *op["stride"])):
            raise MixesRows("with the number of rows")
        if isinstance(op["storage_offset"], Varying):
            raise MixesRows("with the number of rows")
        return placed  # type: ignore[no-any-return]
    if placed.axis or placed.blocks > 1 or op["storage_offset"] not in (0, None):
        raise NoRule
    own = placed.multiple * math.prod(source.shape[1:])
    axis = next(
        (i for i, sizes in enumerate(zip(*op.shapes, strict=True)) if _vary(sizes)),
        None,
    )
    strides = op["stride"]
    if axis is None or any(isinstance(stride, Varying) for stride in strides):
        raise MixesRows(_BY_NUMBER)
    others = [i for i in range(op.rank) if i != axis]
    reach = sum((op.shapes[0][i] - 1) * strides[i] for i in others)
    if strides[axis] != own or reach >= own:
        raise MixesRows(_BY_NUMBER)
    return placed.changed(axis=axis, multiple=1)  # type: ignore[no-any-return]


def _vary(sizes: Sequence[int]) -> bool:
    return any(size != sizes[0] for size in sizes)


# Pieces.


@rule("slice", sizes=["start", "end"])
def _slice(op: Operation) -> Placed:
    source = op["self"]
    return _piece(op, source, op.axis("dim", source.rank))


@rule("narrow")
def _narrow(op: Operation) -> Placed:
    source = op["self"]
    return along(op, source, [op.axis("dim", source.rank)])


def _bounds(op: Operation, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Start and end of a slice with each number of rows."""
    found = []
    starts, ends = op.values_of(op["start"]), op.values_of(op["end"])
    for start, end, size in zip(starts, ends, sizes, strict=True):
        found.append(slice(start, end).indices(size)[:2])
    return found


def _piece(op: Operation, source: Operand, axis: int) -> Placed:
    """A slice of a tensor along an axis."""
    placed = source.placed
    sizes = [shape[axis] for shape in source.shapes]
    if not placed.is_rows or placed.axis != axis:
        if any(isinstance(op[name], Varying) for name in ("start", "end")):
            bounds = _bounds(op, sizes)
            if any(each != bounds[0] for each in bounds):
                raise MixesRows("with the number of rows")
        return placed
    blocks = _whole_blocks(op, placed, sizes)
    return placed.changed(blocks=blocks)


def _whole_blocks(op: Operation, placed: Placed, sizes: Sequence[int]) -> int:
    """How many blocks with all rows a slice along the rows has."""
    found = set()
    for (start, end), rows in zip(_bounds(op, sizes), op.counts, strict=True):
        block = rows * placed.multiple
        if start % block or end % block or end <= start:
            raise MixesRows(_BY_NUMBER)
        found.add((start // block, end // block))
    if len(found) > 1 or op["step"] != 1:
        raise MixesRows(_BY_NUMBER)
    start, end = found.pop()
    return end - start


@rule("slice_backward", sizes=["input_sizes", "start", "end"])
def _slice_gradient(op: Operation) -> Placed:
    gradient, axis = op["grad_output"], op.axis("dim", op.rank)
    placed = gradient.placed
    sizes = [shape[axis] for shape in op.shapes]
    if not placed.is_rows or placed.axis != axis:
        bounds = _bounds(op, sizes)
        if any(each != bounds[0] for each in bounds):
            raise MixesRows("with the number of rows")
        return placed  # type: ignore[no-any-return]
    _whole_blocks(op, placed, sizes)
    blocks = sizes[0] // (op.counts[0] * placed.multiple)
    return placed.changed(blocks=blocks)  # type: ignore[no-any-return]


@rule("select")
def _select(op: Operation) -> Placed:
    source = op["self"]
    axis = op.axis("dim", source.rank)
    placed = source.placed
    if placed.is_rows and placed.axis == axis:
        raise MixesRows(_BY_NUMBER)
    return without_axes(placed, [axis])


@rule("select_backward", sizes=["input_sizes"])
def _select_gradient(op: Operation) -> Placed:
    placed, axis = op["grad_output"].placed, op.axis("dim", op.rank)
    return placed.at(placed.axis + (axis <= placed.axis))  # type: ignore[no-any-return]


@rule("slice_scatter", sizes=["start", "end"])
def _slice_scatter(op: Operation) -> Placed:
    return _written(
        op, op["self"], op["src"], _piece(op, op["self"], op.axis("dim", op.rank))
    )


@rule("select_scatter")
def _select_scatter(op: Operation) -> Placed:
    piece = _select_of(op["self"].placed, op.axis("dim", op.rank))
    return _written(op, op["self"], op["src"], piece)


def _select_of(placed: Placed, axis: int) -> Placed:
    if placed.is_rows and placed.axis == axis:
        raise MixesRows(_BY_NUMBER)
    return without_axes(placed, [axis])


def _written(op: Operation, base: Operand, source: Operand, piece: Placed) -> Placed:
    return written(base.placed, piece, source.placed)


def written(base: Placed, piece: Placed, value: Placed) -> Placed:
    """The placement of a tensor after a piece of it was replaced.

    Args:
        base: its placement before.
        piece: that of the piece before.
        value: that of the new piece.
    """
    if value.is_zero and value.kind is piece.kind:
        return base
    like = (value.kind, value.power, value.axis, value.layout)
    is_alike = value.kind is piece.kind or (piece.is_same and value.is_sum)
    if base.is_zero and is_alike and like[2:] == (piece.axis, piece.layout):
        return base.changed(kind=value.kind, power=value.power, is_zero=False)
    if like == (piece.kind, piece.power, piece.axis, piece.layout):
        return base.changed(is_zero=base.is_zero and value.is_zero)
    raise MixesRows(f"of {value} into {base}")


@rule("written_view")
def _written_view(op: Operation) -> Placed:
    base, piece, value = (op[name].placed for name in ("view", "before", "after"))
    return written(base, piece, value)


@rule("unbind")
def _unbind(op: Operation) -> Placed:
    source = op["self"]
    return _select_of(source.placed, op.axis("dim", source.rank))


@rule("split split_with_sizes chunk tensor_split", sizes=["split_size", "split_sizes"])
def _split(op: Operation) -> Sequence[Placed]:
    source = op["self"]
    axis, placed = op.axis("dim", source.rank), source.placed
    if not placed.is_rows or placed.axis != axis:
        return [placed] * len(op.results)
    found = []
    for shapes in op.results:
        assert shapes is not None
        size, block = shapes[0][axis], op.counts[0] * placed.multiple
        piece = placed.changed(blocks=size // block)
        if size % block or not size or not piece.fits(shapes, op.counts):
            raise MixesRows(_BY_NUMBER)
        found.append(piece)
    return found


@rule("unsafe_split unsafe_split_with_sizes", sizes=["split_size", "split_sizes"])
def _unsafe_split(op: Operation) -> Sequence[Placed]:
    return _split(op)  # type: ignore[return-value]


# Tensors of several others.


def _alike(op: Operation, operands: Sequence[Operand]) -> Placed:
    """The one placement of several tensors."""
    live = [o.placed for o in operands if not o.placed.is_zero]
    if not live:
        return next((o.placed for o in operands if o.placed.is_rows), ZERO)
    first = live[0]
    traits = (first.kind, first.axis, first.layout, first.power)
    for operand in operands:
        placed = operand.placed
        found = (placed.kind, placed.axis, placed.layout, placed.power)
        # Zeros without rows are a sum over rows.
        is_zero_sum = placed.is_zero and placed.is_same and first.is_sum
        is_zero_rows = placed.is_zero and found[:3] == traits[:3]
        if found != traits and not is_zero_sum and not is_zero_rows:
            raise MixesRows(f"of {first} and {placed}")
    return first


@rule("cat concat concatenate")
def _concatenate(op: Operation) -> Placed:
    # Torch ignores empty tensors of one axis.
    operands = [o for o in op.operands if o.shape != (0,)]
    axis = op.axis("dim", op.rank)
    with_rows = [o.placed for o in operands if o.placed.is_rows]
    if len(with_rows) == len(operands) and with_rows[0].axis == axis:
        first = next((p for p in with_rows if not p.is_zero), with_rows[0])
        blocks = 0
        for placed in with_rows:
            is_alike = (placed.axis, placed.multiple) == (axis, first.multiple)
            if not is_alike or placed.power not in (first.power, 0):
                raise MixesRows("of different rows")
            if placed.power != first.power and not placed.is_zero:
                raise MixesRows("with the number of rows")
            blocks += placed.blocks
        return first.changed(blocks=blocks)
    placed = _alike(op, operands)
    if placed.is_rows and placed.axis == axis:
        raise MixesRows(_ALONG)
    return placed


@rule("stack")
def _stack(op: Operation) -> Placed:
    placed, axis = _alike(op, op.operands), op.axis("dim", op.rank)
    return placed.at(placed.axis + (axis <= placed.axis))


@rule("repeat", sizes=["repeats"])
def _repeat(op: Operation) -> Placed:
    source, repeats = op["self"], op["repeats"]
    placed, offset = source.placed, op.rank - source.rank
    varying = [i for i, each in enumerate(repeats) if isinstance(each, Varying)]
    if placed.is_rows:
        if varying:
            raise MixesRows("with the number of rows")
        axis = placed.axis + offset
        blocks = placed.blocks * repeats[axis]
        return placed.changed(axis=axis, blocks=blocks)  # type: ignore[no-any-return]
    if not varying:
        return placed  # type: ignore[no-any-return]
    if placed.is_sum:
        raise MixesRows("of a sum over rows to rows")
    target = rows_of_shapes(op.shapes, op.counts)
    return target.changed(power=placed.power, is_zero=placed.is_zero)


# Operations along axes.


def along(op: Operation, source: Operand, axes: Sequence[int]) -> Placed:
    """The placement of a linear operation along axes."""
    if source.placed.is_rows and source.placed.axis in axes:
        raise MixesRows(_ALONG)
    return source.placed


@rule("flip roll cumsum")
def _along(op: Operation) -> Placed:
    source = op["self"]
    name = "dims" if "dims" in op.arguments else "dim"
    if op.name == "roll" and op["dims"] in ([], ()):
        return along(op, source, range(source.rank))
    return along(op, source, op.axes(name, source.rank))


@rule("rot90")
def _rotate(op: Operation) -> Placed:
    return along(op, op["self"], op.axes("dims", op.rank))


@rule("constant_pad_nd", sizes=["value"])
def _pad(op: Operation) -> Placed:
    source, value = op["self"], op.operand("value").placed
    placed = source.placed
    if (placed.is_zero and value.is_zero) or (not placed.is_rows and value.is_zero):
        _require_unpadded(op, source)
        return placed  # type: ignore[no-any-return]
    if placed.is_sum:
        raise MixesRows("of a sum over rows")
    _require_unpadded(op, source)
    if placed.power != value.power and not value.is_zero:
        raise MixesRows("with the number of rows")
    return placed.changed(is_zero=False)  # type: ignore[no-any-return]


def _require_unpadded(op: Operation, source: Operand) -> None:
    if not source.placed.is_rows:
        return
    pad = op["pad"] if "pad" in op.arguments else op["padding"]
    before = 2 * (source.rank - 1 - source.placed.axis)
    if any(n != 0 for n in pad[before : before + 2]):
        raise MixesRows(_ALONG)


@rule(
    "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d"
)
def _pad_by_own(op: Operation) -> Placed:
    _require_unpadded(op, op["self"])
    return op["self"].placed  # type: ignore[no-any-return]


@rule(
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
    "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward"
)
def _pad_by_own_gradient(op: Operation) -> Placed:
    _require_unpadded(op, op["grad_output"])
    return op["grad_output"].placed  # type: ignore[no-any-return]


@rule("tril triu")
def _triangle(op: Operation) -> Placed:
    return along(op, op["self"], (op.rank - 2, op.rank - 1))


@rule("diagonal")
def _diagonal(op: Operation) -> Placed:
    source = op["self"]
    axes = [op.axis(name, source.rank) for name in ("dim1", "dim2")]
    return without_axes(source.placed, axes)


@rule("diagonal_backward", sizes=["input_sizes"])
def _diagonal_gradient(op: Operation) -> Placed:
    return _with_axes(
        op["grad_output"].placed, [op.axis(n, op.rank) for n in ("dim1", "dim2")]
    )


@rule("diag_embed")
def _diag_embed(op: Operation) -> Placed:
    source = op["self"]
    if source.placed.is_rows and source.placed.axis == source.rank - 1:
        raise MixesRows(_ALONG)
    axes = [op.axis(name, op.rank) for name in ("dim1", "dim2")]
    return _with_axes(source.placed, axes)


def _with_axes(placed: Placed, axes: Sequence[int]) -> Placed:
    """The placement of a tensor whose last axis is replaced by two others."""
    for axis in sorted(axes):
        placed = placed.at(placed.axis + (axis <= placed.axis))
    return placed


@rule("unfold")
def _unfold(op: Operation) -> Placed:
    source = op["self"]
    return along(op, source, [op.axis("dimension", source.rank)])


@rule("unfold_backward", sizes=["input_sizes"])
def _unfold_gradient(op: Operation) -> Placed:
    gradient = op["grad_in"]
    return along(op, gradient, [op.axis("dim", op.rank), gradient.rank - 1])


@rule("im2col col2im pixel_shuffle pixel_unshuffle channel_shuffle")
def _image_blocks(op: Operation) -> Placed:
    source: Any = op["self"]
    first_of_image = source.rank - (2 if op.name == "col2im" else 3)
    return along(op, source, range(first_of_image, source.rank))
