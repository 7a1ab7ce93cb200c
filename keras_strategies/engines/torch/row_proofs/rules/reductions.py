"""Reductions, and operations that look at all entries along an axis."""

from __future__ import annotations

from collections.abc import Sequence

from keras_strategies.engines.torch.row_proofs.recorded_operation import (
    Operand,
    Operation,
)
from keras_strategies.engines.torch.row_proofs.rules.elementwise import combined
from keras_strategies.engines.torch.row_proofs.rules.registry import rule
from keras_strategies.engines.torch.row_proofs.rules.shapes import (
    along,
    without_axes,
)
from keras_strategies.engines.torch.row_proofs.value_placements import (
    MixesRows,
    Placed,
)
from keras_strategies.runtime.row_proofs.row_placements import RowKind


@rule("sum nansum mean count_nonzero")
def _sum(op: Operation) -> Placed:
    source = op["self"]
    placed, axes = source.placed, op.axes("dim", source.rank)
    if op.name in ("nansum", "count_nonzero"):
        require_plain(placed)
    if placed.is_rows and placed.axis in axes:
        power = placed.power - (op.name == "mean")
        return Placed(RowKind.SUM, power=power, is_zero=placed.is_zero)
    return _kept(op, placed, axes)


def _kept(op: Operation, placed: Placed, axes: Sequence[int]) -> Placed:
    return placed if op.get("keepdim") else without_axes(placed, axes)


def require_plain(placed: Placed) -> None:
    """Raises for a sum over rows, and for a value scaled by the number of rows."""
    if placed.is_sum:
        raise MixesRows("of a sum over rows")
    if placed.power:
        raise MixesRows("with the number of rows")


def nonlinear(op: Operation, source: Operand, axes: Sequence[int]) -> Placed:
    """The placement of a nonlinear operation along axes that stay."""
    require_plain(source.placed)
    return along(op, source, axes).changed(is_zero=False)


@rule(
    "amax amin max min prod all any argmax argmin var std var_mean std_mean norm "
    "linalg_vector_norm logsumexp median nanmedian mode kthvalue aminmax"
)
def _reduce(op: Operation) -> Placed:
    if op.get("other") is not None:
        return combined(op, "other", op.operands)
    source = op["self"]
    axes = op.axes("dim", source.rank)
    return _kept(op, nonlinear(op, source, axes), axes)


@rule("_is_all_true _is_any_true")
def _truth(op: Operation) -> Placed:
    return nonlinear(op, op["self"], range(op["self"].rank)).at(0)


@rule("cumprod logcumsumexp cummax cummin sort argsort topk renorm msort")
def _scan(op: Operation) -> Placed:
    source = op["self"]
    axis = op.axis("dim", source.rank) if "dim" in op.arguments else 0
    if op.name == "renorm":
        return nonlinear(op, source, [i for i in range(source.rank) if i != axis])
    return nonlinear(op, source, [axis])


@rule("_softmax _log_softmax softmax log_softmax _safe_softmax")
def _softmax(op: Operation) -> Placed:
    return nonlinear(op, op["self"], [op.axis("dim", op.rank)])


@rule("_softmax_backward_data _log_softmax_backward_data")
def _softmax_gradient(op: Operation) -> Placed:
    axis = op.axis("dim", op.rank)
    for operand in op.operands:
        along(op, operand, [axis])
    gradient, output = op["grad_output"], op["output"]
    return combined(op, "linear", [gradient, output])


@rule("glu")
def _glu(op: Operation) -> Placed:
    source = op["self"]
    return nonlinear(op, source, [op.axis("dim", source.rank)])


@rule("glu_backward")
def _glu_gradient(op: Operation) -> Placed:
    axis = op.axis("dim", op.rank)
    for operand in op.operands:
        along(op, operand, [axis])
    gradient, source = op["grad_output"], op["self"]
    require_plain(source.placed)
    if gradient.placed.is_rows != source.placed.is_rows:
        raise MixesRows("of rows with other rows")
    if gradient.placed.is_rows:
        return source.placed.changed(power=gradient.placed.power)  # type: ignore
    return gradient.placed  # type: ignore[no-any-return]


@rule("searchsorted bucketize")
def _search(op: Operation) -> Placed:
    """The place of each entry among others that are sorted along the last axis."""
    values = op.operand("self")
    if op.name == "bucketize":
        op.require_equal("boundaries")
        return combined(op, "other", [values])
    table = op["sorted_sequence"]
    op.require_equal("sorter")
    if table.rank == 1:
        op.require_equal("sorted_sequence")
        return combined(op, "other", [values])
    nonlinear(op, table, [table.rank - 1])
    nonlinear(op, values, [values.rank - 1])
    if table.placed.is_rows != values.placed.is_rows:
        raise MixesRows("of rows with other rows")
    return combined(op, "other", [values, _without_last(table)])


def _without_last(operand: Operand) -> Operand:
    """An operand whose last axis has one entry."""
    shapes = tuple((*shape[:-1], 1) for shape in operand.shapes)
    return Operand(operand.placed, shapes)


@rule("histc bincount unique _unique2 unique_dim unique_consecutive nonzero")
def _counts(op: Operation) -> Placed:
    raise MixesRows(_OVER_ROWS)


_OVER_ROWS = "over rows"


@rule("_cdist_forward")
def _distances(op: Operation) -> Placed:
    """Distances of all pairs along the axis before the last one."""
    one, other = op["x1"], op["x2"]
    for operand in (one, other):
        nonlinear(op, operand, [operand.rank - 1])
    rank = op.rank
    pairs = [
        (one.placed, one.placed.axis + rank - one.rank, one),
        (other.placed, other.placed.axis + rank - other.rank, other),
    ]
    found = [
        placed.at(rank - 1 if operand is other and axis == rank - 2 else axis)
        for placed, axis, operand in pairs
        if placed.is_rows
    ]
    if not found:
        return one.placed  # type: ignore[no-any-return]
    if len(found) == 2 and (found[0] != found[1] or found[0].axis >= rank - 2):
        raise MixesRows("of rows with other rows")
    if len(found) == 1 and found[0].axis < rank - 2:
        constant = other if one.placed.is_rows else one
        own = found[0].axis - (rank - constant.rank)
        if own >= 0 and constant.size(own) != 1:
            raise MixesRows("of rows with a constant that has as many")
    return found[0]
