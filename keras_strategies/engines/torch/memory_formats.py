"""Memory formats of tensors, such as channels last, that packs and stacks lose."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def in_format_of(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor with its axes in memory in the order of another one's.

    Values and shape stay the same, so that it does not matter whether two workers have
    the same format.

    Args:
        tensor: the tensor.
        like: a tensor of the same rank, but not always of the same shape.

    >>> like = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    >>> in_format_of(torch.zeros(9, 3, 4, 5), like).stride()
    (60, 1, 15, 3)
    """
    return in_axis_order(tensor, axis_order(like))


def axis_order(tensor: torch.Tensor) -> list[int] | None:
    """The axes of a tensor from the outermost one in memory; None for their order."""
    if tensor.is_contiguous():
        return None
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def axis_orders(tensors: Iterable[torch.Tensor]) -> list[list[int] | None]:
    """That of each tensor; see `axis_order`."""
    return [None if each.is_contiguous() else axis_order(each) for each in tensors]


def in_axis_order(tensor: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    """A tensor with its axes in memory in an order of `axis_order`."""
    if order is None:
        return tensor
    inverse = [order.index(axis) for axis in range(len(order))]
    return tensor.permute(order).contiguous().permute(inverse)
