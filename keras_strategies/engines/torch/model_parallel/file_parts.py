"""Values of variables that are parts of a file: which part, and copies of them."""

from __future__ import annotations

import functools
import math
import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch


def part_of_file(given: np.ndarray | None, value: torch.Tensor) -> str | None:
    """Names the part of a file of this machine that a value is; None for others.

    Processes that have the same part need not read all of it to compare it.

    Args:
        given: an array that `value` may have the memory of.
        value: the value.
    """
    if given is None or value.device.type != "cpu":
        return None
    strides = tuple(stride * value.element_size() for stride in value.stride())
    own = value.data_ptr(), tuple(value.shape), strides
    if own != (given.ctypes.data, given.shape, given.strides):
        return None
    base: Any = given
    while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
        base = base.base
    if not isinstance(base, np.memmap) or base.filename is None:
        return None
    about = os.stat(base.filename)
    place = base.offset + given.ctypes.data - base.ctypes.data
    file = about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns
    return f"{_machine()} {file} {place} {given.dtype} {own[1:]}"


@functools.cache
def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return str(uuid.getnode())


def in_order_of_memory(value: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The axes of a value in the order of its memory, and a view with this order."""
    strides = value.stride()
    order = sorted(range(value.dim()), key=lambda axis: -strides[axis])
    return order, value.permute(order)


@torch.no_grad()
def copy_values(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copies values as `target.copy_(source)`, which is slow from a part of a matrix.

    Files of other libraries have kernels that are transposed. A part of one is copied
    as it is in memory, and then transposed in blocks, as Torch does with a matrix.

    Args:
        target: a contiguous tensor.
        source: a tensor of its shape.
    """
    order, in_memory = in_order_of_memory(source)
    axes = list(range(source.dim()))
    first = order[0] if order else 0
    if not first or order != axes[first:] + axes[:first] or not source.numel():
        target.copy_(source)
        return
    columns = math.prod(source.shape[:first])
    rows = in_memory.to(target.dtype).contiguous().view(-1, columns)
    target.view(columns, -1).copy_(rows.t())
