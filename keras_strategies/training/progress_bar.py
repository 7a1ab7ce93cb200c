"""Progress bar with the number of active workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras


class WorkerProgress(keras.callbacks.ProgbarLogger):
    """Keras's progress bar, with `10ms/step on 2 workers` in place of `10ms/step`.

    It counts forwards: an update that comes after that of a later step is left out.

    Args:
        computing: callable that returns the number of workers that compute now.
        total: callable that returns the number of workers.
    """

    # As Keras's own progress bar: steps do not wait for it.
    async_safe = True

    def __init__(self, computing: Callable[[], int], total: Callable[[], int]):
        super().__init__()
        self._computing = computing
        self._total = total
        # Keras calls it from several threads, in any order.
        self._lock = threading.Lock()
        self._last = -1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._begin()

    def on_test_begin(self, logs: Any = None) -> None:
        super().on_test_begin(logs)
        self._begin()

    def on_predict_begin(self, logs: Any = None) -> None:
        super().on_predict_begin(logs)
        self._begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._lock:
            if batch > self._last:
                self._last = batch
                self._name_the_unit()
                super().on_train_batch_end(batch, logs)

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._lock:
            if batch > self._last:
                self._last = batch
                super().on_test_batch_end(batch, logs)

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        with self._lock:
            if batch > self._last:
                self._last = batch
                super().on_predict_batch_end(batch, logs)

    def _begin(self) -> None:
        self._last = -1
        self._name_the_unit()

    def _name_the_unit(self) -> None:
        if self.progbar is not None:
            workers = workers_text(self._computing(), self._total())
            self.progbar.unit_name = f"step on {workers}"


def workers_text(computing: int, total: int) -> str:
    """`2 workers`; `1 of 2 workers` where one of them does not compute."""
    plural = "s" * (total != 1)
    if computing == total:
        return f"{total} worker{plural}"
    return f"{computing} of {total} worker{plural}"


def with_progress(callbacks: Any, verbose: Any, bar: WorkerProgress) -> Any:
    """A method's callbacks and the bar, where Keras would add one.

    Args:
        callbacks: what the method was given; a `CallbackList` stays as it is.
        verbose: what the method was given.
        bar: the bar to add.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList) or verbose == 0:
        return callbacks
    listed = [] if callbacks is None else list(keras.tree.flatten(callbacks))
    if any(isinstance(each, keras.callbacks.ProgbarLogger) for each in listed):
        return callbacks
    return [*listed, bar]
