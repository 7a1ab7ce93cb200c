"""All-reduce between GPUs of this process by NCCL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.cuda import nccl

from keras_strategies.engines.torch.memory_formats import in_format_of
from keras_strategies.types import ReduceOp

# The numbers of `ncclRedOp_t`.
_NCCL_OPS = {ReduceOp.SUM: 0, ReduceOp.MEAN: 0, ReduceOp.MAX: 2, ReduceOp.MIN: 3}


def nccl_all_reduce(
    op: ReduceOp, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """Reduces tensors by NCCL, each on its own GPU.

    Args:
        op: the reduction.
        tensors: one for each replica, of one shape and dtype.

    Returns:
        The reduction on the GPU of each tensor; None where NCCL does not apply: other
        devices, two tensors on one GPU, integers, or tensors that require a gradient.
    """
    if len({tensor.device for tensor in tensors}) < len(tensors) or not all(
        tensor.is_cuda and tensor.is_floating_point() and not tensor.requires_grad
        for tensor in tensors
    ):
        return None
    inputs = [tensor.contiguous() for tensor in tensors]
    if not nccl.is_available(inputs):
        return None
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    nccl.all_reduce(inputs, outputs, op=_NCCL_OPS[op])
    if op is ReduceOp.MEAN:
        for output in outputs:
            output.div_(len(outputs))
    pairs = zip(outputs, tensors, strict=True)
    return [in_format_of(output, tensor) for output, tensor in pairs]
