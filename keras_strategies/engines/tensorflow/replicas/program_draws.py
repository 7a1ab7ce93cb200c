"""Draws of `Strategy.run` in a program, where rows or lengths are values of a step.

A draw of a fixed length, in a program for any number of rows, has none. In a program
for fixed rows, which of its draws have rows follows from the lengths on all replicas.
Other workers trace programs of their own, at other times, so each sends the lengths of
its program together with its rows: in one collective, which only programs that draw
have. As in `DrawLengths`, earlier steps are compared, by state of the program.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow.own_entries import (
    Arguments,
    entries_in_program,
    rows_of_length,
)
from keras_strategies.runtime.data_parallel.draw_lengths import (
    EarlierDraws,
    error_of_program,
)
from keras_strategies.runtime.data_parallel.row_draws import DrawsByLength, OwnRows
from keras_strategies.runtime.replicas.run_draws import RunDraws

if TYPE_CHECKING:
    from keras_strategies.communication.communicator import Communicator

#: Draws whose lengths are sent; others are compared with the rows of the worker.
MAX_DRAWS = 256
#: In place of the length of a draw that a replica has not made.
_UNKNOWN = -1
#: Makes a variable outside of the program.
MakeVariable = Callable[[Any], Any]


def next_in_program(
    draws: DrawsByLength, length: int | None, given: Arguments
) -> OwnRows | None:
    """`next_draw` where a number of rows or a length is known in a step only.

    Args:
        draws: those of a replica.
        length: int, that of axis 0; None if it is known in a step only.
        given: the arguments of the function that draws.
    """
    number, rows = draws.next_number(), draws.rows
    if rows is None or length == 0:
        return None
    if length is None or number >= MAX_DRAWS or draws.multiple_in_program is None:
        return rows_of_length(rows, given)
    return entries_in_program(rows, draws.multiple_in_program(number, length), length)


@dataclass(frozen=True)
class Exchange:
    """The exchange with programs of other workers.

    Args:
        workers: the communicator.
        counts: the replicas of each worker.
    """

    workers: Communicator
    counts: Sequence[int]


class ProgramDraws(RunDraws):
    """Draws of the local replicas in a program.

    Args:
        own: the rows of each replica: ints, or scalar tensors; empty without any.
        earlier: the draws of the function in earlier runs.
        make_variable: makes a variable with a value, on the CPU.
        exchange: the exchange with other workers; None without any.
    """

    def __init__(
        self,
        own: Sequence[Any],
        earlier: EarlierDraws,
        make_variable: MakeVariable,
        exchange: Exchange | None = None,
    ):
        rows = functools.cache(self._rows) if exchange else lambda: list(own)
        super().__init__(rows, earlier, multiple_in_program=self._multiple)
        self._own = own
        self._make_variable = make_variable
        self._exchange = exchange
        self._graph = tf.compat.v1.get_default_graph()
        self._sent = np.full((len(own), MAX_DRAWS), _UNKNOWN, np.int32)
        self._variable: Any = None

    def _multiple(self, local: int, number: int, length: int) -> Any:
        """The entries of axis 0 for each row, of a draw of a fixed length.

        Args:
            local: int, the replica, among those of this worker.
            number: int, of the draw.
            length: int.

        Returns:
            int64 scalar; 0 for a draw that all rows share.
        """
        is_for_any_rows = not isinstance(self._own[local], int)
        if is_for_any_rows and self._exchange is None:
            self.lengths.add_fixed(number, length)
        self._sent[local, number] = _fixed(length) if is_for_any_rows else length
        return self._multiples[number]

    def finish(self) -> None:
        """Called at the end of the trace."""
        if self._variable is not None:
            with tf.init_scope():
                self._variable.assign(self._sent)

    @contextlib.contextmanager
    def _in_program(self) -> Iterator[None]:
        """The program's graph, on the CPU: draws in a loop need it before the loop."""
        with (
            self._graph.as_default(),
            tf.control_dependencies(None),
            tf.device("CPU:0"),
        ):
            yield

    @functools.cached_property
    def _gathered(self) -> Any:
        """Rows and lengths of all replicas, int64 of shape `(replicas, 1 + draws)`."""
        self._variable = self._make_variable(self._sent)
        _keep(self._graph, self._variable)
        with self._in_program():
            rows = tf.stack([tf.cast(count, tf.int32) for count in self._own])
            sent = tf.concat([rows[:, None], self._variable.read_value()], 1)
            if self._exchange is not None:
                exchange = self._exchange
                sent = exchange.workers.gather_rows(sent, exchange.counts)
            return tf.cast(sent, tf.int64)

    def _rows(self) -> list[Any]:
        with self._in_program():
            rows = self._gathered[:, 0]
            # Zeros stand for draws without rows.
            rows = tf.where(tf.reduce_min(rows) >= 0, rows, 0)
            counts = self._exchange.counts if self._exchange else [len(self._own)]
            return list(tf.unstack(rows, sum(counts)))

    @functools.cached_property
    def _multiples(self) -> list[Any]:
        """For each draw, the entries of a row; 0 for one that all rows share."""
        rows: Any = self.rows()
        earlier = self.lengths.earlier
        if earlier.in_programs is None:
            zeros = np.zeros((3, MAX_DRAWS), np.int64)
            earlier.in_programs = self._make_variable(zeros)
        _keep(self._graph, earlier.in_programs)
        with self._in_program():
            rows = tf.stack([tf.cast(each, tf.int64) for each in rows])
            found = _multiples(rows, self._gathered[:, 1:], earlier.in_programs)
            return list(tf.unstack(found, MAX_DRAWS))


