"""Operations that compute each entry from those at the same place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keras_strategies.engines.torch.row_proofs.recorded_operation import (
    Operand,
    Operation,
)
from keras_strategies.engines.torch.row_proofs.rules.registry import rule
from keras_strategies.engines.torch.row_proofs.value_placements import (
    MixesRows,
    NoRule,
    Placed,
)
from keras_strategies.runtime.row_proofs.row_placements import RowKind

_OF_SUM = "of a sum over rows"
_ROW_NUMBER = "with the number of rows"


def combined(
    op: Operation,
    how: str,
    operands: Sequence[Operand],
    linear: int = 0,
    rank: int | None = None,
) -> Placed:
    """The placement of an elementwise result, with broadcasting.

    Args:
        op: the operation.
        how: "add"; "multiply"; "divide" (the first by the others); "select" (by the
            first, of the others); "linear" in one operand; "other".
        operands: the operands.
        linear: int, which operand the result is linear in.
        rank: int, axes of the result; None for those of the operation.
    """
    placed = [operand.placed for operand in operands]
    if any(each.is_sum for each in placed):
        return _of_sums(how, placed, linear)
    power = _power(how, placed, linear)
    is_zero = _is_zero(how, placed, linear)
    with_rows = [operand for operand in operands if operand.placed.is_rows]
    if not with_rows:
        return Placed(RowKind.SAME, power=power, is_zero=is_zero)
    rank = op.rank if rank is None else rank
    leading = next((o for o in with_rows if not o.placed.is_zero), with_rows[0])
    axis = leading.placed.axis + rank - leading.rank
    result = leading.placed.changed(axis=axis, power=power, is_zero=is_zero)
    for operand in operands:
        own = axis - (rank - operand.rank)
        if operand.placed.is_rows:
            is_alike = operand.placed.layout == result.layout or operand.placed.is_zero
            if operand.placed.axis != own or not is_alike:
                raise MixesRows("of rows with other rows")
        elif own >= 0 and operand.size(own) != 1:
            raise MixesRows("of rows with a constant that has as many")
    return result


def _of_sums(how: str, placed: Sequence[Placed], linear: int) -> Placed:
    sums = [each for each in placed if each.is_sum]
    others = [each for each in placed if not each.is_sum]
    power, is_single = sums[0].power, len(sums) == 1
    if any(not other.is_same for other in others):
        raise MixesRows("of rows with a sum over rows")
    terms = placed[1:] if how == "select" else placed
    is_like_sum = all(
        each.is_zero or each.power == (power if each.is_sum else power + 1)
        for each in terms
    )
    if how == "add" and is_like_sum:
        return sums[0]
    if how == "select" and placed[0].is_equal and is_like_sum:
        return sums[0]
    if how == "multiply" and is_single:
        return sums[0].changed(power=sum(each.power for each in placed))
    if how == "divide" and is_single and placed[0].is_sum:
        return sums[0].changed(power=power - sum(each.power for each in others))
    is_linear = how == "linear" and is_single and placed[linear].is_sum
    if is_linear and all(other.power == 0 for other in others):
        return sums[0]
    raise MixesRows(_OF_SUM)


def _power(how: str, placed: Sequence[Placed], linear: int) -> int:
    powers = [each.power for each in placed]
    if how == "multiply":
        return sum(powers)
    if how == "divide":
        return powers[0] - sum(powers[1:])
    if how in ("add", "select"):
        terms = placed if how == "add" else placed[1:]
        found = {each.power for each in terms if not each.is_zero}
        if len(found) > 1 or (how == "select" and powers[0]):
            raise MixesRows(_ROW_NUMBER)
        return found.pop() if found else 0
    if any(p for i, p in enumerate(powers) if how == "other" or i != linear):
        raise MixesRows(_ROW_NUMBER)
    return powers[linear] if how == "linear" else 0


def _is_zero(how: str, placed: Sequence[Placed], linear: int) -> bool:
    if how == "linear":
        return placed[linear].is_zero
    if how == "divide":
        return False
    terms = placed[1:] if how == "select" else placed
    return how in ("add", "select") and all(each.is_zero for each in terms)


def tensors(op: Operation, *left_out: str) -> list[Operand]:
    """The operands of an operation but for some."""
    given = [op.arguments.get(name) for name in left_out]
    return [o for o in op.operands if not any(o is each for each in given)]


def linear_in(op: Operation, name: str) -> Placed:
    """The placement of an elementwise result that is linear in one argument."""
    first = op.operand(name)
    return combined(op, "linear", [first, *tensors(op, name)])


def pointwise(op: Operation) -> Placed:
    """The placement of any elementwise result."""
    return combined(op, "other", op.operands)


def _scaled(op: Operation, name: str) -> int:
    """The power of the number of rows in a factor of an argument."""
    value = op.get(name)
    return 0 if value is None else op.of_number(value).placed.power


@rule("add sub rsub", sizes=["self", "other", "alpha"])
def _add(op: Operation) -> Placed:
    one, other = op.operand("self"), op.operand("other")
    power = _scaled(op, "alpha")
    if power:
        scaled = one if op.name == "rsub" else other
        placed = scaled.placed.changed(power=scaled.placed.power + power)
        new = Operand(placed, scaled.shapes)
        one, other = (new, other) if op.name == "rsub" else (one, new)
    return combined(op, "add", [one, other])


@rule("mul", sizes=["self", "other"])
def _multiply(op: Operation) -> Placed:
    return combined(op, "multiply", [op.operand("self"), op.operand("other")])


@rule("div true_divide", sizes=["self", "other"])
def _divide(op: Operation) -> Placed:
    how = "divide" if op.get("rounding_mode") is None else "other"
    return combined(op, how, [op.operand("self"), op.operand("other")])


@rule("reciprocal", sizes=["self"])
def _reciprocal(op: Operation) -> Placed:
    return combined(op, "divide", [op.of_number(1), op.operand("self")])


@rule("where", sizes=["self", "other"])
def _where(op: Operation) -> Placed:
    if op.get("self") is None:
        raise MixesRows("selects entries by value")
    condition, chosen, other = map(op.operand, ("condition", "self", "other"))
    if condition.known is not None and condition.placed.is_equal:
        # Of a condition that numbers of Python decide, one choice is not used.
        if not any(bool(known.any()) for known in condition.known):
            chosen = _unused(chosen)
        elif all(bool(known.all()) for known in condition.known):
            other = _unused(other)
    return combined(op, "select", [condition, chosen, other])


def _unused(operand: Operand) -> Operand:
    kind = RowKind.ROWS if operand.placed.is_rows else RowKind.SAME
    placed = operand.placed.changed(kind=kind, power=0, is_zero=True)
    return Operand(placed, operand.shapes, operand.dtype)


@rule("masked_fill", sizes=["value"])
def _masked_fill(op: Operation) -> Placed:
    names = ("mask", "value", "self")
    return combined(op, "select", [op.operand(name) for name in names])


@rule("addcmul addcdiv", sizes=["value"])
def _add_product(op: Operation) -> Placed:
    how = "multiply" if op.name == "addcmul" else "divide"
    factors = [op.operand("tensor1"), op.operand("tensor2")]
    product = combined(op, how, factors)
    scaled = product.changed(power=product.power + _scaled(op, "value"))
    return combined(op, "add", [op.operand("self"), Operand(scaled, op.shapes)])


@rule("neg positive real imag _conj conj_physical _conj_physical deg2rad rad2deg")
def _linear(op: Operation) -> Placed:
    return combined(op, "linear", op.operands)


@rule("view_as_real view_as_complex _neg_view resolve_conj resolve_neg")
def _same_axes(op: Operation) -> Placed:
    placed: Placed = op["self"].placed
    return placed


@rule("_to_copy")
def _cast(op: Operation) -> Placed:
    source, target = op.operand("self").dtype, op.dtypes[0]
    assert target is not None
    if source is None:  # A number of Python.
        return combined(op, "linear", [op.operand("self")])
    is_exact = not _is_float(source) and target is not torch.bool
    is_linear = _is_float(target) or is_exact or source is target
    return combined(op, "linear" if is_linear else "other", [op.operand("self")])


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@rule(
    "sigmoid_backward tanh_backward gelu_backward silu_backward threshold_backward "
    "elu_backward hardshrink_backward hardsigmoid_backward hardswish_backward "
    "hardtanh_backward leaky_relu_backward log_sigmoid_backward logit_backward "
    "mish_backward softplus_backward softshrink_backward glu_jvp "
    "native_dropout_backward infinitely_differentiable_gelu_backward"
)
def _gradient(op: Operation) -> Placed:
    # Its name is "grad", "grad_output" or "grad_out".
    return linear_in(op, next(n for n in op.arguments if n.startswith("grad")))


@rule("_prelu_kernel log_sigmoid_forward hardswish hardsigmoid softshrink softplus")
def _activation(op: Operation) -> Placed:
    return pointwise(op)


@rule("_prelu_kernel_backward")
def _prelu_gradient(op: Operation) -> Placed:
    return linear_in(op, "grad_output")


@rule(
    "mse_loss smooth_l1_loss huber_loss binary_cross_entropy soft_margin_loss "
    "binary_cross_entropy_with_logits"
)
def _loss(op: Operation) -> Placed:
    if op.get("reduction") != 0:
        raise NoRule
    return pointwise(op)


@rule(
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward "
    "binary_cross_entropy_backward soft_margin_loss_backward"
)
def _loss_gradient(op: Operation) -> Placed:
    if op.get("reduction") != 0:
        raise NoRule
    return linear_in(op, "grad_output")


@rule("copy", sizes=["size"])
def _copy_into(op: Operation) -> Placed:
    """A tensor whose entries become those of another, which broadcasts."""
    source, target = op["src"], op["self"].placed
    if _is_float(source.dtype) and not _is_float(op["self"].dtype):
        combined(op, "other", [source])  # It is rounded.
    if not target.is_rows:
        if source.placed.is_rows:
            raise MixesRows("of rows to a tensor without rows")
        return source.placed  # type: ignore[no-any-return]
    if source.placed.is_sum:
        raise MixesRows(_OF_SUM)
    like = Operand(target.changed(is_zero=True), op.shapes)
    return combined(op, "add", [like, source]).changed(is_zero=source.placed.is_zero)


@rule("fill zero", sizes=["value"])
def _fill(op: Operation) -> Placed:
    value = op.operand("value") if op.name == "fill" else op.of_number(0)
    if not value.placed.is_same:
        raise MixesRows(f"with {value.placed}")
    target = op["self"].placed
    kind = RowKind.ROWS if target.is_rows else RowKind.SAME
    return target.changed(  # type: ignore[no-any-return]
        kind=kind, power=value.placed.power, is_zero=value.placed.is_zero
    )
