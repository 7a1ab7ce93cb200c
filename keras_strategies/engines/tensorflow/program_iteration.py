"""Loops over distributed datasets that are part of a TensorFlow program.

Inside a `tf.function` a batch is the result of an operation, a `tf.py_function` that
reads a Python iterator: datasets of every kind can be read by Python. The iterator is
created each time that the program reaches the loop.
"""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.programs import (
    program_for_loop,
    python_for_loop,
    register_for_loop,
)
from keras_strategies.errors import BatchError, ContextError
from keras_strategies.values import PerReplica, flatten, map_structure

# Passes that a program may have open: several threads may call one function, and a loop
# that ends with an error does not close its pass.
_MAX_PASSES = 8
# More `next` calls than any traced program has: a Python loop, which would not end.
_MAX_BATCHES_IN_A_TRACE = 1000


class _Passes:
    """The Python side of a program's loop.

    Args:
        start: makes an iterator of batches.
        empty: list of NumPy arrays, the tensors of a batch without rows.
    """

    def __init__(self, start: Callable[[], Iterator[Any]], empty: list[Any]):
        self._start = start
        self._empty = empty
        self._numbers = itertools.count()
        self._passes: collections.OrderedDict[int, Any] = collections.OrderedDict()
        # TensorFlow may end a pass on one thread while another one reads ahead in it.
        self._lock = threading.RLock()

    def begin(self) -> int:
        """Starts a pass; returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._passes[number] = self._start()
            while len(self._passes) > _MAX_PASSES:
                _close(self._passes.popitem(last=False)[1])
            return number

    def next(self, number: Any) -> list[Any]:
        """The tensors of the next batch; TensorFlow converts `StopIteration`."""
        with self._lock:
            return self._tensors(next(self._passes[int(number)]))

    def next_if_any(self, number: Any) -> list[Any]:
        """Whether there is a batch, and its tensors."""
        with self._lock:
            iterator = self._passes.get(int(number))
            batch = None if iterator is None else next(iterator, None)
        if batch is None:
            return [False, *self._empty]
        return [True, *self._tensors(batch)]

    def end(self, number: Any) -> None:
        """Closes a pass, also one that a `break` has left."""
        with self._lock:
            _close(self._passes.pop(int(number), None))

    def _tensors(self, batch: Any) -> list[Any]:
        """The tensors of all replicas, leaf by leaf."""
        found: list[Any] = []
        for leaf in flatten(batch):
            if leaf is not None:
                found.extend(leaf.values if isinstance(leaf, PerReplica) else [leaf])
        # TensorFlow relies on the rank of the specification, and does not compare it.
        for tensor, empty in zip(found, self._empty, strict=True):
            if np.ndim(tensor) != empty.ndim:
                raise BatchError(
                    f"A distributed dataset yielded an array with {np.ndim(tensor)} "
                    f"axes, and {empty.ndim} axes in its specification, for which a "
                    "program was traced. In a program, all batches must have the rank "
                    "of `dataset.element_spec`; otherwise iterate outside of the "
                    "function and call it with each batch."
                )
        return found


def _close(iterator: Any) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        close()


class ProgramIterator:
    """An iterator of batches that are operations of the program being traced.

    Args:
        start: makes an iterator of batches, when the program runs.
        spec: the structure of a batch; leaves are `tf.TensorSpec`s, `PerReplica`s of
            them, or None.
        devices: the device of each replica; None to leave tensors on the host.
    """

    def __init__(
        self,
        start: Callable[[], Iterator[Any]],
        spec: Any,
        devices: Sequence[str] | None,
    ):
        self.element_spec = spec
        self._specs: list[tf.TensorSpec] = []
        self._where: list[str | None] = []
        for leaf in flatten(spec):
            if leaf is None:
                continue
            own = leaf.values if isinstance(leaf, PerReplica) else [leaf]
            self._specs.extend(own)
            self._where.extend(devices or [None] * len(own))
        empty = [_without_rows(spec) for spec in self._specs]
        self._passes = _Passes(start, empty)
        self._number = tf.py_function(self._passes.begin, [], tf.int64)
        self._requested = 0

    def __iter__(self) -> ProgramIterator:
        return self

    def __next__(self) -> Any:
        return self.get_next()

    def get_next(self) -> Any:
        """The next batch; the program fails with `OutOfRangeError` without one."""
        self._count()
        types = [spec.dtype for spec in self._specs]
        return self._batch(tf.py_function(self._passes.next, [self._number], types))

    def get_next_as_optional(self) -> _ProgramOptional:
        """The next batch, or nothing."""
        self._count()
        types = [tf.bool, *(spec.dtype for spec in self._specs)]
        has_value, *tensors = tf.py_function(
            self._passes.next_if_any, [self._number], types
        )
        has_value.set_shape(())
        return _ProgramOptional(has_value, self._batch(tensors))

    def end(self) -> None:
        """Closes the pass, when the program reaches this point."""
        tf.py_function(self._passes.end, [self._number], [])

    def _count(self) -> None:
        self._requested += 1
        if self._requested > _MAX_BATCHES_IN_A_TRACE:
            raise ContextError(
                "A distributed dataset was iterated by Python while TensorFlow traces "
                f"a `tf.function`: {_MAX_BATCHES_IN_A_TRACE} batches were requested. "
                "Use a `for` loop in code that AutoGraph converts, or iterate outside "
                "and call the function with each batch."
            )

    def _batch(self, tensors: Sequence[Any]) -> Any:
        moved = []
        for tensor, spec, device in zip(tensors, self._specs, self._where, strict=True):
            tensor.set_shape(spec.shape)
            with tf.device(device):
                moved.append(tensor if device is None else tf.identity(tensor))
        rest = iter(moved)

        def leaf(spec: Any) -> Any:
            if isinstance(spec, PerReplica):
                return PerReplica([next(rest) for _ in spec.values])
            return None if spec is None else next(rest)

        return map_structure(leaf, self.element_spec)


class _ProgramOptional:
    """An optional batch of a program, decided when it runs."""

    def __init__(self, has_value: Any, batch: Any):
        self._has_value = has_value
        self._batch = batch

    def has_value(self) -> Any:
        """bool tensor, whether there is a batch."""
        return self._has_value

    def get_value(self) -> Any:
        """The batch; zero rows where there is none."""
        return self._batch


def _without_rows(spec: tf.TensorSpec) -> Any:
    shape = [0 if size is None else size for size in spec.shape]
    return np.zeros(shape, spec.dtype.as_numpy_dtype)


def loop_over(iterable: type, in_program: Callable[[Any], ProgramIterator]) -> None:
    """Makes `for` loops over a class loops of the program inside `tf.function`.

    Args:
        iterable: the class; in eager code its `for` loops are run by Python.
        in_program: returns the iterator in the program for an object of the class.
    """

    def for_statement(given: Any, *loop: Any) -> None:
        if tf.executing_eagerly():
            python_for_loop(given, *loop)
            return
        iterator = in_program(given)
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        program_for_loop(iterator, *loop)
        # Otherwise TensorFlow would run `end` as soon as its inputs are available.
        with tf.control_dependencies(graph.get_operations()[before:]):
            iterator.end()

    register_for_loop(iterable, for_statement)
