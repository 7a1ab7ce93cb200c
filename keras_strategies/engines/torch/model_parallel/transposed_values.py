"""Values of arrays, which are transposed in memory as those of files may be."""

from __future__ import annotations

import math

import numpy as np
import torch


def tensor_of(value: np.ndarray) -> torch.Tensor | None:
    """A tensor in the memory of an array of floats; None where torch has none."""
    if not value.flags.writeable or min(value.strides, default=0) < 0:
        return None
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.view(np.int16)).view(torch.bfloat16)
    # Keras converts dtypes that torch does not have.
    return torch.from_numpy(value) if value.dtype.kind == "f" else None


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