def _fixed(length: int) -> int:
    """How a length is sent that is fixed in a program for any number of rows."""
    return -length - 2


def _multiples(rows: Any, sent: Any, seen: Any) -> Any:
    """`DrawLengths.multiple` of each draw, in a step of a program.

    Args:
        rows: int64 of shape `(replicas,)`.
        sent: int64 of shape `(replicas, draws)`, the lengths.
        seen: variable of shape `(3, draws)`: the rows, length and multiple of each in
            an earlier step.

    Returns:
        int64 of shape `(draws,)`.
    """
    is_fixed = tf.reduce_any(sent <= -2, 0)
    lengths = tf.where(sent <= -2, -sent - 2, sent)
    are_compared = (rows > 0)[:, None] & (lengths >= 0)
    # One replica stands for all that are in proportion to it.
    lead = tf.argmax(tf.where(are_compared, rows[:, None], -1), 0)
    own = tf.gather(rows, lead)
    length = tf.gather(tf.transpose(lengths), lead, batch_dims=1)
    size = tf.maximum(own, 1)
    in_proportion = lengths * own == length * rows[:, None]
    multiple = tf.where(own > 1, length // size, 1)
    have_rows = (own > 0) & (length > 0) & (length == multiple * own) & ~is_fixed
    have_rows &= tf.reduce_all(in_proportion | ~are_compared, 0)
    multiple = tf.where(have_rows, multiple, 0)
    is_even = tf.reduce_all((rows == tf.reduce_max(rows)) | (rows == 0))

    seen_own, seen_length, seen_multiple = tf.unstack(seen.read_value(), 3)
    is_shared = length == seen_length
    has_rows = (length * seen_own == seen_length * own) & (length % size == 0)
    # Of one replica with rows, either is right.
    are_seen = (tf.math.count_nonzero(rows) > 1) & (length > 0)
    follows = are_seen & (seen_length > 0) & (is_shared | has_rows)
    is_other = seen_own != own
    from_seen = tf.where(is_other, tf.where(has_rows, length // size, 0), seen_multiple)
    decides = follows & is_even & ~is_fixed
    multiple = tf.where(decides, from_seen, multiple)
    is_wrong = follows & (multiple != seen_multiple)
    one, other = tf.boolean_mask(seen_own, is_wrong), tf.boolean_mask(length, is_wrong)
    checked = tf.debugging.Assert(
        ~tf.reduce_any(is_wrong),
        [error_of_program(), one, tf.boolean_mask(own, is_wrong), other],
    )
    with tf.control_dependencies([checked]):
        now = tf.stack([own, length, multiple])
        state = seen.assign(tf.where(are_seen, now, seen.read_value()))
    with tf.control_dependencies([state]):
        return tf.identity(multiple)


#: Variables of programs, which hold none themselves.
_kept: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()


def _keep(graph: Any, variable: Any) -> None:
    """Keeps a variable for a graph and those that call it."""
    while graph is not None:
        _kept.setdefault(graph, []).append(variable)
        graph = getattr(graph, "outer_graph", None)
