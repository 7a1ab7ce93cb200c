"""Random numbers that code draws by `tf.random.stateless_*`, and through it by Keras.

On a replica these are numbers of its rows; in the trace of a proof they are recorded.
Python's order of draws numbers them, and it is the same in each trace of the code. A
draw in a loop or a branch of a graph is one draw. Functions that are traced once and
called again have no such order: in a `tf.function` within the call, numbers are drawn
as they are.
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
from keras_strategies.engines.tensorflow.own_entries import (
    length_of,
    own_entries,
)
from keras_strategies.engines.tensorflow.replicas.program_draws import next_in_program
from keras_strategies.errors import ContextError
from keras_strategies.runtime.data_parallel.row_draws import DrawsByLength, row_draws
from keras_strategies.runtime.once import once


class TracedDraws:
    """The draws of a traced call, in order.

    Args:
        graph: the graph of the call.
        is_eager: bool, whether the call itself runs eagerly.
    """

    def __init__(self, graph: Any, is_eager: bool):
        self.results: list[Any] = []
        #: Why these are not the draws of the call, as the end of a sentence.
        self.problem = ""
        #: Set while gradients are computed.
        self.is_backward = False
        self._graph = graph
        self._is_eager = is_eager

    def add(self, result: Any) -> None:
        """Records a draw, if replicas will find it."""
        current = tf.compat.v1.get_default_graph()
        is_own = not tf.executing_eagerly() and current is self._graph
        if self.is_backward:
            self.problem = "it draws random numbers in its backward pass"
        elif is_own or (not self._is_eager and _is_in(self._graph)):
            self.results.append(result)
        elif self._is_eager and (tf.executing_eagerly() or _is_in(self._graph)):
            # Eager code draws in each iteration, and in one of several branches.
            self.problem = (
                "it draws random numbers in a loop or branch of TensorFlow, or in "
                "`tf.init_scope`, in eager mode"
            )


_recorder: contextvars.ContextVar[TracedDraws | None] = contextvars.ContextVar(
    "draw_recorder", default=None
)
# The graph of the replica's call; None in eager mode.
_graph_of_call: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "graph_of_call", default=None
)


@contextlib.contextmanager
def recording(recorder: TracedDraws) -> Iterator[None]:
    """Context in which the draws of a traced call are recorded."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextlib.contextmanager
def seeing_draws() -> Iterator[None]:
    """Context of a replica's call, in which its draws are those of its rows."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    token = _graph_of_call.set(graph)
    try:
        yield
    finally:
        _graph_of_call.reset(token)


@once
def intercept_draws() -> None:
    """Intercepts the functions that make stateless random operations."""
    replace_draws(_intercepted)


def _intercepted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        recorder = _recorder.get()
        if recorder is not None:
            result = original(*args, **kwargs)
            recorder.add(result)
            return result
        draws = row_draws()
        if draws is None:
            return original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        length = length_of(given)
        if not _is_in(_graph_of_call.get()):
            if isinstance(draws, DrawsByLength):
                _refuse_rows(name, draws, length)
            return original(*args, **kwargs)
        if isinstance(draws, DrawsByLength) and not draws.is_static(length):
            rows = next_in_program(draws, length, given)
        else:
            rows = draws.next_draw(length)
        if rows is None:
            return original(*args, **kwargs)
        return own_entries(name, original, given, rows)

    return draw


def _refuse_rows(name: str, draws: DrawsByLength, length: int | None) -> None:
    """Raises an error for a draw with rows in a `tf.function` within `run`.

    Its trace is called by all replicas, and with other rows.
    """
    if draws.rows is None:
        return
    if length is not None and draws.is_static(length) and not draws.next_draw(length):
        return
    raise ContextError(
        f"`{name}` draws {'rows' if length is None else f'{length} rows'} of random "
        "numbers in a `tf.function` that is called in `run`, which would be the same "
        "on all replicas. Omit the inner `tf.function`, since a `ks.function` around "
        "`run` compiles what it calls, or draw outside of it and pass the numbers as "
        "an argument."
    )


def _is_in(graph: Any) -> bool:
    """Whether the current graph is that of the call, or of a loop or branch in it."""
    if graph is None or tf.executing_eagerly():
        return graph is None and tf.executing_eagerly()
    return is_in_control_flow_of(graph, tf.compat.v1.get_default_graph())
