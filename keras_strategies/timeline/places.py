"""The line of the user's code that this process runs, for reports to others."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
import threading
from types import FrameType

_INSTALLED = {"site-packages", "dist-packages"}
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def main_thread_place() -> str:
    """The line of the user's code that the main thread of this process runs.

    Returns:
        str, file, line, function and source; of the innermost line if all of them are
        in libraries.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = _user_frame(frame) or frame
    return "no line of Python" if found is None else _text(found)


def reading_place() -> str:
    """The line at which another thread runs the user's code; empty without one.

    Generators and functions of a `tf.data.Dataset` run in threads of TensorFlow.
    """
    main = threading.main_thread().ident
    for thread, frame in sys._current_frames().items():
        found = None if thread == main else _user_frame(frame)
        if found is not None:
            return _text(found)
    return ""


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's code."""
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _text(frame: FrameType) -> str:
    code = frame.f_code
    # A frame that begins has none yet.
    line = frame.f_lineno or code.co_firstlineno
    source = linecache.getline(code.co_filename, line).strip()
    text = f"{code.co_filename}, line {line}, in {code.co_name}"
    return f"{text}: `{source}`" if source else text


@functools.cache
def _is_library(name: str) -> bool:
    if name.startswith("<frozen") or not _INSTALLED.isdisjoint(name.split(os.sep)):
        return True
    return name.startswith(
        (_PACKAGE + os.sep, sysconfig.get_paths()["stdlib"] + os.sep)
    )
