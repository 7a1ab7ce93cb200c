"""Rules of elementwise operations, by how they treat sums and the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    SAME,
    GraphPlacement,
    Kind,
    MixesRowsError,
    NoRuleError,
    joined,
)
from keras_strategies.engines.tensorflow.row_proofs.node import (
    Node,
    Result,
    Rule,
    rules,
)

ADDITIONS = "AddV2 Add Sub AddN Complex"
PRODUCTS = "Mul MulNoNan"
QUOTIENTS = "RealDiv Div DivNoNan"
#: Linear in the first input; the others, if any, only select where.
LINEAR = """
    Identity Neg StopGradient PreventGradient CheckNumerics Snapshot Real Imag Conj
    ReluGrad Relu6Grad LeakyReluGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad
    DeepCopy FakeQuantWithMinMaxArgsGradient
"""
#: Linear in the second input.
LINEAR_IN_SECOND = """
    SigmoidGrad TanhGrad RsqrtGrad SqrtGrad InvGrad ReciprocalGrad
"""
NONLINEAR = """
    Relu Relu6 LeakyRelu Elu Selu Softplus Softsign Sigmoid Tanh Exp Expm1 Log Log1p
    Erf Erfc Erfinv Ndtri Sqrt Rsqrt Square Abs Sign Pow SquaredDifference Sin Cos
    Tan Asin Acos Atan Atan2 Sinh Cosh Asinh Acosh Atanh Floor Ceil Round Rint
    FloorDiv FloorMod Mod TruncateDiv TruncateMod Reciprocal Inv Equal NotEqual Less
    LessEqual Greater GreaterEqual ApproximateEqual LogicalAnd LogicalOr LogicalNot
    IsNan IsInf IsFinite ClipByValue Lgamma Digamma Polygamma Zeta Igamma Igammac
    IgammaGradA Betainc BesselI0 BesselI1 BesselI0e BesselI1e BesselJ0 BesselJ1
    BesselK0 BesselK1 BesselK0e BesselK1e BesselY0 BesselY1 Dawsn Expint FresnelCos
    FresnelSin Spence BitwiseAnd BitwiseOr BitwiseXor Invert LeftShift RightShift
    Xlogy Xlog1py Xdivy NextAfter PopulationCount Bitcast ComplexAbs Angle AsString
    Bucketize StringToHashBucketFast StringToHashBucketStrong StringToHashBucket
    StringToNumber StringLower StringUpper StringStrip StringLength StringJoin
    RegexReplace StaticRegexReplace RegexFullMatch StaticRegexFullMatch Substr
    FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars
