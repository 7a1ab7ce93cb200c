"""Random numbers that code draws by `keras.random`.

On a replica these are numbers of its rows. Python's order of draws numbers them. A
draw in a loop or a branch of a graph is one draw. Functions that are traced once and
called again have no such order: in a `tf.function` within the call, numbers are drawn
as they are.

Keras draws by `tf.random.stateless_*`. In its functions, those that make the operations
draw own entries (`own_entries.py`); called by other code, they are TensorFlow's own.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.graphs import is_in_control_flow_of
from keras_strategies.engines.tensorflow.compat.operations import replace_draws
from keras_strategies.engines.tensorflow.random_numbers.own_entries import (
    own_entries,
    rows_of_length,
)
from keras_strategies.errors import ContextError
from keras_strategies.runtime.once import once
from keras_strategies.runtime.random_numbers.keras_draws import (
    KerasDraw,
    seeing_draws,
)
from keras_strategies.runtime.random_numbers.row_draws import (
    DrawsOfRun,
    OwnRows,
    RowDraws,
)

#: Called with the function that makes an operation, its name and its arguments.
_Make = Callable[[str, Callable[..., Any], dict[str, Any]], Any]
# Within a function of `keras.random`; None elsewhere.
_making: contextvars.ContextVar[_Make | None] = contextvars.ContextVar(
    "making_draws", default=None
)
# The graph of the replica's call; None in eager mode.
_graph_of_call: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "graph_of_call", default=None
)


@contextlib.contextmanager
def replica_draws() -> Iterator[None]:
    """Context of a replica's call, in which its draws are those of its rows."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    with seeing_draws(_drawn), _set(_graph_of_call, graph):
        yield


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@once
def intercept_draws() -> None:
    """Intercepts the functions that make stateless random operations."""
    replace_draws(_intercepted)


def _intercepted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        make = _making.get()
        if make is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return make(name, original, bound.arguments)

    return draw


def _drawn(draw: KerasDraw, draws: RowDraws) -> Any:
    """A draw on a replica."""
    if not _is_in(_graph_of_call.get()):
        if isinstance(draws, DrawsOfRun):
            _refuse_rows(draw, draws)
        return draw.call()
    rows = _rows_of(draw, draws)
    if rows is None:
        return draw.call()
    with drawing_entries(rows):
        return draw.call()


def drawing_entries(rows: OwnRows) -> contextlib.AbstractContextManager[None]:
    """Context in which `tf.random.stateless_*` draw these entries of axis 0."""

    def make(name: str, original: Any, given: dict[str, Any]) -> Any:
        return own_entries(name, original, given, rows)

    return _set(_making, make)


def _rows_of(draw: KerasDraw, draws: RowDraws) -> OwnRows | None:
    """The entries of a draw; None if all rows share it."""
    length = _length_of(draw)
    if not isinstance(draws, DrawsOfRun) or draws.rows is None:
        return draws.next_draw(length if isinstance(length, int) else None)
    if length is None or (isinstance(length, int) and isinstance(draws.rows.own, int)):
        return draws.next_draw(length)
    return rows_of_length(draws.rows, length)


def _length_of(draw: KerasDraw) -> Any:
    """The entries of axis 0: int, or a scalar of a program; None without axes."""
    shape = draw.shape
    rank = shape.shape[0] if tf.is_tensor(shape) else len(shape)
    if not rank:
        return None
    size = shape[0]
    if size is None:
        given = draw.given.get("logits", draw.given.get("inputs"))
        return tf.shape(given)[0]
    static = tf.get_static_value(size) if tf.is_tensor(size) else size
    return size if static is None else int(static)


def _refuse_rows(draw: KerasDraw, draws: DrawsOfRun) -> None:
    """Raises an error for a draw with rows in a `tf.function` within `run`.

    Its trace is called by all replicas, and with other rows.
    """
    length = _length_of(draw)
    if draws.rows is None or length is None:
        return
    is_known = isinstance(length, int) and isinstance(draws.rows.own, int)
    if is_known and length != draws.rows.own:
        return
    raise ContextError(
        f"`keras.random.{draw.name}` draws {length if is_known else 'the'} rows of "
        "random numbers in a `tf.function` that is called in `run`, which would be the "
        "same on all replicas. Omit the inner `tf.function`, since a `ks.function` "
        "around `run` compiles what it calls, or draw outside of it and pass the "
        "numbers as an argument."
    )


def _is_in(graph: Any) -> bool:
    """Whether the current graph is that of the call, or of a loop or branch in it."""
    if graph is None or tf.executing_eagerly():
        return graph is None and tf.executing_eagerly()
    return is_in_control_flow_of(graph, tf.compat.v1.get_default_graph())
