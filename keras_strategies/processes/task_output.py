"""Output of tasks, line by line, prefixed with the task's name.

A progress bar is written again and again: in a terminal it stays one line, which is
rewritten below the lines of other tasks; elsewhere it is a line once a second.
"""

from __future__ import annotations

import codecs
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, TextIO

from keras_strategies.processes.engine_messages import is_engine_line

# A progress bar returns to the start of its line instead of ending it.
_END = re.compile(r"(\r\n|\n|\r(?=[^\n]))")
#: Clears a line of a terminal from the cursor on.
_CLEAR = "\x1b[K"
#: Seconds between the lines of a bar that is not in a terminal.
_BETWEEN_UPDATES = 1.0
_lock = threading.Lock()


class _Bar(NamedTuple):
    """The bar at the bottom of the terminal: its stream, task and text."""

    stream: TextIO
    label: str
    text: str


_bar: _Bar | None = None
# When the bar of a task was written, where it is no terminal's.
_updates: dict[str, float] = {}


def lines(descriptor: int) -> Iterator[tuple[str, bool]]:
    """The lines of a pipe, as soon as each is complete.

    Args:
        descriptor: int, the reading end; it is read until its last writer is closed.

    Yields:
        str, without the end of the line and without backspaces; and whether the next
        one is written over it, as in a progress bar. Invalid UTF-8 is replaced.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    rest = ""
    while True:
        chunk = os.read(descriptor, 65536)
        *complete, rest = _END.split(rest + decode(chunk, final=not chunk))
        for line, end in zip(complete[::2], complete[1::2], strict=True):
            yield line.replace("\b", ""), end == "\r"
        if not chunk:
            break
    if rest.rstrip("\r"):
        yield rest.rstrip("\r").replace("\b", ""), False


def write(stream: TextIO, label: str, line: str, is_update: bool = False) -> None:
    """Writes one line; lines of several threads do not mix.

    Args:
        stream: where to.
        label: str, the task.
        line: str, what it has printed.
        is_update: bool, whether the task's next line is written over it.
    """
    text = f"[{label}] {line}" if line else f"[{label}]"
    with _lock:
        if not is_update:
            _write_line(stream, label, text)
        elif line.strip():
            _update(stream, label, text)


def _update(stream: TextIO, label: str, text: str) -> None:
    global _bar
    if stream.isatty():
        # A line that wraps could not be rewritten.
        text = text[: shutil.get_terminal_size().columns - 1]
        stream.write(f"\r{text}{_CLEAR}")
        stream.flush()
        _bar = _Bar(stream, label, text)
    elif time.monotonic() - _updates.get(label, 0.0) >= _BETWEEN_UPDATES:
        _updates[label] = time.monotonic()
        stream.write(f"{text}\n")
        stream.flush()


def _write_line(stream: TextIO, label: str, text: str) -> None:
    global _bar
    bar, _bar = _bar, None
    if bar is not None:
        bar.stream.write(f"\r{_CLEAR}")
        bar.stream.flush()
    stream.write(f"{text}\n")
    stream.flush()
    if bar is not None and bar.label != label:
        bar.stream.write(bar.text)
        bar.stream.flush()
        _bar = bar


def copy(
    descriptor: int,
    stream: TextIO,
    label: str,
    engine_lines: bool = False,
    observe: Callable[[str], None] | None = None,
    hold: Callable[[str], bool] | None = None,
) -> None:
    """Copies a pipe to a stream until it ends, and closes it.

    Lines that engines print in every program when they start are left out, unless
    `engine_lines` is True. `observe` is called with every line that is not empty. A
    line for which `hold` returns True is not written.

    The pipe is drained even if the stream is closed, as after `| head`, so that
    training continues.
    """
    is_read = True
    try:
        for line, is_update in lines(descriptor):
            if observe is not None and line.strip():
                observe(line)
            if not engine_lines and is_engine_line(line):
                continue
            if hold is not None and hold(line):
                continue
            if is_read:
                try:
                    write(stream, label, line, is_update)
                except (BrokenPipeError, ValueError):  # ValueError: it was closed.
                    is_read = False
    finally:
        os.close(descriptor)
