"""Which draws of `run` have rows, by their lengths on replicas and in earlier runs.

Replicas have different numbers of rows where a batch does not divide evenly, so their
lengths of one draw show whether it has rows: it is in proportion to them, or the same.
Where all have as many rows, a length that is theirs counts as rows. It can be fixed and
theirs by chance, which a later run with other rows shows; then that run is an error,
since earlier ones have drawn other numbers than one device.
"""

from __future__ import annotations

import collections
import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_strategies.errors import ContextError

#: Functions of which draws are remembered, those of the last runs.
_MAX_FUNCTIONS = 256
_MAX_DRAWS = 10_000
#: In place of a number of rows, which the length does not follow.
_ANY = -1
#: How deep functions in closures are compared by their code.
_MAX_DEPTH = 3


@dataclass(frozen=True)
class SeenDraw:
    """A draw on a replica.

    Args:
        own: int, the replica's rows; -1 in a program for any number of rows.
        length: int, the entries of axis 0.
        multiple: int, those of each row; 0 if all rows share it.
    """

    own: int
    length: int
    multiple: int


@dataclass
class EarlierDraws:
    """The draws of a function in earlier runs.

    Args:
        by_number: the last draw with each number.
        in_programs: state of the engine, for runs that are steps of a program.
    """

    by_number: dict[int, SeenDraw] = field(default_factory=dict)
    in_programs: Any = None


@dataclass
class DrawLengths:
    """The draws of the replicas of one process in a run.

    Args:
        earlier: those of the function in earlier runs.
    """

    earlier: EarlierDraws = field(default_factory=EarlierDraws)
    #: The draws of the first replica that has reached each of them.
    first: dict[int, SeenDraw] = field(default_factory=dict)
    #: Draws since `take`, with their numbers.
    _new: list[tuple[int, SeenDraw]] = field(default_factory=list)

    def multiple(self, number: int, own: int, length: int) -> int:
        """The entries of axis 0 for each row; 0 for a draw that all rows share.

        Args:
            number: int, of the draw.
            own: int, the rows of a replica.
            length: int, what the replica draws.

        Raises:
            ContextError: if another replica, or the function in an earlier run, has
                drawn by another rule.
        """
        first = self.first.get(number)
        if first is None:
            earlier = self.earlier.by_number.get(number)
            found = SeenDraw(own, length, _multiple(earlier, own, length, _EARLIER))
            self.first[number] = found
            if number < _MAX_DRAWS:
                self.earlier.by_number[number] = found
        else:
            found = SeenDraw(own, length, _multiple(first, own, length, _REPLICAS))
        self._new.append((number, found))
        return found.multiple

    def add_fixed(self, number: int, length: int) -> None:
        """Adds a draw of a fixed length in a program for any number of rows.

        Raises:
            ContextError: if a run with as many rows has taken it for theirs.
        """
        earlier = self.earlier.by_number.get(number)
        if earlier is not None and earlier.multiple and earlier.length == length:
            raise _error(_EARLIER.format(earlier.own, "others"), length, length)
        if number < _MAX_DRAWS:
            self.earlier.by_number[number] = SeenDraw(_ANY, length, 0)

    def take(self) -> list[tuple[int, int, int, int]]:
        """Draws since the last call: number, rows, length and multiple of each."""
        found = [(n, each.own, each.length, each.multiple) for n, each in self._new]
        self._new.clear()
        return found


_REPLICAS = "Replicas with {} and {} rows"
_EARLIER = "Replicas with {} rows in an earlier run, and {} in this one,"
_WORKERS = "Replicas of different workers with {} and {} rows"


