"""The replica of a call that is recorded, and the results of its collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_strategies.engines.torch.row_proofs.call_recorder import CallRecorder
from keras_strategies.runtime.engine import StrategyCore
from keras_strategies.runtime.replicas.collectives import (
    MergeArguments,
    call_merged,
)
from keras_strategies.runtime.row_proofs.proof_replica import (
    MarkedCollectives,
    ProofReplica,
)


class RecordedCollectives(MarkedCollectives):
    """Collectives whose results are equal on all replicas, and gradients likewise.

    Args:
        recorder: the recorder of the call.
        rows: int, the number of rows of the recorded call.
        total: int, those of all replicas.
        replicas: int, how many replicas have rows.
    """

    def __init__(self, recorder: CallRecorder, rows: int, total: int, replicas: int):
        super().__init__(self._marked, _WithGradient.apply)
        self.recorder = recorder
        self._rows = rows
        self._total = total
        self._replicas = replicas

    def _marked(self, tensor: torch.Tensor) -> Any:
        return _Collective.apply(self, tensor, tensor.shape)

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int
    ) -> Sequence[Any]:
        return [self._gathered(tensor, axis) for tensor in tensors]

    def all_gather_equal(self, replica: int, tensors: Sequence[Any]) -> Sequence[Any]:
        return [
            self._of_shape(
                tensor, (self._replicas * tensor.shape[0], *tensor.shape[1:])
            )
            for tensor in tensors
        ]

    def _gathered(self, tensor: torch.Tensor, axis: int) -> Any:
        shape = list(tensor.shape)
        if shape[axis] % self._rows == 0:
            shape[axis] = shape[axis] // self._rows * self._total
        else:
            shape[axis] *= self._replicas
        return self._of_shape(tensor, shape)

    def _of_shape(self, tensor: torch.Tensor, shape: Sequence[int]) -> Any:
        return _Collective.apply(self, tensor, torch.Size(shape))

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        self.recorder.reject("it makes a `merge_call`")
        return call_merged(merge, [arguments])[0]


class _Collective(torch.autograd.Function):
    """A collective; its gradient is one too."""

    @staticmethod
    def forward(ctx, collectives, tensor, shape):  # type: ignore[no-untyped-def]
        ctx.collectives, ctx.shape = collectives, tensor.shape
        recorder = collectives.recorder
        # In the backward pass it adds gradients, which have weights there.
        name = "collective" if recorder.is_forward else "collective_gradient"
        return recorder.add_marked(name, tensor, tuple(shape))

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        recorder = ctx.collectives.recorder
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


class RecordedReplica(ProofReplica):
    """The replica of a recorded call.

    Args:
        strategy: the strategy.
        collectives: its collectives.
    """

    def __init__(self, strategy: StrategyCore, collectives: RecordedCollectives):
        super().__init__(strategy, collectives)
        self._recorded = collectives

    @property
    def replica_id_in_sync_group(self) -> int:
        self._recorded.recorder.reject("it reads the number of its replica")
        return super().replica_id_in_sync_group
