"""Values of the coordinator's own variables, those of metrics."""

from __future__ import annotations

import threading

import numpy as np


class CoordinatorVariables:
    """Values of variables that are on no server, those of metrics."""

    def __init__(self) -> None:
        self._values: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def set(self, number: int, value: np.ndarray) -> None:
        with self._lock:
            self._values[number] = np.array(value)

    def get(self, number: int) -> np.ndarray:
        with self._lock:
            return self._values[number]

    def delete(self, number: int) -> None:
        with self._lock:
            self._values.pop(number, None)

    def add(self, changes: dict[int, np.ndarray]) -> None:
        with self._lock:
            for number, change in changes.items():
                value = self._values[number]
                if value.dtype == bool:
                    self._values[number] = np.asarray(change)
                else:
                    self._values[number] = np.asarray(value + change, value.dtype)
