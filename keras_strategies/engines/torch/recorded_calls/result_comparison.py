"""Comparison of a recording with the call that it was made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def has_results(
    run: Callable[..., Any], inputs: Sequence[Any], expected: Sequence[torch.Tensor]
) -> bool:
    """Whether a recording has the results of the recorded call."""
    try:
        return all(map(_is_equal, run(*inputs), expected))
    except torch.OutOfMemoryError:  # The activations of both calls are in memory.
        return False


def _is_equal(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether values are equal bit by bit, and have equal graphs of gradients."""
    return (
        found.dtype == expected.dtype
        and torch.equal(found, expected)
        and _gradient_graph(found) == _gradient_graph(expected)
    )


def _gradient_graph(tensor: torch.Tensor) -> list[Any]:
    """The functions of a tensor's gradient and their inputs, from the last one."""
    if tensor.grad_fn is None:
        return [tensor.requires_grad]
    numbers = {tensor.grad_fn: 0}
    found = []
    for function in (waiting := [tensor.grad_fn]):
        edges = []
        for other, output in function.next_functions:
            if other is not None and other not in numbers:
                numbers[other] = len(numbers)
                waiting.append(other)
            edges.append((None if other is None else numbers[other], output))
        variable = getattr(function, "variable", None)
        found.append((function.name(), id(variable), edges))
    return found
