"""Propagates row placements through the recordings of one call.

The call is recorded with several numbers of rows. The recordings must have the same
operations; where arguments differ, they depend on the number of rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from keras_strategies.engines.torch.compat import schema_arguments
from keras_strategies.engines.torch.row_proofs.call_recorder import CallRecorder
from keras_strategies.engines.torch.row_proofs.recorded_operation import (
    Operand,
    Operation,
    Varying,
)
from keras_strategies.engines.torch.row_proofs.recorded_steps import (
    RecordedStep,
    ValueTraits,
    Version,
    operation_name,
)
from keras_strategies.engines.torch.row_proofs.rules import (
    batched,
    contractions,
    elementwise,
    filled,
    indexing,
    known_layers,
    reductions,
    shapes,
)
from keras_strategies.engines.torch.row_proofs.rules.registry import (
    RuleFunction,
    find_rule,
)
from keras_strategies.engines.torch.row_proofs.value_placements import (
    SAME,
    ZERO,
    MixesRows,
    NoRule,
    Placed,
    power_of_rows,
    rows_of_shapes,
)
from keras_strategies.runtime.row_proofs.row_placements import RowKind

#: The files with the rules, which register them.
RULE_MODULES = (
    batched,
    contractions,
    elementwise,
    filled,
    indexing,
    known_layers,
    reductions,
    shapes,
)
# Arguments of operations of this package.
_OWN_ARGUMENTS = {
    "written_view": ("view", "before", "after"),
    "branch": ("self",),
    "collective": ("self",),
    "collective_gradient": ("self",),
    "known_layer": ("rows", "variables", "updates"),
    "known_layer_gradient": ("gradients",),
}
# Operations that take the numbers of the rows as indices.
_TAKES_NUMBERS = frozenset(("index", "index_put"))
# Operations that only move numbers of entries, and that take them as an index.
_MOVES_NUMBERS = frozenset(
    ("view", "_unsafe_view", "unsafe_view", "_reshape_alias", "as_strided")
)
_ADDS_AT_NUMBERS = frozenset(("index_add",))


class RecordingsDiffer(Exception):
    """Recordings with different numbers of rows have different operations."""


class Propagation:
    """Placements of the values of a call.

    Args:
        counts: the numbers of rows.
        recorders: a recording with each.
        begin: int, the number of recorded operations that are left out.

    Attributes:
        problem: str, why Python may take other branches on replicas; empty.
    """

    def __init__(
        self, counts: Sequence[int], recorders: Sequence[CallRecorder], begin: int = 0
    ):
        self._counts = tuple(counts)
        self._recorders = list(recorders)
        self._placed: dict[int, Placed] = {}
        # By the version in the first recording, those in all.
        self._versions: dict[int, tuple[int, ...]] = {}
        self._done = begin
        self.problem = ""

    def place(self, version: int, placed: Placed) -> None:
        """Places a value from outside.

        Args:
            version: int, its version in the first recording.
            placed: its placement.
        """
        self._placed[version] = placed

    def place_of_all(self, versions: tuple[int, ...], placed: Placed) -> None:
        """Places a value with these versions in the recordings."""
        self._versions[versions[0]] = versions
        self._placed[versions[0]] = placed

    def placed(self, versions: tuple[int, ...]) -> Placed:
        """The placement of a value with these versions; `advance` first.

        Raises:
            RecordingsDiffer: if they are not one value.
        """
        version = versions[0]
        known = self._versions.get(version)
        if known is None:
            origins = [
                recorder.origins.get(each)
                for recorder, each in zip(self._recorders, versions, strict=True)
            ]
            if origins[0] is None or any(o != origins[0] for o in origins):
                raise RecordingsDiffer("other values are used with other rows")
            self._versions[version] = versions
        elif known != versions:
            raise RecordingsDiffer("other values are used with other rows")
        found = self._placed.get(version)
        if found is None:
            found = self._placed[version] = self._of_constant(versions)
        return found

    def advance(self, end: int | None = None) -> None:
        """Propagates through the operations that were recorded since.

        Args:
            end: int, the number of operations until which it does; None for all.

        Raises:
            RecordingsDiffer: if those of recordings are not the same.
        """
        columns = [recorder.steps[:end] for recorder in self._recorders]
        lengths = {len(steps) for steps in columns}
        for steps in zip(*(steps[self._done :] for steps in columns), strict=False):
            self._step(steps)
        if len(lengths) > 1:
            raise RecordingsDiffer("there are more operations with more rows")
        self._done = lengths.pop()

    def _step(self, steps: Sequence[RecordedStep]) -> None:
        first = steps[0]
        for step in steps[1:]:
            if step.operation is not first.operation:
                one, other = map(_label, (first.operation, step.operation))
                raise RecordingsDiffer(f"'{one}' is '{other}' with other rows")
        arguments = self._arguments(steps)
        columns = list(zip(*(step.results for step in steps), strict=False))
        op = self._operation(first, arguments, columns)
        if op.name == "branch":
            self._check_branch(op["self"].placed, first)
            return
        results = self._results(op, first, len(columns))
        for versions, placed in zip(columns, results, strict=True):
            if versions[0] is not None:
                self._versions[versions[0]] = versions
                self._placed[versions[0]] = self._checked(op, first, versions, placed)
        # Results that only some recordings have are not used.
        reason = f"'{_label(first.operation)}' has a result for each row"
        for version in first.results[len(columns) :]:
            if version is not None:
                self._versions[version] = (version,)
                self._placed[version] = Placed(RowKind.MIXED, reason=reason)

    def _check_branch(self, placed: Placed, step: RecordedStep) -> None:
        if not placed.is_equal:
            reason = f" ({placed.reason})" if placed.reason else ""
            self.problem = self.problem or (
                f"Python reads a truth value that depends on the rows{reason}"
                f"{self._place(step)}"
            )

    # Arguments.

    def _arguments(self, steps: Sequence[RecordedStep]) -> list[Any]:
        return [
            self._merged(values)
            for values in zip(*(_flat_arguments(step) for step in steps), strict=True)
        ]

    def _merged(self, values: Sequence[Any]) -> Any:
        """One argument of all recordings."""
        first = values[0]
        if isinstance(first, Version):
            if not all(isinstance(value, Version) for value in values):
                raise RecordingsDiffer("arguments differ with the number of rows")
            return self._operand(tuple(value.number for value in values))
        if isinstance(first, tuple):
            if any(
                not isinstance(value, tuple) or len(value) != len(first)
                for value in values[1:]
            ):
                raise RecordingsDiffer("arguments differ with the number of rows")
            return [self._merged(each) for each in zip(*values, strict=True)]
        if all(_is_equal(value, first) for value in values[1:]):
            return first
        return Varying(tuple(values))

    def _traits(self, versions: tuple[int, ...]) -> list[ValueTraits]:
        """The traits of a value in all recordings."""
        pairs = zip(self._recorders, versions, strict=True)
        return [recorder.values[version] for recorder, version in pairs]

    def _operand(self, versions: tuple[int, ...]) -> Operand:
        placed = self.placed(versions)
        traits = self._traits(versions)
        known = [each.known for each in traits]
        return Operand(
            placed,
            tuple(each.shape for each in traits),
            traits[0].dtype,
            all(each.is_dense for each in traits),
            None if any(k is None for k in known) else tuple(known),  # type: ignore
        )

    def _operation(
        self, step: RecordedStep, arguments: list[Any], results: Sequence[Any]
    ) -> Operation:
        func = step.operation
        is_own = isinstance(func, str)
        names = _OWN_ARGUMENTS[func] if is_own else _argument_names(func)
        traits = [
            None if versions[0] is None else self._traits(versions)
            for versions in results
        ]
        return Operation(
            func if is_own else operation_name(func),
            dict(zip(names, arguments, strict=True)),
            tuple(
                None if each is None else tuple(t.shape for t in each)
                for each in traits
            ),
            tuple(None if each is None else each[0].dtype for each in traits),
            self._counts,
            _draws(func),
            _operands(arguments),
        )

    # Results.

    def _results(
        self, op: Operation, step: RecordedStep, count: int
    ) -> Sequence[Placed]:
        mixed = next((o.placed for o in op.operands if _blocks(op, o)), None)
        try:
            if mixed is not None:
                raise _AlreadyMixed
            return self._applied(op, step, count)
        except _AlreadyMixed:
            assert mixed is not None
            return [mixed] * count
        except MixesRows as error:
            reason = f"'{_label(step.operation)}' {error}{self._place(step)}"
            return [Placed(RowKind.MIXED, reason=reason)] * count
        # Arguments of another kind than the rule expects.
        except (NoRule, KeyError, IndexError, TypeError, ValueError, AttributeError):
            reason = (
                f"operation {step.operation} has no rule for this use"
                f"{self._place(step)}"
            )
            return [Placed(RowKind.UNKNOWN, reason=reason)] * count

    def _applied(
        self, op: Operation, step: RecordedStep, count: int
    ) -> Sequence[Placed]:
        func = step.operation
        found = find_rule(op.name)
        sizes: frozenset[str] = found.sizes if found else frozenset()
        for name, value in op.arguments.items():
            if name not in sizes and _varies(value):
                raise MixesRows("with the number of rows")
        numbers = op.operands[0].placed if op.name in _MOVES_NUMBERS else SAME
        placed: Placed | Sequence[Placed]
        if found is not None and numbers.offset:
            placed = _moved_numbers(op, found.apply)
        elif found is not None:
            placed = found.apply(op)
        elif op.draws:
            placed = filled.random(op)
        elif torch.Tag.pointwise in func.tags:
            placed = elementwise.pointwise(op)
        elif all(o.placed.is_equal for o in op.operands):
            placed = SAME
        else:
            raise NoRule
        results = [placed] * count if isinstance(placed, Placed) else list(placed)
        # Arguments that are changed, but no results.
        unknown = Placed(RowKind.UNKNOWN, reason=f"operation {func} changes arguments")
        results += [unknown] * (count - len(results))
        if op.draws and _draws_numbers(op) and not step.is_in_draw:
            raise MixesRows("with random numbers of a function that is not known")
        return results

    def _checked(
        self,
        op: Operation,
        step: RecordedStep,
        versions: tuple[int, ...],
        placed: Placed,
    ) -> Placed:
        """A placement that fits the shapes.

        Numbers that are computed from the number of rows, such as half of it, are
        placed by their values. Others are not: a factor of today may be zero.
        """
        traits = self._traits(versions)
        known = [each.known for each in traits]
        shapes_ = [each.shape for each in traits]
        is_number = not op.operands or not _is_float(traits[0].dtype)
        if placed.offset:
            return placed
        if (
            not placed.is_joined
            and is_number
            and all(values is not None for values in known)
        ):
            return self._of_known(known, step)  # type: ignore[arg-type]
        if placed.is_joined and not placed.fits(shapes_, self._counts):
            if all(0 in shape for shape in shapes_):
                return SAME
            reason = (
                f"'{_label(step.operation)}' gives a shape that depends on the "
                f"number of rows{self._place(step)}"
            )
            return Placed(RowKind.MIXED, reason=reason)
        return placed

    def _of_known(
        self, values: Sequence[torch.Tensor], step: RecordedStep | None = None
    ) -> Placed:
        """The placement of values that are computed from numbers of Python."""
        first = values[0]
        place = "" if step is None else self._place(step)
        label = "a constant" if step is None else f"'{_label(step.operation)}'"
        mixed = Placed(
            RowKind.MIXED,
            reason=f"{label} of the number of rows or their numbers{place}",
        )
        if all(value.shape == first.shape for value in values[1:]):
            if all(_are_equal(value, first) for value in values[1:]):
                return SAME if bool(first.any()) else ZERO
            return self._power_of(values) or mixed
        try:
            placed = rows_of_shapes([tuple(v.shape) for v in values], self._counts)
        except MixesRows:
            return mixed
        rows = [value.narrow(placed.axis, 0, 1) for value in values]
        is_equal = all(
            torch.equal(row, rows[0]) and bool((value == row).all())
            for row, value in zip(rows, values, strict=True)
        )
        if not is_equal:
            return mixed
        return placed.changed(is_zero=not bool(first.any()))

    def _power_of(self, values: Sequence[torch.Tensor]) -> Placed | None:
        flat = [value.flatten().tolist() for value in values]
        if isinstance(flat[0][0], complex):
            return None
        try:
            powers = {
                power_of_rows(numbers, self._counts)
                for numbers in zip(*flat, strict=True)
                if any(numbers)
            }
        except MixesRows:
            return None
        return SAME.changed(power=powers.pop()) if len(powers) == 1 else None

    def _of_constant(self, versions: tuple[int, ...]) -> Placed:
        """The placement of a value that no operation gives."""
        known = [each.known for each in self._traits(versions)]
        if all(values is not None for values in known):
            return self._of_known(known)  # type: ignore[arg-type]
        pairs = zip(self._recorders, versions, strict=True)
        outside = [recorder.outside.get(version) for recorder, version in pairs]
        first = outside[0]
        if first is not None and all(_is_same(value, first) for value in outside):
            return SAME
        reason = "a tensor that is made with other values for other rows"
        return Placed(RowKind.UNKNOWN, reason=reason)

    def _place(self, step: RecordedStep) -> str:
        if step.place is None:
            return " in the backward pass"
        layer = self._recorders[0].places[step.place]
        return f", in layer {layer.name!r} ({type(layer).__name__})"


def _is_float(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class _AlreadyMixed(Exception):
    pass


def _moved_numbers(op: Operation, apply: RuleFunction) -> Placed:
    """The placement of numbers of entries that an operation moves as rows."""
    numbers = op.operands[0]
    rows = numbers.placed.changed(kind=RowKind.ROWS, offset=0)
    name = next(n for n, value in op.arguments.items() if value is numbers)
    moved = dataclasses.replace(numbers, placed=rows)
    arguments = {**op.arguments, name: moved}
    found = apply(dataclasses.replace(op, arguments=arguments, operands=[moved]))
    if not isinstance(found, Placed) or not found.is_rows:
        raise NoRule
    return found.changed(
        kind=RowKind.MIXED, offset=numbers.placed.offset, reason=numbers.placed.reason
    )


def _blocks(op: Operation, operand: Operand) -> bool:
    """Whether an operand makes the results depend on rows in another way."""
    if operand.placed.is_joined:
        return False
    if operand.placed.offset and (
        op.name in _MOVES_NUMBERS
        or (op.name in _ADDS_AT_NUMBERS and operand is op.get("index"))
    ):
        return False
    if op.name in _TAKES_NUMBERS:
        return operand.known is None
    return op.name != "collective"


def _draws(func: Any) -> bool:
    return not isinstance(func, str) and (
        torch.Tag.nondeterministic_seeded in func.tags
    )


def _draws_numbers(op: Operation) -> bool:
    return "dropout_p" not in op.arguments or bool(op["dropout_p"])


def _flat_arguments(step: RecordedStep) -> list[Any]:
    """The values of all declared arguments, with defaults."""
    func = step.operation
    if isinstance(func, str):
        return list(step.args)
    found = list(step.args)
    for name, default in _declared(func)[len(found) :]:
        found.append(step.kwargs.get(name, default))
    return found


@functools.cache
def _declared(func: Any) -> list[tuple[str, Any]]:
    return [
        (
            a.name,
            tuple(a.default_value)
            if isinstance(a.default_value, list)
            else a.default_value,
        )
        for a in schema_arguments(func)
    ]


@functools.cache
def _argument_names(func: Any) -> tuple[str, ...]:
    return tuple(name for name, _ in _declared(func))


def _operands(arguments: Sequence[Any]) -> list[Operand]:
    found: list[Operand] = []
    for value in arguments:
        if isinstance(value, Operand):
            found.append(value)
        elif isinstance(value, list):
            found += _operands(value)
    return found


def _varies(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_varies, value))
    return isinstance(value, Varying)


def _is_equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    is_nan = isinstance(one, float) and one != one and other != other
    return one is other or is_nan or bool(one == other)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether values are equal, or both not a number."""
    return torch.equal(one, other) or bool(
        ((one == other) | ((one != one) & (other != other))).all()
    )


def _is_same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    """Whether two recordings use one tensor, or tensors with equal values."""
    if one is None:
        return False
    if one is other:
        return True
    return (
        one.device.type == other.device.type == "cpu"
        and one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(one, other)
    )


def _label(operation: Any) -> str:
    name = operation if isinstance(operation, str) else operation_name(operation)
    return name.strip("_")
