"""Output of tasks, line by line, prefixed with the task's name."""

from __future__ import annotations

import codecs
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

from keras_strategies.processes.engine_messages import is_engine_line

# A progress bar returns to the start of its line instead of ending it.
_END = re.compile(r"\r\n|\n|\r(?=[^\n])")
_lock = threading.Lock()


def lines(descriptor: int) -> Iterator[str]:
    """The lines of a pipe, as soon as each is complete.

    Args:
        descriptor: int, the reading end; it is read until its last writer is closed.

    Yields:
        str, without the end of the line. Invalid UTF-8 is replaced.
    """
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    rest = ""
    while True:
        chunk = os.read(descriptor, 65536)
        *complete, rest = _END.split(rest + decode(chunk, final=not chunk))
        yield from complete
        if not chunk:
            break
    if rest.rstrip("\r"):
        yield rest.rstrip("\r")


def write(stream: TextIO, label: str, line: str) -> None:
    """Writes one line; lines of several threads do not mix."""
    with _lock:
        stream.write(f"[{label}] {line}\n" if line else f"[{label}]\n")
        stream.flush()


def copy(
    descriptor: int,
    stream: TextIO,
    label: str,
    engine_lines: bool = False,
    observe: Callable[[str], None] | None = None,
) -> None:
    """Copies a pipe to a stream until it ends, and closes it.

    Lines that engines print in every program when they start are left out, unless
    `engine_lines` is True. `observe` is called with every line that is not empty.

    The pipe is drained even if the stream is closed, as after `| head`, so that
    training continues.
    """
    is_read = True
    try:
        for line in lines(descriptor):
            if observe is not None and line.strip():
                observe(line)
            if is_read and (engine_lines or not is_engine_line(line)):
                try:
                    write(stream, label, line)
                except (BrokenPipeError, ValueError):  # ValueError: it was closed.
                    is_read = False
    finally:
        os.close(descriptor)
