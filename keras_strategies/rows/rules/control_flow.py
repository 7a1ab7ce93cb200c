"""Loops, branches, maps, and gradients of the user's own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

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
from keras_strategies.rows.propagation import Step, rule
from keras_strategies.rows.row_tensors import shape_of


def _repeated(
    step: Step, body: int, carry: list[Placed], more: Sequence[Placed] = ()
) -> tuple[list[Placed], list[Placed]]:
    """The placements of what a loop carries, and of the outputs of its body."""
    for _ in range(4):
        outputs = step.body(body, [*carry, *more])
        after = [either(a, b) for a, b in zip(carry, outputs, strict=False)]
        if after == carry:
            return carry, outputs
        carry = after
    raise MixesRows("is a loop whose values change their placements")


@rule("scan")
def _scan(step: Step) -> Placed | list[Placed]:
    xs = step.given(1)
    if any(x.is_mixed or (x.is_rows and x.axis == 0) for x in xs):
        return mixed("loops over rows")
    entries = [x.at(x.axis - 1) for x in xs]
    carry, outputs = _repeated(step, 0, step.given(0), entries)
    return [*carry, *(each.at(each.axis + 1) for each in outputs[len(carry) :])]


@rule("while")
def _while(step: Step) -> Placed | list[Placed]:
    carry, _ = _repeated(step, 1, step.given(0))
    (test,) = step.body(0, carry)
    if not test.is_constant:
        return mixed("is a loop whose length depends on rows")
    return carry


@rule("switch")
def _switch(step: Step) -> Placed | list[Placed]:
    (index,) = step.given(0)
    every = [step.body(i, []) for i in range(len(step.nodes[0].bodies))]
    found = [functools.reduce(either, placed) for placed in zip(*every, strict=True)]
    if not index.is_constant:
        return mixed("is a branch that depends on rows")
    return found


@rule("map")
def _map(step: Step) -> Placed | list[Placed]:
    elements = step.given(0)
    if not any(each.is_rows and each.axis == 0 for each in elements):
        inner = [each.at(each.axis - 1) for each in elements]
        return [each.at(each.axis + 1) for each in step.body(0, inner)]
    row, *others = (replace(each, is_zero=False) for each in elements)
    if row.power or any(each != row for each in others):
        return mixed("maps rows with others")
    # For the function a row is a constant. What depends on others is none.
    outputs = step.body(0, [SAME for _ in elements])
    others = [each for each in outputs if not each.is_constant]
    refused = mixed("uses all rows for each row")
    return next((each for each in others if each.is_mixed), refused) if others else row


@rule("associative_scan")
def _associative_scan(step: Step) -> list[Placed]:
    elements, (first, *_) = step.given(0), step.nodes
    axis = first.kwargs["axis"]
    ranks = [len(shape_of(x)) for x in tree.flatten(first.args[0])]
    outputs = step.body(0, [*elements, *elements])
    found = [either(a, b) for a, b in zip(elements, outputs, strict=True)]
    return [not_along(p, axis, r) for p, r in zip(found, ranks, strict=True)]


@rule("jvp")
def _jvp(step: Step) -> Placed | list[Placed]:
    primals = step.given(0)
    if primals != step.given(1):
        return mixed("has tangents unlike its arguments")
    return step.body(0, primals) * 2


@rule("gradient")
def _gradient(step: Step) -> Placed | list[Placed]:
    """Gradients of the user's: those of rows are rows, those of others are sums."""
    arguments, outputs = step.given(0), step.given(1)
    # What reaches a function of sums has no rows; that of weights is summed.
    upstream = [each if each.is_rows else SUM for each in outputs]
    placed = iter(step.body(0, upstream))
    leaves = tree.flatten(step.nodes[0].bodies[0].outputs)
    gradients = [ZERO if leaf is None else next(placed) for leaf in leaves]
    if len(gradients) != len(arguments):
        return mixed("has other gradients than arguments")
    for argument, gradient in zip(arguments, gradients, strict=True):
        is_right = gradient == argument if argument.is_rows else as_sum(gradient, 0)
        if not (is_right or gradient.is_zero):
            reason = gradient.reason or f"is {gradient.kind.value}"
            return mixed(f"has a gradient of its own that {reason}")
    return outputs
