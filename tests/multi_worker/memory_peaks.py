"""The memory of this process while a function runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path


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


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [found] = [line.split()[1] for line in lines if line.startswith(key + ":")]
    return int(found) * 1024
