"""Functions of entries at the same place, and what is filled."""

from __future__ import annotations

import math
from dataclasses import replace

from keras_strategies.rows.placed import (
    SAME,
    SUM,
    MixesRows,
    Placed,
    added,
    joined,
    mixed,
    place_constant,
    power_of_rows,
    rows_of_shapes,
)
from keras_strategies.rows.propagation import Step, rule


@rule(
    """Absolute Abs Fabs Angle Arccos Arccosh Arcsin Arcsinh Arctan Arctan2 Arctanh
    BitwiseAnd BitwiseInvert BitwiseNot BitwiseOr BitwiseXor BitwiseLeftShift LeftShift
    BitwiseRightShift RightShift Cbrt Ceil Clip Cos Cosh Equal Exp Exp2 Expm1
    FloorDivide Floor Fmax Fmin Fmod Gcd Greater GreaterEqual Heaviside Hypot I0
    Isclose Isfinite Isinf Isnan Isneginf Isposinf Isreal Lcm Ldexp Less LessEqual Log
    Log10 Log1p Log2 Logaddexp Logaddexp2 LogicalAnd LogicalNot LogicalOr LogicalXor
    Maximum Minimum Mod NanToNum Nextafter NotEqual Power Reciprocal Round Sign Signbit
    Sin Sinc Sinh Sqrt Square Tan Tanh Trunc SaturateCast View Select Rsqrt Erf Erfc
    Erfinv ReLU Relu Relu6 Sigmoid SparseSigmoid Softplus Softsign SoftShrink SparsePlus
    Silu Squareplus LogSigmoid LeakyRelu HardSigmoid HardSilu Elu Selu Gelu Celu
    TanhShrink HardTanh HardShrink Threshold BinaryCrossentropy Polar"""
)
def _entry_by_entry(step: Step) -> Placed:
    return joined(step.leaves(), step.out_rank)


@rule("Negative Copy ConvertToTensor StopGradient Real Imag Conj Conjugate Deg2rad")
@rule("Rad2deg Array Cast")
def _linear_of_one(step: Step) -> Placed:
    return step.placed()[0]


@rule("Add Subtract")
def _added(step: Step) -> Placed:
    return added(step.leaves(), step.out_rank)


@rule("Multiply Divide TrueDivide DivideNoNan")
def _multiplied(step: Step) -> Placed:
    one, other = step.placed()
    divides = step.name != "Multiply"
    power = one.power - other.power if divides else one.power + other.power
    if one.is_sum or (other.is_sum and not divides):
        if (one if other.is_sum else other).is_same:
            return replace(SUM, power=power)
        return mixed("multiplies a sum over rows by more than a constant")
    return joined(step.leaves(), step.out_rank, same_power=False).times(power)


@rule("Where")
def _where(step: Step) -> Placed:
    condition, *chosen = step.leaves("condition", "x1", "x2")
    if condition[0].is_constant:
        return added(chosen, step.out_rank)
    return joined([condition, *chosen], step.out_rank)


@rule("OnesLike ZerosLike FullLike EmptyLike")
def _filled_like(step: Step) -> Placed:
    placed, *value = step.placed()
    if any(not each.is_constant for each in value):
        return mixed("fills a tensor with what depends on rows")
    found = replace(placed, power=0) if placed.is_rows else SAME
    return replace(found, is_zero=step.name == "ZerosLike")


@rule("Size")
def _size(step: Step) -> Placed:
    sizes = [math.prod(shape) for shape in step.shapes("x")]
    return SAME.times(power_of_rows(sizes, step.counts))


# What a trace makes itself.


@rule("constant")
def _constant(step: Step) -> Placed:
    return place_constant([node.args[0] for node in step.nodes], step.counts)


@rule("filled")
def _filled(step: Step) -> Placed:
    placed = rows_of_shapes(step.out_shapes(), step.counts)
    (entry,) = step.given(0)
    if not entry.is_constant:
        raise MixesRows("fills a tensor with what depends on rows")
    return replace(placed, is_zero=entry.is_zero)


@rule("row_numbers")
def _row_numbers(step: Step) -> Placed:
    return mixed("uses the numbers of the rows")


@rule("draw")
def _drawn(step: Step) -> Placed:
    found = rows_of_shapes(step.out_shapes(), step.counts)
    if found.is_rows and found.axis != 0:
        return mixed("draws numbers with the rows along another axis than the first")
    return joined([(found, step.out_rank), *step.leaves()], step.out_rank)


@rule("in_place")
def _changed_in_place(step: Step) -> Placed:
    """Other tensors with its memory have placements, which must not change."""
    before, after, *_ = step.placed("given")
    if not step.nodes[0].args[2]:
        return mixed("changes a tensor in place that may be an argument")
    if before.is_mixed or before.is_zero or before != replace(after, is_zero=False):
        return mixed("changes where a tensor has the rows, in place")
    return after


@rule("collective")
def _collective(step: Step) -> Placed:
    """Equal on all replicas, whatever its argument is."""
    return SAME
