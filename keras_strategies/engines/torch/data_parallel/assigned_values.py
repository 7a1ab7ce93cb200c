"""Values that a replica reads after an assignment."""

from __future__ import annotations

import torch


def assigned_value(current: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The new value of a trained variable; its gradient is the variable's.

    Args:
        current: the value of the variable before.
        value: the new value.
    """
    found: torch.Tensor = _Assigned.apply(current, value.detach())
    return found


class _Assigned(torch.autograd.Function):
    @staticmethod
    def forward(ctx, current, value):  # type: ignore[no-untyped-def]
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None
