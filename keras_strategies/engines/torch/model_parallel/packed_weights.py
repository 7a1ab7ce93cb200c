"""Weights in shards over workers, gathered in packs for data-parallel calls.

As in ZeRO-3 (Rajbhandari et al., 2020) and PyTorch's FSDP (Zhao et al., 2023), a
process has its shards of all weights, and the full values of those that it computes
with. Packs are gathered when a weight of them is read, forward and again backward, and
two are kept. What is kept follows from the order of reads alone, never from when memory
is freed, so that all workers take part in the same collectives.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor, Shard

from keras_strategies.engines.torch.compat import (
    local_shard,
    shards_like,
    version_of,
)
from keras_strategies.engines.torch.model_parallel.called_again import (
    entered_again_by,
)
from keras_strategies.engines.torch.model_parallel.process_mesh import (
    gather_shards,
    in_step,
)
from keras_strategies.engines.torch.model_parallel.saved_weights import (
    SavedWeights,
    check_version,
)
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.keras_compat.models.building import is_built
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import clear_losses
from keras_strategies.keras_compat.state_scope import StatePolicy, StateScope
from keras_strategies.keras_compat.thread_state import outside_stateless_scopes
from keras_strategies.keras_compat.variables.values import autocast_dtype, raw_value
from keras_strategies.types import ReduceOp

# How many packs are kept, the last ones that were read.
_KEPT = 2


class PackedWeights:
    """Gathers the weights in shards of one strategy.

    Args:
        workers: the processes of the mesh, in its order.
        ordinary: makes a context for operations on ordinary tensors.
    """

    def __init__(
        self,
        workers: TorchCommunicator,
        ordinary: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        self.workers = workers
        self.ordinary = ordinary
        # By the axes of the mesh that have shards.
        self._groups: dict[tuple[int, ...], _Groups] = {}
        # For each layer that is called the pack of a variable, by the variable's `id`.
        self._packs: weakref.WeakKeyDictionary[Any, dict[int, list[Any]]] = (
            weakref.WeakKeyDictionary()
        )
        # The values of the packs that were read last, by first variable and dtype.
        self._kept: dict[tuple[int, torch.dtype], dict[int, torch.Tensor]] = {}

    def has(self, variable: Any) -> bool:
        """Whether a variable is in shards."""
        return is_sharded(raw_value(variable))

    def value(self, layer: Any, variable: Any, dtype: torch.dtype) -> torch.Tensor:
        """The full value of a variable in shards, without gradient.

        Args:
            layer: the layer that is called; its weights are gathered in packs.
            variable: the variable.
            dtype: that of the value.
        """
        pack = self._pack_of(layer, variable)
        key = id(pack[0]), dtype
        values = self._kept.pop(key, None)
        if values is None:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            values = self._gathered(pack, dtype)
        self._kept[key] = values
        return values[id(variable)]

    def forget(self) -> None:
        """Frees the values that no operation uses."""
        self._kept.clear()

    def _pack_of(self, layer: Any, variable: Any) -> list[Any]:
        packs = self._packs.setdefault(layer, {})
        if id(variable) not in packs:
            found = [v for v in layer.variables if id(v) not in packs and self.has(v)]
            if not any(each is variable for each in found):
                found.append(variable)
            by_axes: dict[tuple[int, ...], list[Any]] = {}
            for each in found:
                by_axes.setdefault(sharded_axes(raw_value(each)), []).append(each)
            for alike in by_axes.values():
                for pack in self.workers.packs([raw_value(v) for v in alike]):
                    members = [alike[i] for i in pack]
                    packs.update((id(member), members) for member in members)
        return packs[id(variable)]

    @torch.no_grad()
    def _gathered(
        self, pack: Sequence[Any], dtype: torch.dtype
    ) -> dict[int, torch.Tensor]:
        raws = [raw_value(variable) for variable in pack]
        shards = [local_shard(raw) for raw in raws]
        flat = torch.cat([shard.reshape(-1).to(dtype) for shard in shards])
        holders, count = self._groups_of(raws[0]).holders, shard_count(raws[0])
        every = holders.gather_rows(flat, [flat.numel()] * count)
        parts = every.view(count, -1).split([shard.numel() for shard in shards], 1)
        return {
            id(variable): joined_shards(part.view(count, *shard.shape), raw)
            for variable, raw, shard, part in zip(
                pack, raws, shards, parts, strict=True
            )
        }

    def start_sums(
        self, own: torch.Tensor, parts: torch.Tensor, like: DTensor
    ) -> Callable[[], None]:
        """Begins to sum parts of gradients over all workers.

        Args:
            own: receives the sum of this worker's part, of shape `(numbers,)`.
            parts: of shape `(shards, numbers)`, those of this worker's rows.
            like: a variable in such shards.

        Returns:
            A callable that waits.
        """
        groups = self._groups_of(like)
        wait = groups.holders.start_reduce_scatter(own, parts)

        def finish() -> None:
            wait()
            if groups.equals is not None:
                groups.equals.start_all_reduce(ReduceOp.SUM, own)()

        return finish

    def _groups_of(self, like: DTensor) -> _Groups:
        axes = sharded_axes(like)
        if axes not in self._groups:
            mesh = like.device_mesh
            place = mesh.get_coordinate()
            assert place is not None
            others = tuple(i for i in range(mesh.ndim) if i not in axes)
            holders = self._along(mesh, place, axes)
            equals = self._along(mesh, place, others)
            assert holders is not None
            self._groups[axes] = _Groups(holders, equals)
        return self._groups[axes]

    def _along(
        self, mesh: Any, place: Sequence[int], axes: tuple[int, ...]
    ) -> TorchCommunicator | None:
        """The workers with this one's place on other axes; None if it is alone."""
        index = tuple(slice(None) if i in axes else p for i, p in enumerate(place))
        members = mesh.mesh[index].flatten().tolist()
        if len(members) == self.workers.group.count:
            return self.workers
        if len(members) == 1:
            return None
        names = " and ".join(mesh.mesh_dim_names[i] for i in axes)
        return self.workers.among(names, members)

    def of_call(self, layer: Any) -> CallWeights:
        """The weights in a new call of a layer."""
        # Values that a backward pass has left are those of before the update.
        self.forget()
        return CallWeights(self, layer)

    # Calls on all rows.

    def call_on_all_rows(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a layer on all rows in every process, with full values of weights."""
        if not is_built(layer):
            return call(*args, **kwargs)
        weights = self.of_call(layer)
        with self._on_all_rows(weights) as scope, weights.saved():
            outputs = call(*args, **kwargs)
        self.forget()
        clear_losses(layer)
        if scope.losses:
            # Functional models refuse `add_loss` on themselves.
            keras.layers.Layer.add_loss(layer, scope.losses)
        return outputs

    @contextlib.contextmanager
    def _on_all_rows(self, weights: CallWeights) -> Iterator[StateScope]:
        @contextlib.contextmanager
        def again() -> Iterator[None]:
            with layer_calls_through(None), self._on_all_rows(weights):
                yield

        scope = _WholeVariables(weights).scope()
        with entered_again_by(again), scope:
            yield scope

    @staticmethod
    @torch.no_grad()
    def whole(variable: Any) -> torch.Tensor:
        """The full value of a variable, without gradient."""
        return gather_shards(raw_value(variable).detach())  # type: ignore[no-any-return]

    @staticmethod
    def saves(hooks: tuple[Any, Any]) -> bool:
        """Whether `saved_tensors_hooks` are those of a call on all rows."""
        return isinstance(getattr(hooks[0], "__self__", None), SavedWeights)

    @staticmethod
    def value_with_gradient(variable: Any) -> torch.Tensor:
        """The full value of a variable; a gradient of it is that of its shards.

        The gradient is the same in all processes, and can be differentiated again.
        """
        with torch.enable_grad():
            found: torch.Tensor = _Whole.apply(raw_value(variable))
        return found

    @staticmethod
    def in_step() -> contextlib.AbstractContextManager[None]:
        """Entered around steps, in which all processes assign equal values."""
        return in_step()

    @staticmethod
    def shards_of(full: torch.Tensor, like: DTensor) -> DTensor:
        """The shards of a tensor that is equal in all processes."""
        return _Shards.apply(full, like)  # type: ignore[no-any-return]

    @staticmethod
    def in_shards(full: torch.Tensor, like: DTensor) -> torch.Tensor:
        """A view of a tensor as shards; see the function of this name."""
        return in_shards(full, like)

    @staticmethod
    def viewed(flat: torch.Tensor, like: DTensor) -> torch.Tensor:
        """A view of numbers, of shape `(shards, numbers)`, as `in_shards`."""
        own = flat.unflatten(1, local_shard(like).shape)
        return own.unflatten(0, shards_along(like))

    @staticmethod
    def shard_count(like: DTensor) -> int:
        """The number of different shards."""
        return shard_count(like)

    @staticmethod
    def axes(variable: Any) -> tuple[int, ...] | None:
        """The axes of the mesh that have its shards; None without shards."""
        raw = raw_value(variable)
        return sharded_axes(raw) if is_sharded(raw) else None

    @staticmethod
    def as_shards(own: torch.Tensor, like: DTensor) -> DTensor:
        """A tensor of which this process has the shard `own`."""
        return as_shards(own, like)


@dataclass(frozen=True)
class _Groups:
    """Workers that exchange the shards of a variable.

    Args:
        holders: those with all of its shards, each with one.
        equals: those with the same shard as this worker; None if it has it alone.
    """

    holders: TorchCommunicator
    equals: TorchCommunicator | None


class CallWeights:
    """The weights in one call of a layer.

    A replica's copy of a variable in shards, which has its gradient, is a tensor
    without memory of its own: an operation reads a value that is gathered for it.

    Args:
        packed: gathers weights.
        layer: the layer.
    """

    def __init__(self, packed: PackedWeights, layer: Any):
        self._packed = packed
        self._layer = layer
        self._saved = SavedWeights()
        self._copies: dict[int, torch.Tensor] = {}

    def copy(self, variable: Any) -> torch.Tensor:
        """The replica's copy of a variable in shards."""
        raw = raw_value(variable)
        has_gradient = raw.requires_grad and not torch.is_inference_mode_enabled()
        return self._without_memory(raw, raw.dtype, has_gradient)

    def cast(self, copy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Another copy in a dtype, with a separate gradient.

        Returns:
            None if it is not such a copy, or without gradient.
        """
        if id(copy) not in self._copies or not copy.requires_grad:
            return None
        return self._without_memory(copy, dtype, True)

    def _without_memory(
        self, like: torch.Tensor, dtype: torch.dtype, requires_grad: bool
    ) -> torch.Tensor:
        found = torch.zeros((), dtype=dtype, device=like.device).expand(like.shape)
        self._copies[id(found)] = found.requires_grad_(requires_grad)
        return found

    def used(self, variable: Any, copy: torch.Tensor) -> torch.Tensor:
        """What an operation reads from a copy; other tensors are unchanged."""
        if id(copy) not in self._copies:
            return copy
        name = autocast_dtype(variable)
        dtype = copy.dtype if name is None else getattr(torch, name)
        full = self.full(variable, dtype)
        if copy.requires_grad and torch.is_grad_enabled():
            found: torch.Tensor = _Read.apply(copy, full)
            return found
        return full

    def full(self, variable: Any, dtype: torch.dtype) -> torch.Tensor:
        """The full value, which autograd does not keep."""
        raw = raw_value(variable)
        version = version_of(raw)

        def again() -> torch.Tensor:
            check_version(raw, version)
            return self._packed.value(self._layer, variable, dtype)

        full = self._packed.value(self._layer, variable, dtype)
        self._saved.note(full, again)
        return full

    def saved(self) -> contextlib.AbstractContextManager[None]:
        """A context in which autograd keeps no gathered weight."""
        return self._saved.entered()

    def forget(self) -> None:
        """Called after a pass, forward or backward."""
        self._packed.forget()


class _WholeVariables(StatePolicy):
    """Gathered variables in a call on all rows; assignments take effect at once.

    Args:
        weights: those of the call.
    """

    def __init__(self, weights: CallWeights):
        self._weights = weights

    def read(self, variable: Any) -> Any:
        raw = raw_value(variable)
        if not is_sharded(raw):
            return raw
        name = autocast_dtype(variable)
        full = self._weights.full(
            variable, raw.dtype if name is None else getattr(torch, name)
        )
        if raw.requires_grad and torch.is_grad_enabled():
            return _ReadShards.apply(raw, full)
        return full

    def assign(self, variable: Any, value: Any) -> None:
        with outside_stateless_scopes(), torch.no_grad():
            variable.assign(value)


class _Read(torch.autograd.Function):
    """A gathered value; its gradient is that of the replica's copy."""

    @staticmethod
    def forward(ctx: Any, copy: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        ctx.dtype = copy.dtype
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient.to(ctx.dtype), None


class _ReadShards(torch.autograd.Function):
    """A gathered value; its gradient, equal in all processes, is that of its shards."""

    @staticmethod
    def forward(ctx: Any, shards: DTensor, full: torch.Tensor) -> torch.Tensor:
        ctx.shards = shards.detach()
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Shards.apply(gradient.to(ctx.shards.dtype), ctx.shards), None


class _Whole(torch.autograd.Function):
    """The full tensor of shards."""

    @staticmethod
    def forward(ctx: Any, shards: DTensor) -> torch.Tensor:
        ctx.shards = shards.detach()
        return gather_shards(ctx.shards)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Shards.apply(gradient, ctx.shards)


class _Shards(torch.autograd.Function):
    """The shards of a tensor that is equal in all processes."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, like: DTensor) -> DTensor:
        place = like.device_mesh.get_coordinate()
        assert place is not None
        axes = sharded_axes(like)
        own = tuple(p if axis in axes else 0 for axis, p in enumerate(place))
        return as_shards(in_shards(full, like)[own], like)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:  # type: ignore[override]
        return _Whole.apply(gradient), None


def is_sharded(raw: Any) -> bool:
    """Whether processes have shards of a tensor."""
    return isinstance(raw, DTensor)


def sharded_axes(raw: DTensor) -> tuple[int, ...]:
    """The axes of the mesh along which a tensor is in shards."""
    mesh = raw.device_mesh
    return tuple(
        axis
        for axis, placement in enumerate(raw.placements)
        if isinstance(placement, Shard) and mesh.size(axis) > 1
    )


def shards_along(raw: DTensor) -> tuple[int, ...]:
    """For each axis of the mesh the number of different shards."""
    axes, mesh = sharded_axes(raw), raw.device_mesh
    return tuple(mesh.size(axis) if axis in axes else 1 for axis in range(mesh.ndim))


def shard_count(raw: DTensor) -> int:
    """The number of different shards."""
    return math.prod(shards_along(raw))


def joined_shards(parts: torch.Tensor, like: DTensor) -> torch.Tensor:
    """A tensor from its shards.

    Args:
        parts: of shape `(shards, *shape of a shard)`.
        like: a tensor in shards of the same shape.
    """
    found = parts.unflatten(0, shards_along(like))
    for axis, placement in reversed(list(enumerate(like.placements))):
        if isinstance(placement, Shard):
            at = axis + placement.dim
            found = found.movedim(axis, at).flatten(at, at + 1)
        else:
            found = found.squeeze(axis)
    return found


def in_shards(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """A view of a tensor as its shards.

    Args:
        full: the tensor.
        like: a tensor in shards of the same shape.

    Returns:
        Tensor of shape `(*shards along the axes of the mesh, *shape of a shard)`.
    """
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            at = axis + placement.dim
            count = like.device_mesh.size(axis)
            full = full.unflatten(at, (count, -1)).movedim(at, axis)
        else:
            full = full.unsqueeze(axis)
    return full


def as_shards(own: torch.Tensor, like: DTensor) -> Any:
    """A `DTensor` of which each process has a shard.

    Args:
        own: the shard of this process.
        like: a tensor in shards of the same shape.
    """
    return shards_like(own.contiguous().to(like.dtype), like)