def _multiple(seen: SeenDraw | None, own: int, length: int, who: str) -> int:
    # Of one row, each length is a multiple.
    multiple = length // own if own > 1 else 1
    multiple = multiple if length == multiple * own else 0
    if seen is None:
        return multiple
    if seen.own == own:
        return seen.multiple if seen.length == length else multiple
    is_shared = length == seen.length
    has_rows = length * seen.own == seen.length * own and not length % own
    if not (is_shared or has_rows):
        return multiple
    found = length // own if has_rows else 0
    if found != seen.multiple:
        raise _error(who.format(seen.own, own), seen.length, length)
    return found


def compare_workers(draws: Iterable[tuple[int, int, int, int]]) -> None:
    """Compares the draws of the replicas of all workers, as `take` returns them.

    Raises:
        ContextError: if only some replicas take a draw for their rows.
    """
    first: dict[int, tuple[int, int, int]] = {}
    for number, own, length, multiple in draws:
        seen = first.setdefault(number, (own, length, multiple))
        if seen[2] != multiple:
            raise _error(_WORKERS.format(seen[0], own), seen[1], length)


_UNCLEAR = (
    "and whether these belong to rows does not follow from the lengths. Draw with the "
    "rows as first axis and others after it (`(rows, 2, ...)`), or draw outside of "
    "`run` and pass the numbers as an argument."
)


def _error(who: str, one: int, other: int) -> ContextError:
    return ContextError(
        f"{who} draw {one} and {other} entries of random numbers in `run`, {_UNCLEAR}"
    )


def error_of_program() -> str:
    """The error of a step; its numbers follow: rows in an earlier step and in this one,
    and entries."""
    return (
        "Replicas draw as many entries of random numbers in `run` as in an earlier "
        f"step with other rows, {_UNCLEAR} Rows before, rows now, entries:"
    )


class DrawHistory:
    """Draws of the functions of earlier runs of a strategy.

    A function is known by its code and the objects that it refers to.
    """

    def __init__(self) -> None:
        self._functions: collections.OrderedDict[
            Hashable, tuple[EarlierDraws, tuple[Any, ...]]
        ] = collections.OrderedDict()

    def of(self, fn: Callable[..., Any], arguments: Any) -> EarlierDraws:
        """The draws of a function; new ones are added to them.

        Args:
            fn: the function.
            arguments: the structure of its arguments; those that are no tensors may
                change what it draws.
        """
        keys, referents = [], []
        for each in (*_parts(fn), *keras.tree.flatten(arguments)):
            if each is None or isinstance(each, bool | int | float | str | bytes):
                keys.append((type(each), each))
            elif not hasattr(type(each), "shape"):
                keys.append((type(each), id(each)))
                referents.append(each)
        key = tuple(keys)
        try:
            alive = tuple(map(weakref.ref, referents))
        except TypeError:
            return EarlierDraws()  # Nothing tells when another object has its id.
        draws, known = self._functions.pop(key, (EarlierDraws(), alive))
        if any(one() is not other for one, other in zip(known, referents, strict=True)):
            draws, known = EarlierDraws(), alive
        self._functions[key] = draws, known
        if len(self._functions) > _MAX_FUNCTIONS:
            self._functions.popitem(last=False)
        return draws


def _parts(fn: Any, depth: int = 0) -> list[Any]:
    """The code of a function, and the objects in its closure and partial arguments."""
    if isinstance(fn, functools.partial):
        return [*_parts(fn.func), *keras.tree.flatten([fn.args, fn.keywords])]
    if depth == _MAX_DEPTH:
        return [fn]
    owner = getattr(fn, "__self__", None)
    function = getattr(fn, "__func__", fn)
    code = getattr(function, "__code__", None)
    if code is None:
        return [fn]
    cells = getattr(function, "__closure__", None) or ()
    contents = []
    for cell in cells:
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # A name that is not assigned yet.
            contents.append(None)
    flat = keras.tree.flatten([contents, getattr(function, "__defaults__", None)])
    inner = [
        _parts(each, depth + 1) if isinstance(each, types.FunctionType) else [each]
        for each in flat
    ]
    return [code, owner, *itertools.chain(*inner)]
