"""Values that a replica reads after an assignment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def assigned_value(
    variable: Any, read: Callable[[], torch.Tensor], value: torch.Tensor
) -> torch.Tensor:
    """The value that is read after an assignment; see `ReplicaState`.

    It has memory of its own: the variable's changes when assignments are merged, before
    the backward pass. The gradient of a trained variable stays that of the variable.

    Args:
        variable: the variable.
        read: returns its value before.
        value: the new value.
    """
    current = read()
    if not current.requires_grad:
        return value.detach().clone()
    # Also if it is assigned without gradients, and read with them.
    with torch.enable_grad():
        found: torch.Tensor = _Assigned.apply(current, value.detach())
        return found


class _Assigned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, current, value):  # type: ignore[no-untyped-def]
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None
