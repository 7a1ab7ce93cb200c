"""Warnings that point to a line of user code."""

from __future__ import annotations

import inspect
import warnings
from types import FrameType

# Frames of these packages, between user code and the warning, are skipped.
_LIBRARIES = frozenset(
    ["keras_strategies", "keras", "tensorflow", "torch", "jax", "contextlib"]
)


def warn_user(message: str) -> None:
    """Warns at the innermost line outside of this package, Keras and the frameworks.

    Args:
        message: str, what was found and what to do.
    """
    _, level = _user_frame()
    # Of `_user_frame`.
    warnings.warn(message, stacklevel=level - 1)


def user_line() -> str:
    """That line, as `"file:number"`."""
    frame, _ = _user_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def line_of_error(error: BaseException) -> str | None:
    """The innermost such line in the traceback of an error; None without one."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if not _is_of_library(trace.tb_frame.f_globals):
            found = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found


def _user_frame() -> tuple[FrameType, int]:
    """The innermost frame outside of libraries, and its number from here."""
    frame, level = inspect.currentframe(), 1
    assert frame is not None
    while frame.f_back and _is_of_library(frame.f_globals):
        frame, level = frame.f_back, level + 1
    return frame, level


def _is_of_library(names: dict[str, object]) -> bool:
    package = str(names.get("__name__", "")).partition(".")[0]
    return package in _LIBRARIES or package.startswith("__autograph_generated")
