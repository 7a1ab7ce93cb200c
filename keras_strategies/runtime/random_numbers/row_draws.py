"""Random numbers of a replica's rows, as one device draws them.

One device draws for all rows of a call: a tensor with entries of each row along axis 0,
or one that all rows share. A replica's code asks for the same draws with its own number
of rows. The engine draws what one device draws, from the same seed, and takes the
entries of the replica's rows.

A draw is a call of a function of `keras.random`; what code draws from the framework or
from Python is its own. Which draws of a layer call have rows is a part of its proof. In
`run` there is one rule: those that are as long as the replica's rows.
"""

from __future__ import annotations

import abc
import contextvars
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategies.errors import BatchError


@dataclass(frozen=True)
class OwnRows:
    """The rows of one replica among those of a call.

    Numbers are ints, or scalar tensors in a program for any number of rows.

    Args:
        before: the rows of the replicas before it.
        own: its rows.
        total: the rows of all replicas.
    """

    before: Any
    own: Any
    total: Any

    @classmethod
    def of(cls, every: Sequence[Any], replica: int) -> OwnRows:
        """Of one of the replicas with these rows."""
        before: Any = sum(every[:replica])
        return cls(before, every[replica], sum(every[replica:], start=before))

    def times(self, multiple: int) -> OwnRows:
        """Of a tensor with several entries for each row."""
        return OwnRows(
            self.before * multiple, self.own * multiple, self.total * multiple
        )


class RowDraws(abc.ABC):
    """The draws of one replica in one computation.

    Attributes:
        is_partitioned: bool, whether numbers are drawn in blocks of rows, for engines
            with generators that are sequences; else they are those of Keras without a
            strategy.
    """

    is_partitioned: bool

    @abc.abstractmethod
    def next_draw(self, length: int | None) -> OwnRows | None:
        """The entries of the next draw; None if all rows share it.

        Args:
            length: int, that of axis 0 of what the replica's code draws; None if it is
                not known, or without axes.
        """


@dataclass(eq=False)
class DrawsOfRun(RowDraws):
    """The draws of one replica in a function of `run`, of which nothing is proved.

    Those that are as long as the replica's rows have rows. All others have the same
    seed on all replicas, so they are equal.

    Args:
        rows: returns the replica's rows, None without any; called for the first draw.
        is_partitioned: bool, see `RowDraws`.
    """

    _rows: Callable[[], OwnRows | None]
    is_partitioned: bool = False

    @functools.cached_property
    def rows(self) -> OwnRows | None:
        """The replica's rows; None without any."""
        return self._rows()

    def next_draw(self, length: int | None) -> OwnRows | None:
        rows = self.rows  # For each draw: workers exchange them at the first one.
        return rows if rows is not None and length == rows.own else None


def rows_of_arguments(calls: Sequence[Any]) -> list[Any]:
    """The rows of each replica in `run`, or an empty list.

    They are the lengths of axis 0 of the first argument that has axes, and that
    replicas do not share.

    Args:
        calls: for each replica, the structure of its arguments.
    """
    for column in zip(*map(keras.tree.flatten, calls), strict=False):
        is_shared = len(column) > 1 and all(leaf is column[0] for leaf in column)
        is_variable = isinstance(column[0], keras.Variable)
        if all(map(_has_axes, column)) and not (is_shared or is_variable):
            lengths = [(leaf, leaf.shape[0]) for leaf in column]
            return [keras.ops.shape(x)[0] if n is None else n for x, n in lengths]
    return []


def _has_axes(leaf: Any) -> bool:
    # A shape of TensorFlow's of which nothing is known is false.
    return len(getattr(leaf, "shape", None) or ()) > 0


@dataclass(eq=False)
class ProvedDraws(RowDraws):
    """The draws of one replica in a layer call.

    Args:
        multiples: for each draw, the entries of axis 0 for each row; 0 for a draw that
            all rows share.
        rows: the replica's rows.
        name: str, of the layer, for errors.
        is_partitioned: bool, see `RowDraws`.
    """

    _multiples: Sequence[int]
    _rows: OwnRows
    _name: str
    is_partitioned: bool = False
    _count: int = 0

    def next_draw(self, length: int | None) -> OwnRows | None:
        """The entries of the next draw; None if all rows share it.

        Raises:
            BatchError: if the proof of the call has fewer draws.
        """
        if self._count == len(self._multiples):
            raise BatchError(
                f"Layer {self._name!r} draws random numbers more often than in another "
                "call with arguments of the same kinds. Make what changes an argument "
                "of the call or a `keras.Variable`, or draw as often in every call."
            )
        multiple = self._multiples[self._count]
        self._count += 1
        return self._rows.times(multiple) if multiple else None


_current: contextvars.ContextVar[RowDraws | None] = contextvars.ContextVar(
    "row_draws", default=None
)


def row_draws() -> RowDraws | None:
    """The draws of the replica that this thread runs; None outside of a split call."""
    return _current.get()


class drawing:
    """Context in which a replica draws; with None, draws are the framework's own."""

    def __init__(self, draws: RowDraws | None):
        self._draws = draws

    def __enter__(self) -> None:
        self._token = _current.set(self._draws)

    def __exit__(self, *exception: Any) -> None:
        _current.reset(self._token)
