"""Sums of gradients over workers, sent during the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.engines.torch.worker_collectives import Pack, TorchWorkers
from keras_strategies.runtime.data_parallel.gradient_boundary import (
    GradientTarget,
    largest_over_workers,
    sums_on_worker,
)
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.types import ReduceOp


class WorkerSums:
    """Sums gradients over workers during the backward pass.

    Gradients are sent in packs, those of the last layers first, as in Li et al.,
    "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020). A
    pack is sent when the local replicas have all of its gradients. All workers send
    packs in the same order, in whatever order gradients are computed.

    A context manager around the backward pass.

    Args:
        ops: the functions of tensors.
        targets: the variables and inputs that receive gradients.
        row_split: the rows of the call.
        reduction: the strategy's `CrossDeviceOps`, None for torch's own sums.
    """

    def __init__(
        self,
        ops: TensorPrimitives,
        targets: Sequence[GradientTarget],
        row_split: RowSplit,
        reduction: LocalReduction | None = None,
    ):
        self._ops = ops
        self._reduction = reduction
        self._targets = list(targets)
        self._row_split = row_split
        assert isinstance(row_split.workers, TorchWorkers)
        self._workers = row_split.workers
        # The gradients of the last layers are computed first.
        self._order = [
            i
            for i, target in enumerate(targets)
            if not target.by_rows and not target.is_overwritten
        ]
        self._order.reverse()
        tensors = [self._targets[i].tensor for i in self._order]
        self._packs = [
            [self._order[place] for place in places]
            for places in self._workers.packs(tensors)
        ]
        # Sent during the backward pass: all packs but the last. It also has the flags
        # of variables without gradient, which are known at the end.
        self._early = [i for pack in self._packs[:-1] for i in pack]
        self._missing = {
            i: sum(local is not None for local in self._targets[i].locals)
            for i in self._early
        }
        self._found: dict[int, list[torch.Tensor | None]] = {
            i: [None] * len(row_split.sizes) for i in self._order
        }
        self._lock = threading.Lock()
        self._sent: list[tuple[Pack, Callable[[], None]]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> WorkerSums:
        for i in self._early:
            for replica_id, local in enumerate(self._targets[i].locals):
                if local is not None:
                    hook = self._hook(i, replica_id)
                    self._hooks.append(local.register_hook(hook))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, i: int, replica_id: int) -> Callable[[torch.Tensor], None]:
        def arrived(gradient: torch.Tensor) -> None:
            with self._lock:
                self._found[i][replica_id] = gradient
                self._missing[i] -= 1
                while len(self._sent) < len(self._packs) - 1 and not any(
                    self._missing[j] for j in self._packs[len(self._sent)]
                ):
                    self._send()

        return arrived

    def _send(self) -> None:
        pack = self._packs[len(self._sent)]
        tensors = []
        own = sums_on_worker(
            self._ops,
            [self._targets[i] for i in pack],
            [self._found[i] for i in pack],
            self._reduction,
        )
        for i, total in zip(pack, own, strict=True):
            if total is None:
                total = self._ops.widened(torch.zeros_like(self._targets[i].tensor))
            tensors.append(total)
        if len(self._sent) == len(self._packs) - 1:
            flags = [
                float(any(part is not None for part in self._found[i]))
                for i in self._order
            ]
            tensors.append(tensors[-1].new_tensor(flags))
        packed = Pack(tensors)
        finish = self._workers.start_all_reduce(ReduceOp.SUM, packed.flat)
        self._sent.append((packed, finish))

    def gradients(
        self, columns: Sequence[Sequence[torch.Tensor | None]]
    ) -> list[torch.Tensor | None]:
        """The gradients of the targets, from all workers.

        Args:
            columns: for each target the gradient of each local replica.
        """
        for i in self._order:
            self._found[i] = list(columns[i])
        while len(self._sent) < len(self._packs):
            self._send()
        totals: list[torch.Tensor] = []
        for packed, finish in self._sent:
            finish()
            totals += packed.tensors()
        results: list[torch.Tensor | None] = [None] * len(self._targets)
        for i, target in enumerate(self._targets):
            if target.by_rows:
                own = target.joined_rows(self._ops, columns[i])
                if target.apart is not None:
                    results[i] = own
                    continue
                if own is None:
                    own = torch.zeros_like(self._row_split.own(target.tensor))
                results[i] = self._row_split.joined(own)
            elif target.is_overwritten:
                [results[i]] = sums_on_worker(self._ops, [target], [columns[i]], None)
        largest_over_workers(self._targets, results, self._workers)
        # Before anything depends on a value: sums of an aborted collective are partial.
        self._workers.confirm()
        if totals:
            *totals, flags = totals
            counts = flags.tolist()
            for i, total, count in zip(self._order, totals, counts, strict=True):
                results[i] = (
                    self._targets[i].rounded(self._ops, total) if count else None
                )
        return results
