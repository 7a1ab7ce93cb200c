"""The line of the user's code that this process runs, for reports to others."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
import threading
from types import CodeType, FrameType

_INSTALLED = {"site-packages", "dist-packages"}
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def main_thread_place() -> str:
    """The line of the user's code that the main thread of this process runs.

    Returns:
        str, file, line, function and source; of the innermost line if all of them are
        in libraries.
    """
    places = _places()
    found = places.get(threading.main_thread().ident or 0)
    return "no line of Python" if found is None else _text(*found[:2])


def reading_place() -> str:
    """The line at which another thread runs the user's code; empty without one.

    Generators and functions of a `tf.data.Dataset` run in threads of TensorFlow.
    """
    main = threading.main_thread().ident
    for thread, (code, line, is_of_user) in _places().items():
        if thread != main and is_of_user:
            return _text(code, line)
    return ""


def _places() -> dict[int, tuple[CodeType, int, bool]]:
    """Code and line of each thread, and whether they are the user's.

    Frames are not kept while this thread may wait, as for a file: with a frame that has
    ended, the tensors in it would live.
    """
    found = {}
    for thread, innermost in sys._current_frames().items():
        frame: FrameType | None = innermost
        while frame is not None and _is_library(frame.f_code.co_filename):
            frame = frame.f_back
        shown = innermost if frame is None else frame
        # A frame that begins has no line yet.
        line = shown.f_lineno or shown.f_code.co_firstlineno
        found[thread] = shown.f_code, line, frame is not None
    return found


def _text(code: CodeType, line: int) -> str:
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
