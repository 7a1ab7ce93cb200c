"""Reductions, and functions along an axis."""

from __future__ import annotations

from dataclasses import replace

import keras

from keras_strategies.rows.placed import (
    SUM,
    Placed,
    axes_of,
    joined,
    mixed,
    not_along,
)
from keras_strategies.rows.propagation import Step, rule


def _reduced(step: Step, name: str = "x") -> tuple[Placed, bool, Placed]:
    """The argument, whether its rows are reduced, and the result if they are not."""
    placed, rank = step.placed(name)[0], step.rank(name)
    if placed.is_rows and placed.axis in axes_of(step.axis, rank):
        return placed, True, placed
    return placed, False, step.moved(placed)


@rule("Sum Mean Nansum CountNonzero Average")
def _summed(step: Step) -> Placed:
    placed, over_rows, rest = _reduced(step)
    if step.name in ("CountNonzero", "Nansum"):
        rest = joined([(rest, 0)], 0)
    weights = step.placed("weights") if step.name == "Average" else []
    if any(not each.is_same for each in weights) or (over_rows and weights):
        return mixed("weighs rows")
    if not over_rows or rest.is_mixed:
        return rest
    return replace(SUM, power=placed.power - (step.name in ("Mean", "Average")))


@rule(
    """All Any Amax Amin Max Min Prod Argmax Argmin Median Quantile Percentile Ptp Std
    Var Nanargmax Nanargmin Nanmax Nanmean Nanmedian Nanmin Nanpercentile Nanprod
    Nanquantile Nanstd Nanvar Logsumexp Norm Trapezoid"""
)
def _reduction(step: Step) -> Placed:
    name = "y" if step.name == "Trapezoid" else "x"
    _, over_rows, rest = _reduced(step, name)
    if over_rows:
        return mixed("goes over all rows")
    if not _are_constants(step, name):
        return mixed("has another argument that depends on rows")
    return joined([(rest, 0)], 0)


def _are_constants(step: Step, name: str) -> bool:
    """Whether all arguments but one are the same for any number of rows."""
    others = [p for n in step.arguments[0] if n != name for p in step.placed(n)]
    return all(each.is_constant for each in others)


@rule("Moments")
def _moments(step: Step) -> list[Placed]:
    placed, over_rows, rest = _reduced(step)
    if over_rows:
        mean = replace(SUM, power=placed.power - 1)
        return [mean, mixed("is a variance over rows")]
    return [joined([(rest, 0)], 0)] * 2


#: Of them, those of which sums over rows are sums over rows.
_LINEAR = frozenset(["Cumsum", "Diff", "Flip", "Fliplr", "Flipud", "Roll", "Rot90"])


@rule("Argpartition Argsort Cumprod Cumsum Diff Flip Fliplr Flipud Glu LogSoftmax")
@rule("Nancumprod Nancumsum Normalize Roll Rot90 Softmax Sort Sparsemax TakeAlongAxis")
@rule("TopK")
def _along(step: Step) -> Placed:
    """A function along an axis, or several, with as many axes as its argument."""
    leaves = step.leaves()
    placed = leaves[0][0]
    if step.name == "Argpartition" and keras.backend.backend() == "tensorflow":
        # Keras 3.15 and 3.16: entries that any row has chosen are taken from all.
        text = "is computed from all rows by Keras on TensorFlow"
        return mixed(text) if placed.is_rows else placed
    if step.name not in _LINEAR:
        placed = joined(leaves, step.out_rank)
    return not_along(placed, step.axis, step.out_rank)


@rule("LayerNorm RMSNorm BatchNorm")
def _normalized(step: Step) -> Placed:
    rank = step.rank("x")
    placed = joined(step.leaves("x"), rank)
    if not _are_constants(step, "x"):
        return mixed("normalizes by what depends on rows")
    axis = step.attribute("axis")
    if step.name == "LayerNorm" and not isinstance(axis, (list, tuple)):
        axis = list(range(int(axis) % rank, rank))
    return not_along(placed, axis, rank)


@rule("CategoricalCrossentropy SparseCategoricalCrossentropy InTopK")
def _of_classes(step: Step) -> Placed:
    (target, _), (output, rank) = step.leaves()
    axis = int(step.axis) % rank
    output = joined([(not_along(output, axis, rank), rank)], rank)
    if step.name.startswith("Cat"):
        target = not_along(target, axis, rank)
    elif axis != rank - 1:
        return mixed("has its classes along another axis than the last")
    return joined([(target, 0), (output, 0)], 0)
