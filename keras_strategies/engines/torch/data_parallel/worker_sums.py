"""Sums of gradients over workers, sent during the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.engines.torch.memory_formats import axis_order, in_axis_order
from keras_strategies.engines.torch.worker_collectives import TorchWorkers
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
    packs in the same order, in whatever order gradients are computed. The gradients of
    a single replica are moved to their pack when they are computed, so that both are
    never in memory, as with DDP's `gradient_as_bucket_view`.

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
        places = self._workers.packs(tensors)
        self._packs = [
            GradientPack([self._order[place] for place in pack], self._targets, ops)
            for pack in places
        ]
        if self._packs:
            # Flags of variables without gradient, which are known at the end: this pack
            # is sent after the backward pass, all others in it.
            self._packs[-1].flags = len(self._order)
        self._pack_of = {i: pack for pack in self._packs for i in pack.members}
        self._missing = {
            i: sum(local is not None for local in self._targets[i].locals)
            for i in self._order
        }
        self._found: dict[int, list[torch.Tensor | None]] = {
            i: [None] * len(row_split.sizes) for i in self._order
        }
        self._is_alone = len(row_split.sizes) == 1 and reduction is None
        self._lock = threading.Lock()
        self._sent: list[Callable[[], None]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> WorkerSums:
        for i in self._order:
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

    def _hook(self, i: int, replica_id: int) -> Callable[[torch.Tensor], Any]:
        def arrived(gradient: torch.Tensor) -> torch.Tensor | None:
            with self._lock:
                placed = None
                if self._is_alone:
                    placed = self._pack_of[i].place(i, gradient)
                self._found[i][replica_id] = gradient if placed is None else placed
                self._missing[i] -= 1
                while len(self._sent) < len(self._packs) - 1 and not any(
                    self._missing[j] for j in self._packs[len(self._sent)].members
                ):
                    self._send()
                return placed

        return arrived

    def _send(self) -> None:
        pack = self._packs[len(self._sent)]
        left = [i for i in pack.members if not pack.has(i)]
        own = sums_on_worker(
            self._ops,
            [self._targets[i] for i in left],
            [self._found[i] for i in left],
            self._reduction,
        )
        for i, total in zip(left, own, strict=True):
            pack.put(i, total)
        if pack.flags:
            pack.put_flags(
                [
                    float(any(part is not None for part in self._found[i]))
                    for i in self._order
                ]
            )
        self._sent.append(self._workers.start_all_reduce(ReduceOp.SUM, pack.flat))

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
        totals: dict[int, torch.Tensor] = {}
        for pack, finish in zip(self._packs, self._sent, strict=True):
            finish()
            totals.update(pack.gradients())
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
        if self._packs:
            counts = self._packs[-1].found_flags()
            for i, count in zip(self._order, counts, strict=True):
                if count:
                    results[i] = self._targets[i].rounded(self._ops, totals[i])
        return results


class GradientPack:
    """The memory of the gradients that are sent in one message.

    It is reserved when the first of them arrives.

    Args:
        members: the places of the variables, of one dtype and device.
        targets: all variables and inputs that receive gradients.
        ops: the functions of tensors.
    """

    def __init__(
        self,
        members: Sequence[int],
        targets: Sequence[GradientTarget],
        ops: TensorPrimitives,
    ):
        self.members = list(members)
        #: int, the number of flags behind the gradients.
        self.flags = 0
        self._shapes = {i: targets[i].tensor.shape for i in members}
        self._like = targets[self.members[0]].tensor
        self._ops = ops
        self._flat: torch.Tensor | None = None
        self._views: dict[int, torch.Tensor] = {}
        # The axes in memory of the gradients that have arrived.
        self._orders: dict[int, list[int] | None] = {}

    @property
    def flat(self) -> torch.Tensor:
        """The message, of shape `(numbers,)`."""
        return self._reserve()

    def _reserve(self) -> torch.Tensor:
        if self._flat is None:
            sizes = [shape.numel() for shape in self._shapes.values()]
            # Half precision is summed in float32.
            dtype = self._ops.widened(self._like.new_empty(0)).dtype
            count = sum(sizes) + self.flags
            self._flat = torch.empty(count, dtype=dtype, device=self._like.device)
            parts = self._flat[: sum(sizes)].split(sizes)
            for (i, shape), part in zip(self._shapes.items(), parts, strict=True):
                self._views[i] = part.view(shape)
        return self._flat

    def has(self, i: int) -> bool:
        """Whether the gradient of a variable is in the pack."""
        return i in self._orders

    def place(self, i: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Moves a gradient to the pack.

        Returns:
            Its new place, with which its old one is free; None, without a change, if it
            is of another dtype or device, or sparse.
        """
        flat = self.flat
        is_dense = gradient.layout is torch.strided
        if not is_dense or (gradient.dtype, gradient.device) != (
            flat.dtype,
            flat.device,
        ):
            return None
        self.put(i, gradient)
        return self._views[i]

    def put(self, i: int, total: torch.Tensor | None) -> None:
        """Writes a gradient of this worker, None for zeros, into the pack."""
        self._reserve()
        with torch.no_grad():
            if total is None:
                self._views[i].zero_()
            else:
                self._views[i].copy_(total)
        self._orders[i] = None if total is None else axis_order(total)

    def put_flags(self, flags: Sequence[float]) -> None:
        """Writes the flags of this worker."""
        with torch.no_grad():
            self.flat[-self.flags :].copy_(torch.tensor(flags, dtype=self.flat.dtype))

    def found_flags(self) -> list[float]:
        """The sums of the flags of all workers."""
        found: list[float] = self.flat[-self.flags :].tolist()
        return found

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients, as views of the pack, or copies in their memory formats."""
        return {
            i: in_axis_order(view, self._orders[i]) for i, view in self._views.items()
        }
