"""Methods of models that run, and the patches that last until they end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from keras_strategies.keras_compat import patching

#: Groups that steps install.
_GROUPS_OF_STEPS = ("routes", "input", "replicas", "row parts")


class RunningMethods:
    """The methods of models that run in this process."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    @property
    def any(self) -> bool:
        """bool, whether a method runs, in any thread."""
        return self._count > 0

    @contextlib.contextmanager
    def one(self, is_long: bool) -> Iterator[None]:
        """Counts a method; the end of the last one removes the patches of steps.

        Args:
            is_long: bool, whether it is one of several steps, such as `fit`.
        """
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1
                if is_long and not self._count:
                    for group in _GROUPS_OF_STEPS:
                        patching.remove(group)


running_methods = RunningMethods()
