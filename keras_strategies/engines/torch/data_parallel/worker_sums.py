"""Sums of gradients over workers, sent during the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from keras_strategies.engines.torch.memory_formats import (
    axis_order,
    axis_orders,
    in_axis_order,
)
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.runtime.data_parallel.gradient_boundary import (
    GradientTarget,
    largest_over_workers,
    sums_on_worker,
)
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.types import ReduceOp

if TYPE_CHECKING:
    from keras_strategies.engines.torch.model_parallel.packed_weights import (
        PackedWeights,
    )
    from keras_strategies.engines.torch.model_parallel.shards import ShardLayout

_NO_LAYOUTS: Mapping[int, ShardLayout] = {}


class WorkerSums:
    """Sums gradients over workers during the backward pass.

    Gradients are sent in packs, those of the last layers first, as in Li et al.,
    "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (2020). A
    pack is sent when the local replicas have all of its gradients. All workers send
    packs in the same order, in whatever order gradients are computed. The gradients of
    a single replica are moved to their pack when they are computed, so that both are
    never in memory, as with DDP's `gradient_as_bucket_view`. The last pack is sent
    after the backward pass, with all of its gradients moved at once.

    A context manager around the backward pass.

    Args:
        ops: the functions of tensors.
        targets: the variables and inputs that receive gradients.
        row_split: the rows of the call.
        shards: the variables of which each worker has a shard; None without any. Each
            receives the gradient of its shard only.
    """

    def __init__(
        self,
        ops: TensorPrimitives,
        targets: Sequence[GradientTarget],
        row_split: RowSplit,
        shards: PackedWeights | None = None,
    ):
        self._ops = ops
        self._shards = shards
        self._targets = list(targets)
        self._row_split = row_split
        assert isinstance(row_split.workers, TorchCommunicator)
        self._workers = row_split.workers
        # The gradients of the last layers are computed first.
        self._order = [
            i
            for i, target in enumerate(targets)
            if not target.by_rows and not target.is_overwritten
        ]
        self._order.reverse()
        self._packs = self._in_packs()
        if self._packs:
            # Flags of variables without gradient, which are known at the end: this pack
            # is sent after the backward pass, all others in it.
            self._packs[-1].flags = len(self._order)
        self._pack_of = {i: pack for pack in self._packs for i in pack.members}
        # Those that are looked at when they arrive: of packs that are sent in the
        # backward pass, or of which this worker keeps its part only.
        packs = self._packs if shards is not None else self._packs[:-1]
        self._watched = [i for pack in packs for i in pack.members]
        for i in self._watched:
            self._pack_of[i].awaited += len(_present(self._targets[i].locals))
        self._found: dict[int, list[torch.Tensor | None]] = {
            i: [None] * len(row_split.sizes) for i in self._watched
        }
        self._is_alone = len(row_split.sizes) == 1
        self._lock = threading.Lock()
        # Of the packs that have been sent.
        self._count = 0
        # For each gradient in packs 1.0 if this worker has it.
        self._flags: Sequence[float] = ()
        self._hooks: list[Any] = []

    def _in_packs(self) -> list[GradientPack]:
        """The packs, in the order in which their gradients are complete."""
        shards, targets = self._shards, self._targets
        if shards is None:
            return self._packs_of(self._order)
        found = {i: shards.layout(targets[i].variable) for i in self._order}
        layouts = {i: layout for i, layout in found.items() if layout is not None}
        packs = self._packs_of([i for i in self._order if i not in layouts])
        packs += self._packs_of([*layouts], shards, layouts)
        places = {i: place for place, i in enumerate(self._order)}
        return sorted(packs, key=lambda pack: max(places[i] for i in pack.members))

    def _packs_of(self, members: list[int], *shards: Any) -> list[GradientPack]:
        tensors = [self._targets[i].tensor for i in members]
        found = self._workers.packs(tensors, are_sharded=bool(shards))
        return [
            GradientPack(
                [members[place] for place in pack], self._targets, self._ops, *shards
            )
            for pack in found
        ]

    def __enter__(self) -> WorkerSums:
        for i in self._watched:
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
                pack = self._pack_of[i]
                placed = pack.place(i, gradient) if self._is_alone else None
                self._found[i][replica_id] = gradient if placed is None else placed
                pack.awaited -= 1
                while (
                    self._count < len(self._packs) - 1
                    and not self._packs[self._count].awaited
                ):
                    self._send()
                return placed

        return arrived

    def _send(self) -> None:
        pack = self._packs[self._count]
        left = pack.missing()
        if self._is_alone:
            own = [self._found[i][0] for i in left]
        else:
            own = sums_on_worker(
                self._ops,
                [self._targets[i] for i in left],
                [self._found[i] for i in left],
            )
        flags: list[float] = []
        if pack.flags:
            flags = [
                float(first is not None or bool(_present(others)))
                for first, *others in map(self._found.__getitem__, self._order)
            ]
            self._flags = flags
        pack.put_all(left, own, flags)
        pack.begin(self._workers)
        if self._shards is not None and self._count:
            # The gradients of one pack are in memory while another one is sent.
            self._packs[self._count - 1].finish()
        self._count += 1

    def gradients(
        self, columns: Sequence[Sequence[torch.Tensor | None]]
    ) -> list[torch.Tensor | None]:
        """The gradients of the targets, from all workers.

        Args:
            columns: for each target the gradient of each local replica.
        """
        for i in self._order:
            self._found[i] = list(columns[i])
        while self._count < len(self._packs):
            self._send()
        totals: dict[int, torch.Tensor] = {}
        for pack in self._packs:
            pack.finish()
            totals.update(pack.gradients())
        results: list[torch.Tensor | None] = [None] * len(self._targets)
        for i, target in enumerate(self._targets):
            if target.by_rows:
                own = target.joined_rows(self._ops, columns[i])
                if target.as_row_parts is not None:
                    results[i] = own
                    continue
                if own is None:
                    own = torch.zeros_like(self._row_split.own(target.tensor))
                results[i] = self._row_split.joined(own)
            elif target.is_overwritten:
                [results[i]] = sums_on_worker(self._ops, [target], [columns[i]])
        largest_over_workers(self._targets, results, self._workers)
        if self._shards is not None:
            for i, target in enumerate(self._targets):
                if target.is_overwritten and self._shards.is_in_shards(target.tensor):
                    largest = results[i]
                    assert largest is not None
                    results[i] = self._shards.shards_of(largest, target.tensor)
        self._workers.use_unconfirmed()
        if self._packs:
            # The host waits for the flags of others only where it has no gradient.
            counts = self._flags
            if not all(counts):
                counts = self._packs[-1].found_flags()
            for i, count in zip(self._order, counts, strict=True):
                if count:
                    total = self._targets[i].rounded(self._ops, totals[i])
                    if self._shards is not None:
                        total = self._pack_of[i].gradient(i, total)
                    results[i] = total
        return results


def _present(parts: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [part for part in parts if part is not None]


class GradientPack:
    """The memory of the gradients that are sent in one message.

    It is reserved when the first of them arrives. Gradients come without graphs.

    Args:
        members: the places of the variables, of one dtype and device.
        targets: all variables and inputs that receive gradients.
        ops: the functions of tensors.
        shards: of variables of which each worker has a shard, and receives its part of
            the gradient; None for others.
        layouts: of variables in shards.
    """

    def __init__(
        self,
        members: Sequence[int],
        targets: Sequence[GradientTarget],
        ops: TensorPrimitives,
        shards: PackedWeights | None = None,
        layouts: Mapping[int, ShardLayout] = _NO_LAYOUTS,
    ):
        self.members = list(members)
        #: int, the number of flags behind the gradients.
        self.flags = 0
        #: int, how many gradients of local replicas have not arrived.
        self.awaited = 0
        self._tensors = {i: targets[i].tensor for i in members}
        self._ops = ops
        self._shards = shards
        self._layouts = layouts
        self._parts = 1
        self._shapes = {i: tensor.shape for i, tensor in self._tensors.items()}
        if shards is not None:
            self._parts = layouts[self.members[0]].count
            self._shapes = {i: torch.Size(layouts[i].own_shape) for i in members}
        self._sizes = [shape.numel() for shape in self._shapes.values()]
        # The zeros that stand for gradients that have been moved to the pack.
        self._zero: torch.Tensor | None = None
        # The message, of shape `(parts, numbers)`.
        self._flat: torch.Tensor | None = None
        self._views: dict[int, torch.Tensor] = {}
        # The part of this worker, of shape `(numbers,)`.
        self._own: torch.Tensor | None = None
        self._wait: Callable[[], None] | None = None
        # The axes in memory of the gradients that have arrived.
        self._orders: dict[int, list[int] | None] = {}

    @property
    def flat(self) -> torch.Tensor:
        """The message, of shape `(parts, numbers)`, which is freed when it is sent."""
        if self._flat is None:
            first = self._tensors[self.members[0]]
            # Half precision is summed in float32.
            like = torch.empty(0, dtype=first.dtype, device=first.device)
            self._flat = torch.empty(
                (self._parts, sum(self._sizes) + self.flags),
                dtype=self._ops.widened(like).dtype,
                device=like.device,
            )
            parts = self._flat[:, : sum(self._sizes)].split(self._sizes, 1)
            for (i, shape), part in zip(self._shapes.items(), parts, strict=True):
                layout = self._layouts.get(i)
                self._views[i] = (
                    part.view(shape) if layout is None else layout.split(part)
                )
        return self._flat

    def _view(self, i: int) -> torch.Tensor:
        """The place of a gradient in the message."""
        if self._flat is None:
            assert self.flat is not None
        return self._views[i]

    def missing(self) -> list[int]:
        """The places of the variables without a gradient in the pack."""
        return [i for i in self.members if i not in self._orders]

    def place(self, i: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Moves a gradient to the pack.

        Returns:
            Its new place, with which its old one is free; None, without a change, if it
            is of another dtype or device, or sparse. Where the pack is of shards, a
            tensor without memory.
        """
        is_dense = gradient.layout is torch.strided
        if self._shards is not None and is_dense:
            self.put(i, gradient)
            if self._zero is None or self._zero.dtype != gradient.dtype:
                self._zero = gradient.new_zeros(())
            return self._zero.expand(gradient.shape)
        flat = self.flat
        if not is_dense or (gradient.dtype, gradient.device) != (
            flat.dtype,
            flat.device,
        ):
            return None
        self.put(i, gradient)
        return self._view(i)

    def put_all(
        self,
        members: Sequence[int],
        totals: Sequence[torch.Tensor | None],
        flags: Sequence[float],
    ) -> None:
        """Writes gradients as `put` does, and the flags of this worker.

        Those of a whole pack are joined in one operation.
        """
        if len(members) == len(self.members) and self._join(totals, flags):
            return
        for i, total in zip(members, totals, strict=True):
            self.put(i, total)
        if self.flags:
            flat = self.flat
            flat[:, -self.flags :] = torch.tensor(flags, dtype=flat.dtype)

    def _join(
        self, totals: Sequence[torch.Tensor | None], flags: Sequence[float]
    ) -> bool:
        """Makes the message of all gradients, if these are as it needs them."""
        first = self._tensors[self.members[0]]
        kind, device = self._ops.widened(first.detach()[:0]).dtype, first.device
        found: list[torch.Tensor] = []
        for total in totals:
            if (
                self._shards is not None
                or total is None
                or total.layout is not torch.strided
                or total.dtype != kind
                or total.device != device
            ):
                return False
            found.append(total)
        parts = [total.reshape(-1) for total in found]
        if flags:
            parts.append(torch.tensor(flags, dtype=kind, device=device))
        self._flat = torch.cat(parts).unsqueeze(0)
        self._orders = dict(zip(self.members, axis_orders(found), strict=True))
        return True

    def put(self, i: int, total: torch.Tensor | None) -> None:
        """Writes a gradient of this worker, None for zeros, into the pack."""
        place = self._view(i)
        self._orders[i] = None
        if total is None:
            place.zero_()
        elif self._shards is None:
            place.copy_(total)
            self._orders[i] = axis_order(total)
        else:
            place.copy_(total.to_dense().view(place.shape))

    def begin(self, workers: TorchCommunicator) -> None:
        """Begins to send the pack."""
        flat = self.flat
        if self._shards is None:
            self._own = flat[0]
            self._wait = workers.start_all_reduce(ReduceOp.SUM, flat)
        else:
            self._own = flat.new_empty(flat.shape[1])
            self._wait = workers.start_reduce_scatter(self._own, flat)

    def finish(self) -> None:
        """Waits for the sums; the gradients of this worker are freed."""
        if self._wait is not None:
            self._wait()
            self._wait = self._flat = None
            self._views.clear()

    def found_flags(self) -> Sequence[float]:
        """The sums of the flags of all workers."""
        assert self._own is not None
        found: list[float] = self._own[-self.flags :].tolist()
        return found

    def gradients(self) -> dict[int, torch.Tensor]:
        """The gradients, as views of the pack, or copies in their memory formats.

        Of variables in shards those of this worker's shards.
        """
        assert self._own is not None
        parts = self._own[: sum(self._sizes)].split(self._sizes)
        found = {
            i: part.view(shape)
            for (i, shape), part in zip(self._shapes.items(), parts, strict=True)
        }
        for i, order in self._orders.items():
            if order is not None:
                found[i] = in_axis_order(found[i], order)
        return found

    def gradient(self, i: int, own: torch.Tensor) -> Any:
        """The gradient of a variable from what this worker has of it."""
        if self._shards is None:
            return own
        return self._shards.as_shards(own, self._tensors[i])
