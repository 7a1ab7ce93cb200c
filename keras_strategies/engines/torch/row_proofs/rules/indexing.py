"""Gathers and scatters."""

from __future__ import annotations

from dataclasses import dataclass

from keras_strategies.engines.torch.row_proofs.recorded_operation import (
    Operand,
    Operation,
)
from keras_strategies.engines.torch.row_proofs.rules.elementwise import combined
from keras_strategies.engines.torch.row_proofs.rules.reductions import require_plain
from keras_strategies.engines.torch.row_proofs.rules.registry import rule
from keras_strategies.engines.torch.row_proofs.rules.shapes import along
from keras_strategies.engines.torch.row_proofs.value_placements import (
    SUM,
    MixesRows,
    NoRule,
    Placed,
)

_BY_NUMBER = "of rows by their numbers"
_OTHER_ROWS = "of rows with other rows"


@rule("embedding")
def _embedding(op: Operation) -> Placed:
    return _taken(op["weight"], op["indices"], 0)


@rule("index_select")
def _index_select(op: Operation) -> Placed:
    return _taken(op["self"], op["index"], op.axis("dim", op.rank))


def _taken(source: Operand, index: Operand, axis: int) -> Placed:
    """Entries along an axis, which the axes of the index replace."""
    placed = source.placed
    require_plain(index.placed)
    if index.placed.is_rows:
        if placed.is_rows or placed.is_sum:
            raise MixesRows(_OTHER_ROWS)
        moved = index.placed.at(index.placed.axis + axis)
        return moved.changed(power=placed.power, is_zero=False)
    if placed.is_rows:
        if placed.axis == axis:
            raise MixesRows(_BY_NUMBER)
        return placed.at(placed.axis + (index.rank - 1) * (placed.axis > axis))
    return placed


@rule("embedding_dense_backward")
def _embedding_gradient(op: Operation) -> Placed:
    if op["scale_grad_by_freq"]:
        raise MixesRows("scaled by counts of all rows")
    gradient, index = op["grad_output"], op["indices"]
    return _added(Placed(SUM.kind, power=gradient.placed.power), gradient, index)


def _added(total: Placed, values: Operand, index: Operand) -> Placed:
    """A sum of values at places given by an index with the same leading axes."""
    require_plain(index.placed)
    if not values.placed.is_rows and not index.placed.is_rows:
        return values.placed
    if values.placed.is_sum:
        raise MixesRows(_OTHER_ROWS)
    if values.placed.is_rows and index.placed.is_rows:
        one, other = values.placed, index.placed
        if (one.axis, one.layout) != (other.axis, other.layout):
            raise MixesRows(_OTHER_ROWS)
        return total
    raise MixesRows(_OTHER_ROWS)


@rule("gather")
def _gather(op: Operation) -> Placed:
    source, index = op["self"], op["index"]
    axis = op.axis("dim", op.rank)
    require_plain(index.placed)
    return _at_places(source, index, axis)


def _at_places(source: Operand, index: Operand, axis: int) -> Placed:
    """Entries of a tensor at places along one axis, given for each entry."""
    placed = source.placed
    if not placed.is_rows and not index.placed.is_rows:
        return placed
    if placed.is_sum:
        raise MixesRows(_OTHER_ROWS)
    if not placed.is_rows:
        if index.placed.axis != axis:
            raise MixesRows(_BY_NUMBER)
        return index.placed.changed(power=placed.power, is_zero=False)
    if placed.axis == axis:
        raise MixesRows(_BY_NUMBER)
    alike = (placed.axis, placed.layout)
    if not index.placed.is_rows or alike != (index.placed.axis, index.placed.layout):
        raise MixesRows(_OTHER_ROWS)
    return placed.changed(is_zero=False)


@rule("scatter_add")
def _scatter_add(op: Operation) -> Placed:
    return _scattered_sum(op, op["self"], op["index"], op["src"])


