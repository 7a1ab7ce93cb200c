"""States of the callbacks of `fit` in snapshots."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models import fit_position
from keras_strategies.training.saving.archives import check_value
from keras_strategies.user_warnings import warn_user

_FILE_SIZE = "file size"


def callback_states(callbacks: Iterable[Any]) -> list[dict[str, Any]]:
    """Copies of the states of callbacks.

    The state of a callback with methods `get_state()` and `set_state(state)` is the
    result of the first; that of Keras's callbacks is the attributes listed in
    `fit_position.CALLBACK_STATE`.

    Returns:
        list of dicts: "key", the class and its number among those of the class, and
        "state".

    Raises:
        TypeError: for a state that a snapshot cannot hold.
    """
    found = []
    for key, callback in _keyed(callbacks):
        state = _state_of(callback)
        if state is not None:
            check_value(state, f"The state of callback {type(callback).__name__}")
            found.append({"key": key, "state": _copied(state)})
    return found


def restore_callbacks(
    callbacks: Iterable[Any], states: list[dict[str, Any]], is_chief: bool
) -> None:
    """Restores the states of callbacks, and warns of those that do not fit.

    Args:
        callbacks: the callbacks of `fit`.
        states: what `callback_states` returned.
        is_chief: bool, whether this process has all callbacks.
    """
    saved = {each["key"]: each["state"] for each in states}
    for key, callback in _keyed(callbacks):
        if _state_of(callback) is None:
            continue
        if key in saved:
            _set_state(callback, _copied(saved.pop(key)))
        else:
            warn_user(
                f"Callback {key} has no state in the snapshot: it was not used when "
                "the snapshot was made. It starts at the resumed step."
            )
    if saved and is_chief:
        warn_user(
            f"The snapshot has states of callbacks that `fit` was not given: "
            f"{', '.join(saved)}. Pass them to continue them."
        )


@contextlib.contextmanager
def appended_logs(
    callbacks: Iterable[Any], states: list[dict[str, Any]]
) -> Iterator[None]:
    """Context manager around the beginning of training: CSV files are continued.

    They are truncated to their sizes when the snapshot was made.
    """
    saved = {each["key"]: each["state"] for each in states}
    with contextlib.ExitStack() as stack:
        for key, callback in _keyed(callbacks):
            if isinstance(callback, keras.callbacks.CSVLogger) and key in saved:
                _truncate(Path(callback.filename), saved[key][_FILE_SIZE])
                stack.enter_context(fit_position.appending(callback))
        yield


def _keyed(callbacks: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    counts: Counter[str] = Counter()
    for callback in callbacks:
        name = type(callback).__name__
        counts[name] += 1
        yield (name if counts[name] == 1 else f"{name} {counts[name]}"), callback


def _state_of(callback: Any) -> Any:
    if _has_protocol(callback):
        return callback.get_state()
    state = {
        name: getattr(callback, name)
        for kind, names in fit_position.CALLBACK_STATE.items()
        if isinstance(callback, kind)
        for name in names
        if hasattr(callback, name)
    }
    if isinstance(callback, keras.callbacks.CSVLogger):
        state[_FILE_SIZE] = _size_of(callback)
    return state or None


def _set_state(callback: Any, state: Any) -> None:
    if _has_protocol(callback):
        callback.set_state(state)
        return
    for name, value in state.items():
        if name != _FILE_SIZE:
            setattr(callback, name, value)


def _has_protocol(callback: Any) -> bool:
    return all(callable(getattr(callback, n, None)) for n in ("get_state", "set_state"))


def _size_of(logger: Any) -> int:
    if logger.csv_file is not None and not logger.csv_file.closed:
        logger.csv_file.flush()
    path = Path(logger.filename)
    return path.stat().st_size if path.exists() else 0


def _truncate(path: Path, size: int) -> None:
    """Removes the rows that were logged after the snapshot."""
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        warn_user(
            f"The log {str(path)!r} had {size} bytes when the snapshot was made, and "
            f"has {found} now. It lacks rows of earlier epochs."
        )
    elif path.exists():
        os.truncate(path, size)


def _copied(value: Any) -> Any:
    """A structure with containers and arrays of its own."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        each = [_copied(inner) for inner in value]
        return each if isinstance(value, list) else tuple(each)
    return value.copy() if isinstance(value, np.ndarray) else value
