"""Return values of scheduled functions, and values that exist once per worker."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies.errors import ClusterTimeoutError, InvalidTypeError
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.parameter_server.engines.composite_tensors import is_composite
from keras_strategies.parameter_server.variables.object_pickling import WorkerValue
from keras_strategies.parameter_server.wire.task_messages import WorkerReference


class RemoteValue:
    """The future return value of a scheduled function.

    Returned by `ClusterCoordinator.schedule`.

    Example:

    >>> value = coordinator.schedule(step_fn)
    >>> value.fetch()
    """

    def __init__(self) -> None:
        self._done = threading.Event()
        self._value: Any = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        if not self.is_done():
            return "<RemoteValue, not yet computed>"
        if self._error is not None:
            return f"<RemoteValue, failed: {type(self._error).__name__}: {self._error}>"
        return f"<RemoteValue of {_shortened(self._value)}>"

    def __reduce__(self) -> Any:
        # Another process receives the value.
        return _identity, (self.fetch(),)

    def set(self, value: Any, error: BaseException | None) -> None:
        """Sets the value or the error."""
        self._value, self._error = value, error
        self._done.set()

    def is_done(self) -> bool:
        """Whether the value or an error is available."""
        return self._done.is_set()

    def fetch(self, timeout: float | None = None) -> Any:
        """Waits for the value.

        Args:
            timeout: float, seconds; None to wait as long as it takes.

        Returns:
            The function's return value, with NumPy arrays for dense tensors; ragged and
            sparse ones are tensors.

        Raises:
            Exception: the function's error.
            RuntimeError: as `ks.errors.ClosureCancelledError`, if it was cancelled;
                as `ks.errors.ClusterTimeoutError`, if it took too long.
        """
        if not self._done.wait(timeout):
            raise ClusterTimeoutError(
                f"The function did not return within {timeout:g} seconds. It is still "
                "queued or running: call `fetch` again, or see "
                "`coordinator.status()`."
            )
        if self._error is not None:
            raise self._error
        return self._value

    def get(self, timeout: float | None = None) -> Any:
        """As `fetch`, with tensors of the backend for arrays."""
        return keras.tree.map_structure(_to_tensor, self.fetch(timeout))


class PerWorkerValues(WorkerValue):
    """Reference to a value that exists once per worker.

    Created by `create_per_worker_values` and `create_per_worker_dataset`, and passed to
    scheduled functions, which receive the value of their worker. A restarted worker
    creates its value again.

    Workers discard the value when this object no longer exists on the coordinator, and
    no scheduled function uses it.

    Args:
        reference: the reference in messages.
        source: the function that creates it, or the dataset that it iterates over.
        iterate: callable of a dataset's `PerWorkerValues` that creates an iterator over
            it on each worker, and returns its `PerWorkerValues`.
        release: callable of a number, called when this object no longer exists.
    """

    def __init__(
        self,
        reference: WorkerReference,
        source: Any,
        iterate: Callable[[PerWorkerValues], PerWorkerValues],
        release: Callable[[int], None],
    ):
        super().__init__(reference)
        self._source = source
        self._iterate = iterate
        weakref.finalize(self, release, reference.number).atexit = False

    def __repr__(self) -> str:
        return f"<PerWorkerValues {self.reference.number}, one on each worker>"

    def __iter__(self) -> PerWorkerValues:
        """An iterator over each worker's dataset, for scheduled functions."""
        return self._iterate(self)

    def __next__(self) -> Any:
        raise InvalidTypeError(
            "`next` was called on the coordinator, but this iterator is over a dataset "
            "of each worker. Pass it to a scheduled function, "
            "`coordinator.schedule(fn, args=(iterator,))`, and call `next` there."
        )


# Name of `tf.distribute.coordinator`.
PerWorkerValue = PerWorkerValues


def _identity(value: Any) -> Any:
    return value


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def as_sent(structure: Any) -> Any:
    """Arguments as they are sent: fetched values, and NumPy arrays for tensors."""
    if isinstance(structure, RemoteValue):
        return structure.fetch()
    if type(structure) in (list, tuple):
        return type(structure)(as_sent(item) for item in structure)
    if type(structure) is dict:
        return {key: as_sent(item) for key, item in structure.items()}
    # Variables are tensors on TensorFlow.
    if (
        keras.ops.is_tensor(structure)
        and not isinstance(structure, keras.Variable)
        and not is_composite(structure)
        and not parameter_server_engine().is_framework_variable(structure)
    ):
        return keras.ops.convert_to_numpy(structure)
    return structure


def _to_tensor(value: Any) -> Any:
    if keras.ops.is_tensor(value):
        return value
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return keras.ops.convert_to_tensor(value)
    return value
