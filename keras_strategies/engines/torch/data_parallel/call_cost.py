"""Cost of a layer call, to decide whether to split it.

Replicas are threads that share the Python interpreter, and each kernel launch holds its
lock. On one device a call of many small kernels is therefore faster unsplit;
`runtime/data_parallel/arithmetic.py` defines the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from keras_strategies.engines.torch.compat import TorchDispatchMode
from keras_strategies.runtime.data_parallel.arithmetic import Arithmetic

_aten = torch.ops.aten
# Torch's formulas, and kernels for CPUs that compute the same as others.
_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    _aten._int_mm: flop_registry[_aten.mm],
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        _aten._scaled_dot_product_flash_attention
    ],
}


@dataclass(frozen=True)
class CallCost:
    """The forward pass of a layer.

    Args:
        flops_per_row: float, floating-point operations for one row of the batch.
        kernels: int, tensor operations that are dispatched, however many rows.
    """

    flops_per_row: float
    kernels: int

    def worth_splitting(self, rows: int, replicas: int) -> bool:
        """Whether each replica's kernels outweigh the interpreter."""
        found = Arithmetic(self.flops_per_row * rows, self.kernels)
        return found.worth_splitting(replicas)


class _Counter(TorchDispatchMode):
    """Counts kernels and floating-point operations as they are dispatched.

    `torch.utils.flop_counter.FlopCounterMode` would count them too, but hooks into the
    autograd graph of each `torch.nn.Module` that is called, and fails without gradients
    where a layer takes or returns a variable itself, as tied embeddings do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.flops = 0

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.kernels += 1
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


def measure(call: Callable[[], int]) -> CallCost:
    """Counts the operations of a call on a few rows.

    Args:
        call: calls the layer on a few rows without changing its state, and returns
            the number of rows.
    """
    counter = _Counter()
    with torch.no_grad(), counter:
        rows = call()
    return CallCost(counter.flops / rows, counter.kernels)