"""


def _powers(placements: Sequence[GraphPlacement]) -> set[int]:
    """Powers of the number of rows in the terms of a sum."""
    return {each.power for each in placements if not each.is_zero}


def add(node: Node) -> Result:
    if any(each.kind is Kind.LIST for each in node.inputs):
        return _added_lists(node)
    parts = _parts(node)
    if parts:
        power = parts[0].power
        # The same on all replicas is a sum too if it grows with the number of rows.
        is_sum = all(each.power == power for each in parts) and all(
            each.is_zero or (each.kind is Kind.SAME and each.power == power + 1)
            for each in node.inputs
            if each.kind is not Kind.PART
        )
        if is_sum:
            return parts[0]
        raise MixesRowsError(_together(node))
    powers = _powers(node.inputs)
    if len(powers) > 1:
        raise MixesRowsError(_together(node))
    is_zero = all(each.is_zero for each in node.inputs)
    return broadcast(node, powers.pop() if powers else 0, is_zero, is_sum=True)


def multiply(node: Node) -> Result:
    power = sum(each.power for each in node.inputs)
    parts = _parts(node)
    if len(parts) == 1 and _others_are_same(node, parts):
        return parts[0].but(power=power, is_zero=False)
    return broadcast(_without_parts(node, parts), power)


def divide(node: Node) -> Result:
    power = node.inputs[0].power - sum(each.power for each in node.inputs[1:])
    parts = _parts(node)
    if parts == [node.inputs[0]] and _others_are_same(node, parts):
        return parts[0].but(power=power, is_zero=False)
    return broadcast(_without_parts(node, parts), power)


def linear_in(index: int) -> Callable[[Node], Result]:
    """The rule of operations that are linear in one input."""

    def linear(node: Node) -> Result:
        given = node.inputs[index]
        parts = _parts(node)
        if (
            given.kind is Kind.PART
            and parts == [given]
            and _others_are_same(node, parts)
        ):
            return given
        if any(each.power for each in node.inputs if each is not given):
            raise MixesRowsError(_together(node))
        is_zero = all(each.is_zero for each in node.inputs)
        return broadcast(_without_parts(node, parts), given.power, is_zero)

    return linear


def nonlinear(node: Node) -> Result:
    if any(each.power for each in node.inputs):
        raise MixesRowsError(_together(node))
    return broadcast(_without_parts(node, _parts(node)), 0)


def select(node: Node) -> Result:
    """`SelectV2(condition, t, e)`."""
    condition, *branches = node.inputs
    if condition.power or condition.kind is Kind.PART:
        raise MixesRowsError(f"a condition that is {condition}")
    parts = [each for each in branches if each.kind is Kind.PART]
    if parts:
        if condition.kind is Kind.SAME and all(
            each.is_zero or each == parts[0] for each in branches
        ):
            return parts[0]
        raise MixesRowsError(_together(node))
    powers = _powers(branches)
    if len(powers) > 1:
        raise MixesRowsError(_together(node))
    return broadcast(node, powers.pop() if powers else 0)


def select_rows(node: Node) -> Result:
    """`Select`, with a condition of the same shape; it may also be one per row."""
    if node.rank(0) != node.rank(1):
        condition = node.inputs[0]
        if node.rank(0) != 1 or any(
            each.has_rows and (each.axis or not condition.has_rows)
            for each in node.inputs[1:]
        ):
            raise NoRuleError("a condition of another shape")
        if not (condition.has_rows and all(each.has_rows for each in node.inputs[1:])):
            raise NoRuleError("a condition of another shape")
        if any(each.multiple != condition.multiple for each in node.inputs):
            raise MixesRowsError("rows are combined with other rows")
        powers = _powers(node.inputs[1:])
        if len(powers) > 1 or condition.power:
            raise MixesRowsError(_together(node))
        return node.inputs[1].but(
            power=powers.pop() if powers else 0, is_zero=False, values=None
        )
    return select(node)


def extreme(node: Node) -> Result:
    """`Maximum(x, y)`, `Minimum(x, y)`.

    A size within two equal limits is known, whatever is limited: that of `bincount`.
    """
    lost = [each for each in node.inputs if each.is_lost]
    if not lost:
        return nonlinear(node)
    other = node.inputs[0] if node.inputs[1].is_lost else node.inputs[1]
    if len(lost) > 1 or not other.is_plain or other.values is None:
        return lost[0]
    if node.type == "Maximum":
        return lost[0].but(least=other.values)
    least = lost[0].least
    if least is not None and all(
        np.all(a >= b) for a, b in zip(least, other.values, strict=True)
    ):
        return other
    return lost[0].but(least=None)


def cast(node: Node) -> Result:
    """Rounding to integers is not linear, rounding to fewer digits is."""
    target, source = node.operation.outputs[0].dtype, node.operation.inputs[0].dtype
    if (
        target.is_floating
        or target.is_complex
        or (source.is_integer and not target.is_bool)
    ):
        return linear_in(0)(node)
    return nonlinear(node)


def like(node: Node) -> Result:
    """`ZerosLike`, `OnesLike`."""
    given, is_zero = node.inputs[0], node.type == "ZerosLike"
    if given.kind is Kind.LIST:
        return given.but(element=None)
    if not given.has_rows:
        return SAME.but(is_zero=is_zero)
    return given.but(power=0, is_zero=is_zero, values=None)


def _parts(node: Node) -> list[GraphPlacement]:
    return [each for each in node.inputs if each.kind is Kind.PART]


def _others_are_same(node: Node, parts: list[GraphPlacement]) -> bool:
    return all(each.kind is Kind.SAME for each in node.inputs if each is not parts[0])


def _without_parts(node: Node, parts: list[GraphPlacement]) -> Node:
    if parts:
        raise MixesRowsError(_together(node))
    return node


def _together(node: Node) -> str:
    return " with ".join(dict.fromkeys(map(str, node.inputs)))


def _added_lists(node: Node) -> Result:
    """Gradients of lists: a list without elements is zero."""
    elements = [each.element for each in node.inputs if each.element is not None]
    if not elements:
        return node.inputs[0]
    found = elements[0]
    for element in elements[1:]:
        found = joined(found, element)
    first = next(each for each in node.inputs if each.element is not None)
    return first.but(element=found)


def broadcast(
    node: Node, power: int, is_zero: bool = False, is_sum: bool = False
) -> GraphPlacement:
    """The placement of a result whose entries are computed from entries of the inputs.

    Args:
        node: Node, without sums among its inputs.
        power: int, the power of the number of rows in the result.
        is_zero: bool, whether the result is a literal zero.
        is_sum: bool, whether zeros of an unknown shape can be left out.
    """
    placed = [(i, each) for i, each in enumerate(node.inputs) if each.has_rows]
    if not placed:
        return SAME.but(power=power, is_zero=is_zero)
    offset = _offset(node)
    rank = max(node.rank(i) for i in range(len(node.inputs)))
    first, given = placed[0]
    axis = given.axis + rank - node.rank(first)
    if any(
        each.axis + rank - node.rank(i) != axis or each.multiple != given.multiple
        for i, each in placed
    ):
        raise MixesRowsError("rows are combined with other rows")
    for i, each in enumerate(node.inputs):
        own_axis = axis - (rank - node.rank(i))
        if each.has_rows or own_axis < 0:
            continue
        size = node.sizes(i)[own_axis]
        rows = given.multiple * node.counts[0]
        # Gradients that are not written to a list are zeros of any shape.
        if size != 1 and not (is_sum and each.is_zero and size in (None, rows)):
            raise MixesRowsError("rows are combined with a tensor that has as many")
    return given.but(
        axis=axis, power=power, is_zero=is_zero, offset=offset, values=None
    )


def _offset(node: Node) -> int:
    """By how much numbers of rows grow with each row; see `GraphPlacement.offset`."""
    offset = sum(each.offset for each in node.inputs)
    if not offset or node.type in ("AddV2", "Add", "Cast", "Identity"):
        return offset
    factors = [each.values for each in node.inputs if not each.offset]
    if node.type != "Mul" or len(factors) != 1 or factors[0] is None:
        raise MixesRowsError("numbers of rows")
    if factors[0][0].size != 1 or any((v != factors[0][0]).any() for v in factors[0]):
        raise MixesRowsError("numbers of rows")
    return offset * int(factors[0][0].item())


def pass_on(node: Node) -> Result:
    return list(node.inputs)


RULES: dict[str, Rule] = {
    **rules(ADDITIONS, add, takes_powers=True, takes_offsets=True),
    **rules(PRODUCTS, multiply, takes_powers=True, takes_offsets=True),
    **rules(QUOTIENTS, divide, takes_powers=True),
    **rules(LINEAR, linear_in(0), takes_powers=True, takes_offsets=True),
    **rules(LINEAR_IN_SECOND, linear_in(1), takes_powers=True),
    **rules(NONLINEAR, nonlinear, takes_powers=True),
    **rules("Maximum Minimum", extreme, takes_powers=True, takes_lost=True),
    **rules("SelectV2", select, takes_powers=True),
    **rules("Select", select_rows, takes_powers=True),
    **rules("Cast", cast, takes_powers=True, takes_offsets=True),
    **rules("ZerosLike OnesLike", like, takes_powers=True),
    **rules("IdentityN", pass_on, takes_all=True),
}
