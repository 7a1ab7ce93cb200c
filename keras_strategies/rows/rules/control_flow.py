"""Loops, branches, maps, and gradients of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from keras import tree

from keras_strategies.rows.placed import (
    SAME,
    SUM,
    ZERO,
    MixesRows,
    Placed,
    as_sum,
    either,
    mixed,
    not_along,
)
from keras_strategies.rows.row_tensors import shape_of
from keras_strategies.rows.rules.step import Step, rule


def _repeated(
    step: Step,
    body: int,
    carry: list[Placed],
    more: list[Placed],
    first: Sequence[Placed] = (),
) -> tuple[list[Placed], list[Placed]]:
    """The placements of what a loop carries, and of the outputs of its body."""
    for _ in range(4):
        outputs = step.body(body, [*first, *carry, *more])
        after = [either(a, b) for a, b in zip(carry, outputs, strict=False)]
        if after == carry:
            return carry, outputs
        carry = after
    raise MixesRows("is a loop whose values change their placements")


def _without_axis(placed: Placed) -> Placed:
    """The placement of an entry of the first axis."""
    if not placed.has_axis:
        return placed
    return mixed("loops over rows") if placed.axis == 0 else placed.at(placed.axis - 1)


def _with_axis(placed: Placed) -> Placed:
    return placed if placed.axis is None else placed.at(placed.axis + 1)


@rule("scan")
def _scan(step: Step) -> list[Placed]:
    carry = step.placements.placed(step.given(0))
    xs = step.placements.placed(step.given(1))
    carry, outputs = _repeated(step, 0, carry, [_without_axis(x) for x in xs])
    return [*carry, *(_with_axis(each) for each in outputs[len(carry) :])]


@rule("for")
def _for(step: Step) -> Placed | list[Placed]:
    for bound in (step.given(0), step.given(1)):
        (placed,) = step.placements.placed(bound)
        if not placed.is_constant:
            return mixed("is a loop whose length depends on rows")
    carry = step.placements.placed(step.given(2))
    return _repeated(step, 0, carry, [], first=[SAME])[0]


@rule("while")
def _while(step: Step) -> Placed | list[Placed]:
    carry = step.placements.placed([node.args[0] for node in step.nodes])
    carry, _ = _repeated(step, 1, carry, [])
    (test,) = step.body(0, carry)
    if test.is_rows and test.axis is None:
        return [either(each, SAME) if each.is_rows else test for each in carry]
    if not test.is_constant:
        return mixed("is a loop whose length depends on rows")
    return carry


@rule("switch")
def _switch(step: Step) -> Placed | list[Placed]:
    (index,) = step.placements.placed([node.args[0] for node in step.nodes])
    every = [step.body(i, []) for i in range(len(step.nodes[0].bodies))]
    found = [functools.reduce(either, placed) for placed in zip(*every, strict=True)]
    if index.is_rows and index.axis is None:
        return [either(index, each) if each.is_same else each for each in found]
    if not index.is_constant:
        return mixed("is a branch that depends on rows")
    return found


@rule("map")
def _map(step: Step) -> Placed | list[Placed]:
    elements = step.placements.placed([node.args[0] for node in step.nodes])
    rows = {each for each in elements if each.is_rows and each.axis == 0}
    if not rows:
        inner = [_without_axis(each) for each in elements]
        return [_with_axis(each) for each in step.body(0, inner)]
    if len(rows) > 1 or any(each not in rows for each in elements):
        return mixed("maps rows with others")
    (row,) = rows
    hidden = row.at(None)
    outputs = step.body(0, [hidden for _ in elements])
    return [
        row if each in (hidden, SAME, ZERO) else _refused_in_map(each)
        for each in outputs
    ]


def _refused_in_map(placed: Placed) -> Placed:
    return placed if placed.is_mixed else mixed("uses all rows for each row")


@rule("associative_scan")
def _associative_scan(step: Step) -> list[Placed]:
    given = [node.args[0] for node in step.nodes]
    elements = step.placements.placed(given)
    axis = step.nodes[0].kwargs["axis"]
    ranks = [len(shape_of(x)) for x in tree.flatten(given[0])]
    outputs = step.body(0, [*elements, *elements])
    found = [either(a, b) for a, b in zip(elements, outputs, strict=True)]
    return [not_along(p, axis, r) for p, r in zip(found, ranks, strict=True)]


@rule("jvp")
def _jvp(step: Step) -> Placed | list[Placed]:
    primals = step.placements.placed(step.given(0))
    tangents = step.placements.placed(step.given(1))
    if primals != tangents:
        return mixed("has tangents unlike its arguments")
    return step.body(0, primals) * 2


@rule("gradient")
def _gradient(step: Step) -> Placed | list[Placed]:
    """Gradients of the user's: those of rows are rows, those of others are sums."""
    arguments = step.placements.placed(step.given(0))
    outputs = step.placements.placed(step.given(1))
    # What reaches a function of sums has no rows; that of weights is summed.
    upstream = [each if each.is_rows else SUM for each in outputs]
    placed = iter(step.body(0, upstream))
    leaves = tree.flatten(step.nodes[0].bodies[0].outputs)
    gradients = [None if leaf is None else next(placed) for leaf in leaves]
    if len(gradients) != len(arguments):
        return mixed("has other gradients than arguments")
    for argument, gradient in zip(arguments, gradients, strict=True):
        if gradient is None or gradient.is_zero:
            continue
        is_right = gradient == argument if argument.is_rows else as_sum(gradient, 0)
        if not is_right:
            reason = gradient.reason or f"is {gradient.kind.value}"
            return mixed(f"has a gradient of its own that {reason}")
    return outputs
