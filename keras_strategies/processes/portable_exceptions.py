"""Exceptions that are raised again in another process."""

from __future__ import annotations

import pickle
import traceback


def pickle_exception(error: BaseException) -> bytes:
    """Pickles an exception; empty if it cannot be pickled."""
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(error)
    except Exception:  # An exception may refer to any object.
        return b""
    return pickled


def unpickle_exception(pickled: bytes) -> Exception | None:
    """Unpickles an exception; None if it cannot be unpickled."""
    try:
        error = pickle.loads(pickled)
    except Exception:  # Unpickling runs the exception's own code.
        return None
    return error if isinstance(error, Exception) else None


def portable_exception(
    error: Exception, place: str, substitute: type[Exception] = RuntimeError
) -> Exception:
    """A copy of an exception that can be pickled, with its traceback as a note.

    Args:
        error: the exception.
        place: str, its origin in the note, such as `"on worker 1"`.
        substitute: class of the copy if the exception cannot be pickled.
    """
    text = "".join(traceback.format_exception(error))
    copy = unpickle_exception(pickle_exception(error))
    if type(copy) is not type(error):
        copy = substitute(f"{type(error).__name__}: {error}")
    assert copy is not None
    copy.add_note(f"Raised {place}:\n{text}")
    return copy
