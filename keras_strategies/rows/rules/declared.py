"""Layers that are one operation: known ones of Keras, and declared ones."""

from __future__ import annotations

from dataclasses import replace

from keras_strategies.rows.placed import (
    ROWS,
    SAME,
    SUM,
    Placed,
    UnknownUse,
    mixed,
)
from keras_strategies.rows.propagation import Step, rule
from keras_strategies.rows.row_tensors import RowTensor, is_array, tensors_in


@rule("row_wise")
def _row_wise(step: Step) -> Placed | list[Placed]:
    """Outputs have the rows of the arguments; what else it computes has none."""
    kinds, number = set(), step.nodes[0].number
    for leaves in step.placements.columns([(n.args, n.kwargs) for n in step.nodes]):
        placed = step.placements.of_leaf(leaves)
        is_flag = not (isinstance(leaves[0], RowTensor) or is_array(leaves[0]))
        if placed.is_mixed:
            return placed
        if not (is_flag and placed.is_constant):
            kinds.add(replace(placed, is_zero=False))
    outputs, *others = step.nodes[0].outputs
    outputs, more = tensors_in([outputs]), tensors_in(others)
    if number is None and not kinds <= {ROWS, SAME}:
        return mixed("gets values that are neither rows nor constants")
    if number is None:
        found, other = (ROWS, SUM.times(-1)) if ROWS in kinds else (SAME, SAME)
        return [found] * len(outputs) + [other] * len(more)
    found, *others = kinds
    is_plain = (found.is_rows and found.axis == 0) or found.is_same
    if others or found.power or not is_plain:
        raise UnknownUse(number)
    return [found] * len(outputs) + [SAME] * len(more)
