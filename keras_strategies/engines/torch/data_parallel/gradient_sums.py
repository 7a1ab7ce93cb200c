"""Sums of the gradients of a data-parallel call, over replicas and workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.engines.torch.worker_collectives import Pack, TorchWorkers
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.types import ReduceOp
from keras_strategies.values import DistributedValues


@dataclass
class GradientTarget:
    """A variable or input outside of the replicas that receives a gradient.

    Args:
        tensor: the variable, or an input of the layer.
        locals: the replicas' tensors: copies of the variable (None where a replica did
            not read it) or slices of the input.
        by_rows: bool, whether gradients are concatenated, as for an input, or
            summed, as for a variable.
    """

    tensor: torch.Tensor
    locals: list[torch.Tensor | None]
    by_rows: bool

    def gradient(self, parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The gradient of the tensor, from those of the replicas; sums in float32."""
        device = self.tensor.device
        if self.by_rows and any(part is not None for part in parts):
            return torch.cat(
                [
                    (torch.zeros_like(local) if part is None else part).to(device)
                    for part, local in zip(parts, self.locals, strict=True)
                    if local is not None
                ]
            )
        present = [widened(part.to(device)) for part in parts if part is not None]
        if not present:
            return None
        total = present[0]
        for part in present[1:]:
            total = total + part
        return total

    def rounded(self, total: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of all replicas in the dtype that it has on one device."""
        read = next(local for local in self.locals if local is not None)
        return None if total is None else total.to(read.dtype).to(self.tensor.dtype)


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, in float32 if it is of half precision."""
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    return tensor.float() if is_half else tensor


def in_dtype_of(total: torch.Tensor | None, gradient: Any) -> torch.Tensor | None:
    """A sum, rounded to the dtype of its terms, a tensor or a `PerReplica` of them."""
    is_several = isinstance(gradient, DistributedValues)
    terms = gradient.values if is_several else [gradient]
    dtypes = [term.dtype for term in terms if term is not None]
    return total.to(dtypes[0]) if total is not None and dtypes else total


def local_gradients(
    sources: Sequence[GradientTarget],
    columns: Sequence[Sequence[torch.Tensor | None]],
    reduction: LocalReduction | None,
) -> list[torch.Tensor | None]:
    """The gradient of each source, from those of the local replicas.

    Args:
        sources: what gradients go to.
        columns: for each source the gradient of each replica.
        reduction: the strategy's `CrossDeviceOps`, None for torch's own sums.
    """
    pairs = list(zip(sources, columns, strict=True))
    if reduction is None:
        return [source.gradient(parts) for source, parts in pairs]
    shared = [
        [None if part is None else widened(part) for part in parts]
        for source, parts in pairs
        if not source.by_rows
    ]
    sums = iter(reduction.sums(shared))
    return [
        source.gradient(parts) if source.by_rows else next(sums)
        for source, parts in pairs
    ]


class WorkerSums:
    """Sums gradients over workers during the backward pass.

    Gradients travel in packs, in the order in which the layers' backward passes come,
    as in Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
    Training" (2020). A pack is sent when the local replicas have all of its gradients.
    Packs are sent in one order on all workers, whatever order gradients come in.

    It is entered around the backward pass.

    Args:
        sources: what gradients go to.
        row_split: the rows of the call.
        count: int, the local replicas.
        reduction: the strategy's `CrossDeviceOps`, None for torch's own sums.
    """

    def __init__(
        self,
        sources: Sequence[GradientTarget],
        row_split: RowSplit,
        count: int,
        reduction: LocalReduction | None = None,
    ):
        self._reduction = reduction
        self._sources = list(sources)
        self._row_split = row_split
        assert isinstance(row_split.workers, TorchWorkers)
        self._workers = row_split.workers
        # What a layer computes last has its gradient first.
        self._order = [i for i, source in enumerate(sources) if not source.by_rows]
        self._order.reverse()
        tensors = [self._sources[i].tensor for i in self._order]
        self._packs = [
            [self._order[place] for place in places]
            for places in self._workers.packs(tensors)
        ]
        # The last pack says what is missing, which is known at the end; with a single
        # pack no gradient is waited for.
        self._early = [i for pack in self._packs[:-1] for i in pack]
        self._missing = {
            i: sum(local is not None for local in self._sources[i].locals)
            for i in self._early
        }
        self._found: dict[int, list[torch.Tensor | None]] = {
            i: [None] * count for i in self._order
        }
        self._lock = threading.Lock()
        self._sent: list[tuple[Pack, Callable[[], None]]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> WorkerSums:
        for i in self._early:
            for replica_id, local in enumerate(self._sources[i].locals):
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
        own = local_gradients(
            [self._sources[i] for i in pack],
            [self._found[i] for i in pack],
            self._reduction,
        )
        for i, total in zip(pack, own, strict=True):
            if total is None:
                total = widened(torch.zeros_like(self._sources[i].tensor))
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
        """The gradients of the sources, from all workers.

        Args:
            columns: for each source the gradient of each local replica.
        """
        for i in self._order:
            self._found[i] = list(columns[i])
        while len(self._sent) < len(self._packs):
            self._send()
        totals: list[torch.Tensor] = []
        for packed, finish in self._sent:
            finish()
            totals += packed.tensors()
        results: list[torch.Tensor | None] = [None] * len(self._sources)
        if totals:
            *totals, flags = totals
            counts = flags.tolist()
            for i, total, count in zip(self._order, totals, counts, strict=True):
                results[i] = self._sources[i].rounded(total) if count else None
        for i, source in enumerate(self._sources):
            if source.by_rows:
                own = source.gradient(columns[i])
                if own is None:
                    own = torch.zeros_like(self._row_split.own(source.tensor))
                results[i] = self._row_split.joined(own)
        return results
