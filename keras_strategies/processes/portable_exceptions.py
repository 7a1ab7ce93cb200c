"""Exceptions that are raised again in another process."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass
from typing import Any


def _pickled(error: BaseException) -> bytes:
    """Pickles an exception; empty if it cannot be pickled.

    An exception that its class does not recreate from `args` is recreated without
    `__init__`; attributes that cannot be pickled are their representations then.
    """
    found = b""
    for candidate in (error, _Parts(error)):
        pickled = _dumps(candidate)
        copy = _unpickled(pickled)
        if type(copy) is type(error):
            if _text(copy) == _text(error):
                return pickled
            found = pickled
    return found


def _unpickled(pickled: bytes) -> Exception | None:
    """Unpickles an exception; None if it cannot be unpickled."""
    try:
        error = pickle.loads(pickled)
    except Exception:  # Unpickling runs the exception's own code.
        return None
    return error if isinstance(error, Exception) else None


@dataclass(frozen=True)
class PortableException:
    """An exception in a message to another process.

    Args:
        pickled: bytes, see `_pickled`.
        text: str, its class and message.
        note: str, its traceback.
    """

    pickled: bytes
    text: str
    note: str

    @classmethod
    def of(cls, error: BaseException, place: str) -> PortableException:
        """The message of an exception.

        Args:
            error: the exception.
            place: str, its origin in the note, such as `"on worker 1"`.
        """
        trace = "".join(traceback.format_exception(error))
        text = f"{type(error).__name__}: {_text(error)}"
        return cls(_pickled(error), text, f"Raised {place}:\n{trace}")

    def error(self, substitute: type[Exception] = RuntimeError) -> Exception:
        """The exception, with its traceback as a note.

        Args:
            substitute: class of the exception if it cannot be pickled.
        """
        found = _unpickled(self.pickled) or substitute(self.text)
        found.add_note(self.note)
        return found


class _Parts:
    """An exception that is recreated from its parts, without `__init__`."""

    def __init__(self, error: BaseException):
        self._error = error

    def __reduce__(self) -> Any:
        error = self._error
        # Of an `OSError`, `args` lacks the file.
        args = tuple(map(_portable, _builtin(type(error)).__reduce__(error)[1]))
        state = {name: _portable(value) for name, value in vars(error).items()}
        return _recreated, (type(error), args, state)


def _recreated(
    kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    _builtin(kind).__init__(error, *args)
    vars(error).update(state)
    return error


def _builtin(kind: type[BaseException]) -> Any:
    """The first built-in class among a class and its bases."""
    return next(base for base in kind.__mro__ if base.__module__ == "builtins")


def _portable(value: Any) -> Any:
    if isinstance(value, BaseException):
        return _Parts(value)
    if type(value) in (list, tuple):  # The exceptions of a group.
        return type(value)(map(_portable, value))
    return value if _dumps(value) else repr(value)


def _dumps(made: Any) -> bytes:
    """Pickles an object; empty if it cannot be pickled."""
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(made)
    except Exception:  # An exception may refer to any object.
        return b""
    return pickled


def _text(error: Any) -> str:
    try:
        return str(error)
    except Exception:  # `__str__` is the exception's own code.
        return ""