def _scattered_sum(
    op: Operation, base: Operand, index: Operand, src: Operand
) -> Placed:
    require_plain(index.placed)
    axis = op.axis("dim", op.rank)
    if index.placed.is_rows and index.placed.axis == axis:
        power = src.placed.power
        total = _added(SUM.changed(power=power), src, index)
        return combined(op, "add", [base, Operand(total, op.shapes)])
    return _scattered(op, base, index, src, axis)


def _scattered(
    op: Operation, base: Operand, index: Operand, src: Operand, axis: int
) -> Placed:
    """Entries put at, or added to, places along an axis other than that of the rows."""
    require_plain(index.placed)
    values = [o.placed for o in (base, src) if not o.placed.is_zero]
    if not index.placed.is_rows and not any(v.is_rows for v in values):
        if base.placed.is_rows:
            raise MixesRows(_BY_NUMBER)
        return combined(op, "add", [base, Operand(src.placed, ((),) * len(op.counts))])
    rows = index.placed
    if not rows.is_rows or rows.axis == axis:
        raise MixesRows(_BY_NUMBER)
    for operand in (base, src):
        placed = operand.placed
        if operand is src and not operand.rank:
            if not placed.is_same:
                raise MixesRows("of a sum over rows")
            continue
        is_alike = placed.is_zero or placed.layout == rows.layout
        if not placed.is_rows or placed.axis != rows.axis or not is_alike:
            raise MixesRows(_OTHER_ROWS)
    powers = {value.power for value in values}
    if len(powers) > 1:
        raise MixesRows("with the number of rows")
    return rows.changed(power=powers.pop() if powers else 0, is_zero=False)


@rule("scatter scatter_reduce", sizes=["value"])
def _scatter(op: Operation) -> Placed:
    base, index, axis = op["self"], op["index"], op.axis("dim", op.rank)
    src = op.operand("src" if "src" in op.arguments else "value")
    reduce = op.get("reduce")
    if reduce in ("sum", "add"):
        return _scattered_sum(op, base, index, src)
    if reduce is not None:
        require_plain(base.placed)
        require_plain(src.placed)
    return _scattered(op, base, index, src, axis)


@rule("index_add")
def _index_add(op: Operation) -> Placed:
    """Slices added at places along an axis."""
    base, index, source = op["self"], op["index"], op["source"]
    axis = op.axis("dim", op.rank)
    if index.placed.offset:
        return _added_to_own(base, index, source, axis)
    require_plain(index.placed)
    if index.placed.is_rows:
        if not source.placed.is_rows or source.placed.axis != axis:
            raise MixesRows(_OTHER_ROWS)
        if source.placed.layout != index.placed.layout:
            raise MixesRows(_OTHER_ROWS)
        total = SUM.changed(power=source.placed.power)
        return combined(op, "add", [base, Operand(total, op.shapes)])
    for operand in (base, source):
        along(op, operand, [axis])
    placed = source.placed
    # Along other axes slices have the entries of the tensor.
    like = Operand(placed, tuple(_one(s, axis) for s in source.shapes))
    return combined(op, "add", [base, like])


def _added_to_own(base: Operand, index: Operand, source: Operand, axis: int) -> Placed:
    """Entries added to those of their own row, by numbers of entries."""
    rows, values = base.placed, source.placed
    is_own = rows.is_rows and values.is_rows and rows.axis == values.axis == axis
    if not is_own or rows.layout != (1, index.placed.offset):
        raise MixesRows(_BY_NUMBER)
    if index.placed.blocks > 1 or values.layout != index.placed.layout:
        raise MixesRows(_OTHER_ROWS)
    if not rows.is_zero and rows.power != values.power:
        raise MixesRows("with the number of rows")
    return rows.changed(power=values.power, is_zero=False)


