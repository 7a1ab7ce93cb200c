"""Shapes of results that PyTorch's fake tensors leave open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keras_strategies.engines.torch.row_proofs.value_placements import Shape

Shapes = list[tuple[Shape, torch.dtype]]


def result_shapes(name: str, args: Sequence[Any]) -> Shapes | None:
    """The shapes and dtypes of an operation's results; None if values decide them.

    Args:
        name: the operation's name in ATen.
        args: its positional arguments.
    """
    if name == "_ctc_loss":
        return _of_ctc_loss(args[0], args[1])
    if name == "linalg_lstsq":
        return _of_least_squares(args[0], args[1])
    return None


def _of_ctc_loss(log_probs: torch.Tensor, targets: torch.Tensor) -> Shapes | None:
    """Losses, and what the gradient needs, of the length of the longest target."""
    if log_probs.dim() != 3 or targets.dim() != 2:
        return None
    length, rows, _ = log_probs.shape
    states = 2 * targets.shape[1] + 1
    return [((rows,), log_probs.dtype), ((rows, length, states), log_probs.dtype)]


def _of_least_squares(a: torch.Tensor, b: torch.Tensor) -> Shapes | None:
    """Solutions, residuals, ranks and singular values.

    With more equations than unknowns there are residuals only where all matrices have
    full rank.
    """
    equations, unknowns = a.shape[-2:]
    if equations > unknowns or b.dim() != a.dim():
        return None
    batch = tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    return [
        ((*batch, unknowns, b.shape[-1]), a.dtype),
        ((0,), a.dtype),
        (tuple(a.shape[:-2]), torch.int64),
        ((0,), a.dtype),
    ]
