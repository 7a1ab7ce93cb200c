"""The memory of this process while a function runs."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path


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


def peak_of(fn: Callable[[], object]) -> tuple[int, int]:
    """Bytes that a function needs at most above what was before it, and what stays.

    The kernel counts from zero after the write to `clear_refs` (proc(5)).
    """
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    fn()
    gc.collect()
    peak, after = _status("VmHWM"), _status("VmRSS")
    return peak - before, peak - after


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [found] = [line.split()[1] for line in lines if line.startswith(key + ":")]
    return int(found) * 1024