def _one(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple(1 if i == axis else n for i, n in enumerate(shape))


@rule("index_copy index_fill", sizes=["value"])
def _index_copy(op: Operation) -> Placed:
    base, index, axis = op["self"], op["index"], op.axis("dim", op.rank)
    op.require_equal("index")
    along(op, base, [axis])
    if op.name == "index_fill":
        return combined(op, "add", [base, op.operand("value")])
    source = op["source"]
    along(op, source, [axis])
    like = Operand(source.placed, tuple(_one(s, axis) for s in source.shapes))
    del index
    return combined(op, "add", [base, like])


# Indices of several axes.


@dataclass(frozen=True)
class _Indexed:
    """The axes of an indexed tensor.

    Args:
        taken: the axes that indices replace.
        start: the first axis of the result that is of the indices.
        rank: how many axes those are.
        indices: the indices, by the axes that they replace.
    """

    taken: list[int]
    start: int
    rank: int
    indices: dict[int, Operand]

    def kept(self, axis: int) -> int:
        """The axis of the result that another axis of the tensor becomes."""
        before = sum(taken < axis for taken in self.taken)
        return axis - before + (self.rank if axis - before >= self.start else 0)

    def axis_of(self, index: Operand) -> int:
        """The axis of the result with the rows of an index."""
        return self.start + self.rank - index.rank + index.placed.axis


def _indexed(op: Operation) -> _Indexed:
    indices = {
        axis: index for axis, index in enumerate(op["indices"]) if index is not None
    }
    for index in indices.values():
        require_plain(index.placed)
        if not index.placed.is_joined and not _numbers_rows(index, op):
            raise MixesRows(_BY_NUMBER)
        if index.dtype is not None and str(index.dtype) in (
            "torch.bool",
            "torch.uint8",
        ):
            raise MixesRows("selects entries by value")
    taken = sorted(indices)
    is_block = taken == list(range(taken[0], taken[0] + len(taken)))
    rank = max(index.rank for index in indices.values())
    return _Indexed(taken, taken[0] if is_block else 0, rank, indices)


def _rows_of_indices(found: _Indexed, op: Operation) -> Placed | None:
    """The rows of indices along the result; None if they have none."""
    rows: Placed | None = None
    for index in found.indices.values():
        if not index.placed.is_rows:
            continue
        own = index.placed.at(found.axis_of(index)).changed(is_zero=False)
        if rows is not None and (own.axis, own.layout) != (rows.axis, rows.layout):
            raise MixesRows(_OTHER_ROWS)
        rows = own
    if rows is not None:
        _require_broadcast(found, rows.axis - found.start)
    return rows


def _require_broadcast(found: _Indexed, axis: int) -> None:
    """Raises if an index without rows has several entries along their axis."""
    for index in found.indices.values():
        own = axis - (found.rank - index.rank)
        if index.placed.is_same and own >= 0 and index.size(own) != 1:
            raise MixesRows("of rows with a constant that has as many")


def _own_rows(op: Operation, source: Operand, found: _Indexed) -> Placed | None:
    """Rows that are indexed by their own numbers; None if they are not."""
    placed = source.placed
    index = found.indices.get(placed.axis)
    if not placed.is_rows or index is None or placed.layout != (1, 1):
        return None
    axes = [a for a in range(index.rank) if index.has_row_numbers(a, op.counts)]
    if not axes:
        return None
    axis = axes[0] + found.rank - index.rank
    for other in found.indices.values():
        own = axis - (found.rank - other.rank)
        if other is index:
            continue
        if not other.placed.is_joined:
            raise MixesRows(_BY_NUMBER)
        if other.placed.is_rows:
            if other.placed.layout != (1, 1) or other.placed.axis != own:
                raise MixesRows(_OTHER_ROWS)
        elif own >= 0 and other.size(own) != 1:
            raise MixesRows("of rows with a constant that has as many")
    return placed.at(found.start + axis).changed(is_zero=False)


@rule("index _unsafe_index")
def _index(op: Operation) -> Placed:
    source = op["self"]
    numbers = _has_own_numbers(op, source)
    found = _indexed(op)
    if numbers:
        own = _own_rows(op, source, found)
        assert own is not None
        return own
    placed, rows = source.placed, _rows_of_indices(found, op)
    if rows is not None:
        if not placed.is_same:
            raise MixesRows(_OTHER_ROWS)
        return rows.changed(power=placed.power)
    if not placed.is_rows:
        return placed  # type: ignore[no-any-return]
    if placed.axis in found.taken:
        raise MixesRows(_BY_NUMBER)
    return placed.at(found.kept(placed.axis))  # type: ignore[no-any-return]


def _numbers_rows(index: Operand, op: Operation) -> bool:
    """Whether an index is the numbers of the rows, along one of its axes."""
    return any(index.has_row_numbers(axis, op.counts) for axis in range(index.rank))


def _has_own_numbers(op: Operation, source: Operand) -> bool:
    """Whether rows are indexed by their own numbers."""
    placed = source.placed
    if not placed.is_rows:
        return False
    indices = list(op["indices"])
    if placed.axis >= len(indices) or indices[placed.axis] is None:
        return False
    return placed.layout == (1, 1) and _numbers_rows(indices[placed.axis], op)


@rule("index_put _index_put_impl _unsafe_index_put")
def _index_put(op: Operation) -> Placed:
    base, values = op["self"], op["values"]
    numbers = _has_own_numbers(op, base)
    found = _indexed(op)
    rank = base.rank - len(found.taken) + found.rank
    if numbers:
        own = _own_rows(op, base, found)
        assert own is not None
        return _put(op, base, values, own, rank)
    rows = _rows_of_indices(found, op)
    if rows is not None:
        if not op["accumulate"]:
            raise MixesRows(_BY_NUMBER)
        like = Operand(rows.changed(is_zero=True), ())
        placed = _broadcast(op, values, like.placed, rank)
        total = SUM.changed(power=placed.power)
        return combined(op, "add", [base, Operand(total, op.shapes)])
    placed = base.placed
    if placed.is_rows:
        if placed.axis in found.taken:
            raise MixesRows(_BY_NUMBER)
        return _put(op, base, values, placed.at(found.kept(placed.axis)), rank)
    if values.placed.is_rows:
        raise MixesRows("of rows to a tensor without rows")
    return combined(op, "add", [base, Operand(values.placed, ((),) * len(op.counts))])


def _broadcast(op: Operation, values: Operand, rows: Placed, rank: int) -> Placed:
    """Values for the entries of indices that have rows."""
    own = rows.axis - (rank - values.rank)
    placed = values.placed
    if placed.is_sum:
        raise MixesRows("of a sum over rows")
    if placed.is_rows:
        if placed.axis != own or placed.layout != rows.layout:
            raise MixesRows(_OTHER_ROWS)
    elif own >= 0 and values.size(own) != 1:
        raise MixesRows("of rows with a constant that has as many")
    return placed


def _put(
    op: Operation, base: Operand, values: Operand, rows: Placed, rank: int
) -> Placed:
    """A tensor with rows, of which each gets its values."""
    placed = _broadcast(op, values, rows, rank)
    powers = {p.power for p in (base.placed, placed) if not p.is_zero}
    if len(powers) > 1:
        raise MixesRows("with the number of rows")
    power = powers.pop() if powers else 0
    return base.placed.changed(power=power, is_zero=False)


@rule("masked_select masked_scatter take put")
def _by_value(op: Operation) -> Placed:
    if op.name == "take":
        source, index = op["self"], op["index"]
        if source.placed.is_same and not source.placed.power:
            return combined(op, "other", [index])
    raise MixesRows("selects entries by value")


@rule("one_hot")
def _one_hot(op: Operation) -> Placed:
    raise NoRule
