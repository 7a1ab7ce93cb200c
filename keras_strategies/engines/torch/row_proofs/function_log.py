"""The functions of torch that a recorded call uses, to compare a call with one row.

Torch computes some functions by other operations where an axis has one entry: `einsum`
leaves it out, a product of matrices is one of two axes, and gradients need no sum. So
the operations of a replica with one row differ from those of others although the code
of the layer is the same. Here that code is compared: it calls the same functions, with
the same tensors and arguments, and each result has one row in place of the others.
Then a call with one row is the function that recordings with more rows show, of which
placements are proved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_RUN_BACKWARD = (torch.autograd.grad, torch.Tensor.backward)


class CodeDiffers(Exception):
    """The code of a call with one row is not that of calls with more; says where."""


@dataclass(frozen=True)
class _Tensor:
    """A tensor among arguments.

    Args:
        numbers: the numbers that it has had.
        origin: where it is from, if no function has returned it.
        shape: its shape.
    """

    numbers: frozenset[int]
    origin: Any
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Entry:
    function: Any
    arguments: Any
    results: tuple[tuple[tuple[int, ...], torch.dtype], ...]


class FunctionLog:
    """The functions that a call has used, in their order, and the tensors of each.

    A tensor gets a number when a function returns it, or where it is first used. A
    function that returns its argument gives that another number besides.

    Args:
        origin: returns where a tensor is from that no function has returned.
    """

    def __init__(self, origin: Callable[[torch.Tensor], Any]) -> None:
        self.entries: list[_Entry] = []
        self._origin = origin
        self._origins: dict[int, Any] = {}
        self._numbers: dict[int, frozenset[int]] = {}
        self._next = itertools.count()
        # So that ids are unique.
        self._alive: list[torch.Tensor] = []

    def note(self, function: Any, arguments: Any, results: Any) -> None:
        """Adds what has been called.

        What a function calls that is code of Python is not noted: none but those that
        run a backward pass do so, and they are equal to nothing.

        Args:
            function: a function, or a name of this package.
            arguments: its arguments.
            results: what it has returned.
        """
        found = [each for each in _leaves(results) if isinstance(each, torch.Tensor)]
        if function in _RUN_BACKWARD:
            self.entries.append(_Entry(object(), (), ()))
        if not found and results is not None:
            return  # What Python does with a shape shows in arguments.
        encoded = self.encoded(arguments)
        for tensor in found:
            self._add(tensor)
        traits = tuple((tuple(each.shape), each.dtype) for each in found)
        self.entries.append(_Entry(function, encoded, traits))

    def encoded(self, value: Any) -> Any:
        """A structure with numbers in place of tensors."""
        if isinstance(value, torch.Tensor):
            key = id(value)
            if key not in self._numbers:
                self._origins[key] = self._origin(value)
                self._add(value)
            origin = self._origins.get(key)
            return _Tensor(self._numbers[key], origin, tuple(value.shape))
        if isinstance(value, (list, tuple)):
            return tuple(map(self.encoded, value))
        if isinstance(value, dict):
            return {key: self.encoded(each) for key, each in value.items()}
        if isinstance(value, slice):
            return slice, value.start, value.stop, value.step
        if isinstance(value, torch.Generator):
            return torch.Generator  # Draws are compared by themselves.
        return int(value) if isinstance(value, np.integer) else value

    def note_change(self, tensors: Iterable[torch.Tensor]) -> None:
        """Adds that tensors with the same memory are changed in place.

        Only those count that the code has.
        """
        known = [self._numbers.get(id(tensor)) for tensor in tensors]
        changed = frozenset(numbers for numbers in known if numbers is not None)
        self.entries.append(_Entry("a change in place", changed, ()))

    def close(self) -> None:
        """Drops all tensors."""
        self._alive.clear()
        self._numbers.clear()
        self.entries.clear()

    def _add(self, tensor: torch.Tensor) -> None:
        known = self._numbers.get(id(tensor), frozenset())
        if not known:
            self._alive.append(tensor)
        self._numbers[id(tensor)] = known | {next(self._next)}


def check_code(
    counts: Sequence[int], logs: Sequence[FunctionLog], one: FunctionLog
) -> None:
    """Checks that a call with one row has the code of calls with more.

    Args:
        counts: two numbers of rows.
        logs: the functions of a call with each.
        one: those of a call with one row.

    Raises:
        CodeDiffers: if they are others.
    """
    for entry, *others in zip(
        one.entries, *(log.entries for log in logs), strict=False
    ):
        try:
            _check(counts, list(map(_parts, others)), _parts(entry))
        except CodeDiffers as error:
            name = getattr(entry.function, "__name__", entry.function)
            raise CodeDiffers(f"'{name}'") from error
    if len({len(log.entries) for log in (one, *logs)}) > 1:
        raise CodeDiffers("how much it calls")


def check_values(
    counts: Sequence[int],
    logs: Sequence[FunctionLog],
    values: Sequence[Any],
    one: FunctionLog,
    value: Any,
) -> None:
    """Checks that a value of a call with one row is that of calls with more.

    Args:
        counts: two numbers of rows.
        logs: the functions of a call with each.
        values: the value in each, a structure of tensors.
        one: the functions of a call with one row.
        value: the value in that.

    Raises:
        CodeDiffers: if it is another.
    """
    pairs = zip(logs, values, strict=True)
    try:
        _check(counts, [log.encoded(each) for log, each in pairs], one.encoded(value))
    except CodeDiffers as error:
        raise CodeDiffers("a result") from error


def _parts(entry: _Entry) -> tuple[Any, ...]:
    return entry.function, entry.arguments, entry.results


def _check(counts: Sequence[int], others: Sequence[Any], one: Any) -> None:
    kinds = {type(each) for each in (*others, one)}
    if len(kinds) > 1:
        raise CodeDiffers
    if isinstance(one, _Tensor):
        if not one.numbers & frozenset.intersection(*(o.numbers for o in others)):
            raise CodeDiffers
        if any(other.origin != one.origin for other in others):
            raise CodeDiffers
        _check(counts, [other.shape for other in others], one.shape)
    elif isinstance(one, tuple):
        if len({len(each) for each in (*others, one)}) > 1:
            raise CodeDiffers
        for each, *rest in zip(one, *others, strict=True):
            _check(counts, rest, each)
    elif isinstance(one, dict):
        if any(other.keys() != one.keys() for other in others):
            raise CodeDiffers
        for key, each in one.items():
            _check(counts, [other[key] for other in others], each)
    elif not _is_of_one_row(counts, others, one):
        raise CodeDiffers


def _is_of_one_row(counts: Sequence[int], others: Sequence[Any], one: Any) -> bool:
    """Whether an argument with one row is what those with more rows say."""
    if all(_is_equal(other, one) for other in others):
        return True
    (first, second), (more, fewer) = others, counts
    if type(one) is int:
        slope, rest = divmod(first - second, more - fewer)
        return rest == 0 and one == first - slope * (more - 1)
    if type(one) is float:
        # A part of the rows, or a multiple.
        return (
            first * more == second * fewer == one
            or first / more == second / fewer == one
        )
    return False


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if type(one) is float and one != one:
        return type(other) is float and other != other
    return bool(one is other or (type(one) is type(other) and one == other))


def _leaves(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value
