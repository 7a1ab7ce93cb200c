"""What a thread of this process executes, for reports to the other workers."""

from __future__ import annotations

import faulthandler
import inspect
import os
import re
import sysconfig
import tempfile
import threading
from pathlib import Path

# Code that is not the user's.
_LIBRARIES = (
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
    "<",
)
# 'Thread 0x00007f0a (most recent call first):' and '  File "train.py", line 31 in main'
_THREAD = re.compile(r"hread 0x([0-9a-f]+)")
_LINE = re.compile(r'  File "(.*)", line (\d+)')


def script_line() -> str:
    """The innermost line of the user's code, such as "train.py:31"; or empty."""
    frame = inspect.currentframe()
    while frame is not None:
        path, line = frame.f_code.co_filename, frame.f_lineno
        if not path.startswith(_LIBRARIES):
            return f"{os.path.basename(path)}:{line}"
        frame = frame.f_back
    return ""


def main_thread_stack() -> tuple[str, str]:
    """The line of the script that the main thread executes, and its calls.

    The main thread may hang in a call.
    """
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        lines = file.read().decode(errors="replace").splitlines()
    ident, stack, is_main = threading.main_thread().ident, [], False
    for line in lines:
        if (found := _THREAD.search(line)) is not None:
            is_main = int(found[1], 16) == ident
        elif is_main and line:
            stack.append(line)
    for line in stack:
        found = _LINE.match(line)
        if found is not None and not found[1].startswith(_LIBRARIES):
            return f"{os.path.basename(found[1])}:{found[2]}", "\n".join(stack)
    return "", "\n".join(stack)
