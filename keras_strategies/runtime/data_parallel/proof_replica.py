"""The replica on which a layer call is proved: results of collectives are marked."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.keras_compat import patching
from keras_strategies.rows.trace import Node, Trace
from keras_strategies.runtime import context
from keras_strategies.runtime.frames import merged_replicas
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.runtime.replicas.collectives import (
    MergeArguments,
    ReplicaCollectives,
    call_merged,
)
from keras_strategies.types import ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

#: A context around code that is traced; gets a function for why it cannot be.
Tracing = Callable[[Callable[[str], None]], contextlib.AbstractContextManager[Any]]
#: In a program for any number of rows: those of all replicas.
_ANY_TOTAL = 2017


@contextlib.contextmanager
def proof_surroundings(
    strategy: StrategyCore,
    tracing: Tracing,
    trace: Trace,
    rows: Any,
    replicas: int,
) -> Iterator[None]:
    """A context around the trace of a layer call.

    Args:
        strategy: the strategy.
        tracing: see `LayerCallDriver.tracing`.
        trace: the trace.
        rows: the number of rows of the call.
        replicas: int, how many replicas have rows.
    """
    trace.outside = functools.partial(merged_replicas, strategy)
    total = rows if isinstance(rows, int) else _ANY_TOTAL
    collectives = MarkedCollectives(trace, total, replicas)
    replica = ReplicaContext(
        strategy, 0, collectives, 2, _refused_read(trace), is_proof=True
    )
    with (
        patching.installed_while("replicas"),
        tracing(trace.note_problem),
        context.on_replica(replica),
    ):
        yield


def _refused_read(trace: Trace) -> Callable[[str], None]:
    def note(name: str) -> None:
        if name == "replica_id_in_sync_group":
            trace.note_problem("reads the number of its replica")

    return note


class MarkedCollectives(ReplicaCollectives):
    """Collectives with results that are the same on all replicas.

    Args:
        trace: the trace, which records them.
        total: int, the number of rows of all replicas.
        replicas: int, how many replicas there are.
    """

    custom_gradient = None

    def __init__(self, trace: Trace, total: int, replicas: int):
        self._trace = trace
        self._total = total
        self._replicas = replicas

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        return [self._marked(tensor, tensor.shape) for tensor in tensors]

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int, are_equal: bool = False
    ) -> Sequence[Any]:
        return [
            self._marked(tensor, self._gathered_shape(tensor, axis, are_equal))
            for tensor in tensors
        ]

    def _gathered_shape(self, tensor: Any, axis: int, are_equal: bool) -> list[int]:
        shape = list(tensor.shape)
        size = int(shape[axis])
        if not are_equal and size and size % self._trace.rows == 0:
            shape[axis] = size // self._trace.rows * self._total
        else:
            shape[axis] = size * self._replicas
        return shape

    def _marked(self, tensor: Any, shape: Any) -> Any:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        spec = keras.KerasTensor(tuple(map(int, shape)), dtype)
        return self._trace.record(Node("collective", None, (tensor,), {}, spec))

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        self._trace.note_problem("makes a `merge_call`")
        return call_merged(merge, [arguments])[0]
