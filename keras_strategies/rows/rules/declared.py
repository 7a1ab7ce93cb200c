"""A layer that is declared with `ks.row_wise`."""

from __future__ import annotations

from dataclasses import replace

from keras_strategies.rows.placed import ROWS, SAME, SUM, Placed, mixed
from keras_strategies.rows.rules.step import Step, rule


@rule("row_wise")
def _declared(step: Step) -> Placed | list[Placed]:
    given = step.placements.placed([node.args for node in step.nodes])
    placed = [replace(each, is_zero=False) for each in given]
    for each in placed:
        if each.is_mixed:
            return each
        if each not in (ROWS, SAME):
            return mixed("gets values that are neither rows nor constants")
    options = step.nodes[0].kwargs
    if ROWS not in placed:
        return SAME
    means = [SUM.times(-1)] * options["means"]
    return [ROWS] * options["outputs"] + means
