"""Calls of layers that are known by type, as one operation each."""

from __future__ import annotations

from collections.abc import Sequence

from keras_strategies.engines.torch.row_proofs.recorded_operation import (
    Operand,
    Operation,
)
from keras_strategies.engines.torch.row_proofs.rules.registry import rule
from keras_strategies.engines.torch.row_proofs.value_placements import SAME, Placed
from keras_strategies.runtime.row_proofs.known_calls import UnknownUse
from keras_strategies.runtime.row_proofs.row_placements import RowKind

_ROWS = Placed(RowKind.ROWS)


@rule("known_layer")
def _known_layer(op: Operation) -> Sequence[Placed]:
    """Outputs with the rows of the arguments, and updates of variables."""
    if any(
        operand.placed != _ROWS.changed(is_zero=operand.placed.is_zero)
        for operand in op["rows"]
    ):
        raise UnknownUse
    if not all(operand.placed.is_equal for operand in op["variables"]):
        raise UnknownUse
    updates = op["updates"]
    return [_ROWS] * (len(op.results) - updates) + [SAME] * updates


@rule("known_layer_gradient")
def _known_layer_gradient(op: Operation) -> Sequence[Placed]:
    """Gradients of arguments by rows; that of the weights is a sum over rows."""
    given: list[Operand] = op["gradients"]
    powers = {each.placed.power for each in given if not each.placed.is_zero}
    is_by_rows = all(
        each.placed.is_zero
        or (each.placed.is_rows and (each.placed.axis, each.placed.layout) == _FIRST)
        for each in given
    )
    if len(powers) > 1 or not is_by_rows:
        raise UnknownUse
    power, is_zero = (powers.pop(), False) if powers else (0, True)
    found = [Placed(RowKind.SUM), _ROWS]
    return [
        found[len(shapes[0]) > 0].changed(power=power, is_zero=is_zero)
        for shapes in op.results
        if shapes is not None
    ]


_FIRST = (0, (1, 1))
