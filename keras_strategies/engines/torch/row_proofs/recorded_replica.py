"""The replica of a call that is recorded, and the results of its collectives."""

from __future__ import annotations

import functools
from typing import Any

import torch

from keras_strategies.engines.torch.row_proofs.call_recorder import CallRecorder
from keras_strategies.runtime.context import ReplicaContext
from keras_strategies.runtime.engine import StrategyCore
from keras_strategies.runtime.row_proofs.proof_replica import (
    MarkedCollectives,
    gathered_size,
)


def recorded_replica(
    strategy: StrategyCore,
    recorder: CallRecorder,
    rows: int,
    total: int,
    replicas: int,
) -> ReplicaContext:
    """The replica of a recorded call.

    Args:
        strategy: the strategy.
        recorder: the recorder of the call.
        rows: int, the number of rows of the recorded call.
        total: int, those of all replicas.
        replicas: int, how many replicas have rows.
    """

    def gathered(tensor: torch.Tensor, axis: int, are_equal: bool) -> Any:
        shape = list(tensor.shape)
        own = None if are_equal else rows
        shape[axis] = gathered_size(shape[axis], own, total, replicas)
        return _Collective.apply(recorder, tensor, torch.Size(shape))

    def merged(result: Any) -> Any:
        recorder.reject("it makes a `merge_call`")
        return result

    def note_read(name: str) -> None:
        if name == "replica_id_in_sync_group":
            recorder.reject("it reads the number of its replica")

    collectives = MarkedCollectives(
        lambda tensor: _Collective.apply(recorder, tensor, tensor.shape),
        gathered,
        merged,
        lambda fn: functools.partial(_WithGradient.apply, fn),
    )
    return ReplicaContext(strategy, 0, collectives, 2, note_read, is_proof=True)


class _Collective(torch.autograd.Function):
    """A collective; its gradient is one too."""

    @staticmethod
    def forward(ctx, recorder, tensor, shape):  # type: ignore[no-untyped-def]
        ctx.recorder, ctx.shape = recorder, tensor.shape
        # In the backward pass it adds gradients, which have weights there.
        name = "collective" if recorder.is_forward else "collective_gradient"
        return recorder.add_marked(name, tensor, tuple(shape))

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        recorder = ctx.recorder
        found = recorder.add_marked("collective_gradient", gradient, tuple(ctx.shape))
        return None, found, None


class _WithGradient(torch.autograd.Function):
    """A function that defines its own gradient."""

    @staticmethod
    def forward(ctx, fn, tensor):  # type: ignore[no-untyped-def]
        results, ctx.gradient = fn(tensor)
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        return None, ctx.gradient(*gradients)
