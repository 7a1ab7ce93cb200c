"""Tensors for more rows than a replica has, in the memory format of its own."""

from __future__ import annotations

from typing import Any

import torch

from keras_strategies.runtime.random_numbers.row_draws import OwnRows


def padded_rows(value: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """A tensor with own rows, and with ones for the others."""
    if rows.own == rows.total:
        return value
    all_rows = uninitialized_rows(value, rows.total).fill_(1)
    before, after = rows.before, rows.total - rows.before - rows.own
    if not value.requires_grad:
        all_rows.narrow(0, before, rows.own).copy_(value)
        return all_rows
    return torch.cat([all_rows[:before], value, all_rows[len(all_rows) - after :]])


def uninitialized_rows(like: torch.Tensor, count: int) -> Any:
    """An empty tensor for some rows, with axes in memory in the same order.

    Numbers are drawn in the order of memory.
    """
    shape = (count, *like.shape[1:])
    strides = like.stride()
    order = sorted(range(like.ndim), key=lambda i: (-strides[i], i))
    all_rows = torch.empty(
        [shape[i] for i in order], dtype=like.dtype, device=like.device
    )
    return all_rows.permute([order.index(i) for i in range(like.ndim)])
