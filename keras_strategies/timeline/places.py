"""The line of the user's code that this process runs, for reports to others."""

from __future__ import annotations

import functools
import linecache
import os
import sys
import sysconfig
import threading

_INSTALLED = {"site-packages", "dist-packages"}
_PACKAGE = os.path.dirname(os.path.dirname(__file__))


def main_thread_place() -> str:
    """The line of the user's code that the main thread of this process runs.

    Returns:
        str, file, line, function and source; of the innermost line if all of them are
        in libraries.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    innermost = frame
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    found = frame or innermost
    if found is None:
        return "no line of Python"
    code = found.f_code
    source = linecache.getline(code.co_filename, found.f_lineno).strip()
    text = f"{code.co_filename}, line {found.f_lineno}, in {code.co_name}"
    return f"{text}: `{source}`" if source else text


@functools.cache
def _is_library(name: str) -> bool:
    if name.startswith("<frozen") or not _INSTALLED.isdisjoint(name.split(os.sep)):
        return True
    return name.startswith(
        (_PACKAGE + os.sep, sysconfig.get_paths()["stdlib"] + os.sep)
    )
