"""NumPy's tensors and workers that are threads, to test what no framework is in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np

from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.types import ReduceOp

_REDUCTIONS = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MEAN: np.mean,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
}


class NumpyPrimitives(TensorPrimitives):
    def concatenate(self, tensors, axis=0):
        return np.concatenate(list(tensors), axis)

    def split(self, tensor, sizes, axis=0):
        return np.split(tensor, np.cumsum(sizes)[:-1], axis)

    def reshape(self, tensor, shape):
        return np.reshape(tensor, shape)

    def move_axis(self, tensor, source, destination):
        return np.moveaxis(tensor, source, destination)

    def reduce(self, op, tensors):
        return _REDUCTIONS[op](np.stack(list(tensors)), axis=0)

    def add(self, tensors):
        return sum(tensors[1:], start=tensors[0])

    def widened(self, tensor):
        return tensor.astype("float32") if tensor.dtype == "float16" else tensor

    def cast(self, tensor, dtype):
        return tensor.astype(dtype)

    def to_device(self, tensor, device):
        return tensor

    def read(self, variable):
        return np.array(raw_value(variable))

    def assign(self, variable, value):
        variable._value = np.asarray(value, variable.dtype)

    def to_device_of(self, tensor, other):
        return tensor

    def all_lengths(self, lengths, workers, counts):
        return workers.gather_rows(np.asarray(lengths), counts).tolist()


class ThreadWorker:
    """The communicator of one of several workers that are threads.

    Args:
        index: int, the number of the worker.
        replicas: the number of replicas of each worker.
        shared: what all workers have: a barrier, and a list with a slot for each.
    """

    def __init__(self, index: int, replicas: Sequence[int], shared: Any):
        self.group = SimpleNamespace(index=index, count=len(replicas))
        self.replica_counts = ReplicaCounts(tuple(replicas), index)
        self._shared = shared
        self.messages = 0

    def _exchange(self, value: Any) -> list[Any]:
        self.messages += 1
        self._shared.slots[self.group.index] = value
        self._shared.barrier.wait()
        found = list(self._shared.slots)
        self._shared.barrier.wait()
        return found

    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        columns = zip(*self._exchange(list(tensors)), strict=True)
        return [_REDUCTIONS[op](np.stack(column), axis=0) for column in columns]

    def gather_rows(self, tensor: Any, rows: Sequence[int]) -> Any:
        found = self._exchange(np.asarray(tensor))
        assert [len(each) for each in found] == list(rows)
        return np.concatenate(found)


def on_workers(
    replicas: Sequence[int], fn: Callable[[ThreadWorker], Any], seconds: float = 20
) -> list[Any]:
    """Calls a function for each worker in a thread of its own; results in order."""
    count = len(replicas)
    shared = SimpleNamespace(
        barrier=threading.Barrier(count, timeout=seconds), slots=[None] * count
    )
    with ThreadPoolExecutor(count) as pool:
        calls = [
            pool.submit(fn, ThreadWorker(i, replicas, shared)) for i in range(count)
        ]
        return [call.result(seconds) for call in calls]
