"""Tensors made of a shape, and random numbers."""

from __future__ import annotations

from typing import Any

from keras_strategies.engines.torch.row_proofs.recorded_operation import (
    Operand,
    Operation,
    Varying,
)
from keras_strategies.engines.torch.row_proofs.rules.elementwise import combined
from keras_strategies.engines.torch.row_proofs.rules.reductions import nonlinear
from keras_strategies.engines.torch.row_proofs.rules.registry import rule
from keras_strategies.engines.torch.row_proofs.value_placements import (
    SAME,
    MixesRows,
    Placed,
    rows_of_shapes,
)
from keras_strategies.runtime.row_proofs.row_placements import RowKind


def _filled(op: Operation, power: int = 0, is_zero: bool = False) -> Placed:
    """One value everywhere; laid out like the tensor that it is made like."""
    like = op.get("self")
    placed = rows_of_shapes(op.shapes, op.counts)
    if isinstance(like, Operand) and like.placed.is_rows and like.shapes == op.shapes:
        placed = like.placed
    return placed.changed(power=power, is_zero=is_zero)


@rule("zeros zeros_like new_zeros", sizes=["size"])
def _zeros(op: Operation) -> Placed:
    return _filled(op, is_zero=True)


@rule(
    "empty empty_like new_empty empty_strided new_empty_strided empty_permuted "
    "ones ones_like new_ones",
    sizes=["size", "stride", "physical_layout"],
)
def _ones(op: Operation) -> Placed:
    return _filled(op)


@rule("full full_like new_full scalar_tensor", sizes=["size", "fill_value", "s"])
def _full(op: Operation) -> Placed:
    name = "fill_value" if "fill_value" in op.arguments else "s"
    value = op.of_number(op[name]).placed
    return _filled(op, value.power, value.is_zero)


@rule(
    "arange linspace logspace eye tril_indices triu_indices",
    sizes=["start", "end", "step", "steps", "n", "m", "row", "col"],
)
def _numbers(op: Operation) -> Placed:
    """Numbers of entries: equal for any number of rows, or numbers of rows."""
    if not any(map(_varies, op.arguments.values())):
        return SAME
    reason = "of the number of rows, or of their numbers,"
    if op.name != "arange" or op.get("start", 0) != 0 or op.get("step", 1) != 1:
        raise MixesRows(reason)
    placed = rows_of_shapes(op.shapes, op.counts)
    reason = f"'arange' {reason}"
    return placed.changed(kind=RowKind.MIXED, reason=reason, offset=placed.multiple)


def _varies(value: Any) -> bool:
    return isinstance(value, Varying)


# Random numbers.


def random(op: Operation) -> Placed:
    """A draw for each entry, of parameters for each entry or for all."""
    operands = [o for o in op.operands if o.rank or not o.placed.is_equal]
    if not operands:
        return rows_of_shapes(op.shapes, op.counts)
    return combined(op, "other", operands)


@rule("rand randn normal_functional", sizes=["size"])
def _random(op: Operation) -> Placed:
    return random(op)


@rule("normal", sizes=["size"])
def _normal(op: Operation) -> Placed:
    return random(op)


@rule("randint", sizes=["size"])
def _random_int(op: Operation) -> Placed:
    return random(op)


@rule("randperm")
def _permutation(op: Operation) -> Placed:
    raise MixesRows("of the rows")


@rule("native_dropout _fused_dropout")
def _dropout(op: Operation) -> Placed:
    return combined(op, "linear", [op.operands[0]])


@rule("multinomial")
def _multinomial(op: Operation) -> Placed:
    source = op["self"]
    return nonlinear(op, source, [source.rank - 1])


@rule("_sample_dirichlet")
def _dirichlet(op: Operation) -> Placed:
    source = op["self"]
    return nonlinear(op, source, [source.rank - 1])


# Results of collectives.


@rule("collective")
def _collective(op: Operation) -> Placed:
    return Placed(RowKind.SAME)


@rule("collective_gradient")
def _collective_gradient(op: Operation) -> Placed:
    """The gradients of all replicas, added: a sum over rows that all have."""
    placed = op["self"].placed
    if placed.is_sum:
        return Placed(RowKind.SAME, power=placed.power)
    if placed.is_same:
        return placed.changed(power=placed.power - 1)  # type: ignore[no-any-return]
    raise MixesRows("of gradients of rows")
