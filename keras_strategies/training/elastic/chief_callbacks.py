"""Callbacks that run on the chief, continued by the next chief if it is lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_strategies.keras_compat.models import fit_position

_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


class ChiefCallback(keras.callbacks.Callback):
    """A callback that writes files, called on the chief only.

    Every worker has one. A worker that becomes the chief starts it, and writes the
    output that the previous chief has not written.

    Args:
        callback: the callback.
        is_chief: returns whether this worker is the chief now.
    """

    def __init__(self, callback: Any, is_chief: Callable[[], bool]):
        super().__init__()
        self.callback = callback
        self._is_chief = is_chief
        self._has_begun = False
        # The arguments of the last `on_epoch_end`.
        self._last: tuple[int, Any] | None = None
        self._epoch = 0

    def call(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Calls a method of the callback, on the chief."""
        is_chief = self._is_chief()
        if name == "on_epoch_begin":
            self._epoch = args[0]
        if is_chief and not self._has_begun and name != "on_train_begin":
            self.take_over()
        if name == "on_epoch_end":
            logs = kwargs.get("logs", args[1] if args[1:] else None)
            # A copy: other callbacks add to the logs.
            self._last = args[0], dict(logs or {})
        if is_chief:
            self._begin()
            getattr(self.callback, name)(*args, **kwargs)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self.callback.set_params(self.params)
            self.callback.set_model(self.model)

    def take_over(self) -> None:
        """Starts the callback in the middle of training."""
        if self._has_begun:
            return
        self._begin()
        if isinstance(self.callback, keras.callbacks.BackupAndRestore):
            # Its `on_train_begin` would restore the backup.
            return
        if not isinstance(self.callback, keras.callbacks.CSVLogger):
            self.callback.on_train_begin()
            return
        # `_last` is None on a worker that has joined or resumed in this epoch.
        done = self._epoch - 1 if self._last is None else self._last[0]
        rows = _rows_so_far(Path(self.callback.filename), self.callback.sep, done)
        with fit_position.appending(self.callback):
            self.callback.on_train_begin()
        if rows:
            self.callback.keys = rows[0][1:]
        if self._last is not None and str(done) not in [row[0] for row in rows]:
            self.callback.on_epoch_end(*self._last)


def _forwarded(name: str) -> Callable[..., None]:
    def forwarded(self: ChiefCallback, *args: Any, **kwargs: Any) -> None:
        self.call(name, *args, **kwargs)

    return forwarded


for _name in _HOOKS:
    setattr(ChiefCallback, _name, _forwarded(_name))


def _rows_so_far(path: Path, separator: str, done: int) -> list[list[str]]:
    """The header and rows of a log; removes later and incomplete ones from it."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    complete = [line for line in lines if line.endswith(b"\n")]
    rows = [line.decode().rstrip("\r\n").split(separator) for line in complete]
    while len(rows) > 1 and int(rows[-1][0]) > done:
        rows.pop()
    path.write_bytes(b"".join(lines[: len(rows)]))
    return rows


class ChiefCallbacks:
    """The callbacks of one method, with output that follows the chief.

    Args:
        callbacks: all callbacks of the method.
        verbose: the argument of the method.
        is_chief: returns whether this worker is the chief now.
    """

    def __init__(
        self, callbacks: Sequence[Any], verbose: Any, is_chief: Callable[[], bool]
    ):
        self._is_chief = is_chief
        shown = 1 if verbose == "auto" else verbose
        self._verbose = [
            (each, shown if _is_bar(each) else each.verbose)
            for each in callbacks
            if hasattr(each, "verbose")
        ]
        self._callbacks = [
            each for each in callbacks if isinstance(each, ChiefCallback)
        ]
        self._was_chief = is_chief()
        if not self._was_chief:
            for callback, _ in self._verbose:
                callback.verbose = 0

    def follow(self) -> None:
        """Starts the output on a worker that has become the chief."""
        if self._was_chief or not self._is_chief():
            return
        self._was_chief = True
        for callback, verbose in self._verbose:
            callback.verbose = verbose
            if getattr(callback, "progbar", None) is not None:
                callback.progbar.verbose = verbose
        for each in self._callbacks:
            each.take_over()


def _is_bar(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.ProgbarLogger)
