"""The memory of this process while a function runs."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras


def tensorflow_counts_memory() -> bool:
    """Whether TensorFlow counts memory here, as with TF_ENABLE_ONEDNN_OPTS=1."""
    import tensorflow as tf

    try:
        tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:
        return False
    return True


def return_large_blocks() -> None:
    """From now on glibc returns each large block when it is freed (mallopt(3))."""
    threshold = -3  # M_MMAP_THRESHOLD
    assert ctypes.CDLL(None).mallopt(threshold, 2**20)


def above_what_stays(fn: Callable[[], object]) -> int:
    """Bytes that a function needs at most above what stays when it has returned.

    The kernel counts from zero after the write to `clear_refs` (proc(5)).
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    result = fn()
    gc.collect()
    kept, peak = (_status(key) for key in ("VmRSS", "VmHWM"))
    del result
    return peak - kept


@dataclass(frozen=True)
class Allocated:
    """Bytes that a process has allocated, without pages of files.

    Args:
        before, after: int, before a function and after it.
        making, loading: int, the most until a variable was assigned, and since then.
    """

    before: int
    making: int
    loading: int
    after: int


def allocated_by(load: Callable[[], object]) -> Allocated:
    """The memory of this process while a model is made and loaded.

    Without pages of files. The kernel keeps no peak of it, so a thread reads it each
    millisecond.
    """
    kind: Any = keras.Variable
    assign = kind.assign
    gc.collect()
    before = _status("RssAnon")
    peaks, is_done, is_loading = [before, before], threading.Event(), [False]

    def assigned(self: Any, value: Any) -> Any:
        if not is_loading[0]:
            gc.collect()
            is_loading[0] = True
        return assign(self, value)

    def sample() -> None:
        while not is_done.wait(0.001):
            phase = int(is_loading[0])
            peaks[phase] = max(peaks[phase], _status("RssAnon"))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    kind.assign = assigned
    try:
        result = load()
    finally:
        kind.assign = assign
        is_done.set()
        thread.join()
    gc.collect()
    after = _status("RssAnon")
    del result
    return Allocated(before, *peaks, after)


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [found] = [line.split()[1] for line in lines if line.startswith(key + ":")]
    return int(found) * 1024
