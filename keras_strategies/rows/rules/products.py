"""Sums of products: contractions, outer products and the like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from string import ascii_letters

from keras_strategies.rows.placed import SAME, SUM, Placed, joined, mixed, not_along
from keras_strategies.rows.propagation import Step, rule
from keras_strategies.rows.row_placements import RowKind


def _contracted(step: Step, labels: Sequence[str], output: str) -> Placed:
    """A sum of products over the labels that the output lacks.

    Args:
        step: the operation.
        labels: for each argument a letter for each axis.
        output: the letters of the result's axes.
    """
    leaves = [each for each, _ in step.leaves()]
    power = sum(each.power for each in leaves)
    sums = [each for each in leaves if each.is_sum]
    rows = [(e, own) for e, own in zip(leaves, labels, strict=True) if e.is_rows]
    if sums:
        if rows or len(sums) > 1:
            return mixed("multiplies a sum over rows by more than a constant")
        return replace(SUM, power=power)
    if not rows:
        return SAME.times(power)
    along = {own[each.axis] for each, own in rows}
    if len(along) > 1 or len({each.layout for each, _ in rows}) > 1:
        return mixed("multiplies rows by others")
    (label,) = along
    row, _ = rows[0]
    pairs = zip(leaves, labels, strict=True)
    if any(label in other for each, other in pairs if not each.is_rows):
        return mixed("multiplies rows by a constant for each")
    if label not in output:
        return replace(SUM, power=power)
    return Placed(RowKind.ROWS, output.index(label), *row.layout, power=power)


@rule("Einsum")
def _einsum(step: Step) -> Placed:
    text = step.attribute("subscripts").replace(" ", "")
    inputs, arrow, output = text.partition("->")
    labels = inputs.split(",")
    # Letters of further axes, the last one first.
    free = "".join(letter for letter in ascii_letters if letter not in text)
    most = 0
    for i, (own, (_, rank)) in enumerate(zip(labels, step.leaves(), strict=True)):
        if "..." in own:
            more = rank - len(own) + 3
            labels[i] = own.replace("...", free[:more][::-1])
            most = max(most, more)
    output = output.replace("...", free[:most][::-1])
    if not arrow:
        every = "".join(labels)
        output = "".join(sorted(x for x in set(every) if every.count(x) == 1))
    if any(len(set(own)) < len(own) for own in labels):
        return mixed("takes a diagonal")
    return _contracted(step, labels, output)


@rule("Matmul")
def _matmul(step: Step) -> Placed:
    one, two = (rank for _, rank in step.leaves())
    batch = max(one, two, 2) - 2
    letters = ascii_letters[:batch]
    a = letters[batch - max(one - 2, 0) :] + ("XY" if one > 1 else "Y")
    b = letters[batch - max(two - 2, 0) :] + ("YZ" if two > 1 else "Y")
    output = letters + ("X" if one > 1 else "") + ("Z" if two > 1 else "")
    return _contracted(step, [a, b], output)


@rule("Dot Inner Vdot Tensordot")
def _product(step: Step) -> Placed:
    one, two = (rank for _, rank in step.leaves())
    a, b = ascii_letters[:one], ascii_letters[26 : 26 + two]
    if 0 in (one, two) and step.name != "Tensordot":
        return _contracted(step, [a, b], a + b)
    pairs: list[tuple[int, int]] = [(one - 1, two - 1)]
    if step.name == "Dot":
        pairs = [(one - 1, max(two - 2, 0))]
    elif step.name == "Tensordot":
        axes = step.attribute("axes")
        if isinstance(axes, int):
            pairs = [(one - axes + i, i) for i in range(axes)]
        else:
            first, second = ([x] if isinstance(x, int) else list(x) for x in axes)
            pairs = [(i % one, j % two) for i, j in zip(first, second, strict=True)]
    elif step.name == "Vdot":
        pairs = [(i, i) for i in range(one)]
    for i, j in pairs:
        b = b[:j] + a[i] + b[j + 1 :]
    gone = {a[i] for i, _ in pairs}
    output = "".join(x for x in a + b if x not in gone)
    return _contracted(step, [a, b], output)


@rule("Kron")
def _kron(step: Step) -> Placed:
    (x, rank), (y, other_rank) = step.leaves()
    if y.is_rows:
        return mixed("multiplies rows")
    if not x.is_rows or not y.is_same or rank != other_rank:
        return joined([(x, 0), (y, 0)], 0)
    size = step.shapes("x2")[0][x.axis]
    return replace(x, multiple=x.multiple * size, power=x.power + y.power)


@rule("Cross")
def _cross(step: Step) -> Placed:
    placed = joined(step.leaves(), step.out_rank)
    axes = [step.attribute(name) for name in ("axisa", "axisb", "axisc")]
    if any(int(each) % step.out_rank != step.out_rank - 1 for each in axes):
        return mixed("is a cross product along another axis than the last")
    return not_along(placed, -1, step.out_rank)
