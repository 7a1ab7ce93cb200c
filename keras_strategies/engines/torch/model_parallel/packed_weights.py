"""Weights in shards over workers, for data-parallel calls of layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch
from torch.distributed.tensor import DTensor

from keras_strategies.engines.torch.model_parallel.call_weights import CallWeights
from keras_strategies.engines.torch.model_parallel.process_mesh import (
    gather_shards,
    in_step,
)
from keras_strategies.engines.torch.model_parallel.saved_weights import SavedWeights
from keras_strategies.engines.torch.model_parallel.shards import (
    ShardLayout,
    as_shards,
    is_sharded,
    layout_of,
)
from keras_strategies.engines.torch.model_parallel.weight_packs import WeightPacks
from keras_strategies.engines.torch.rematerialization import recomputing_in
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.keras_compat.models.building import is_built
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import clear_losses
from keras_strategies.keras_compat.state_scope import StatePolicy, StateScope
from keras_strategies.keras_compat.thread_state import outside_stateless_scopes
from keras_strategies.keras_compat.variables.values import autocast_dtype, raw_value


class PackedWeights:
    """The weights in shards of one strategy.

    Args:
        workers: the processes, each of which has a shard.
        ordinary: makes a context for operations on ordinary tensors.
    """

    is_in_shards = staticmethod(is_sharded)
    as_shards = staticmethod(as_shards)
    in_step = staticmethod(in_step)

    def __init__(
        self,
        workers: TorchCommunicator,
        ordinary: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        self.workers = workers
        self.ordinary = ordinary
        self._packs = WeightPacks(workers)

    def of_call(self, layer: Any) -> CallWeights:
        """The weights in a new call of a layer."""
        return CallWeights(self._packs, layer)

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
        weights.end_pass()
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

        scope = _FullVariables(weights).scope()
        with recomputing_in(again), scope:
            yield scope

    @staticmethod
    @torch.no_grad()
    def full(shards: DTensor) -> torch.Tensor:
        """The full tensor of shards, without gradient."""
        return gather_shards(shards.detach())  # type: ignore[no-any-return]

    @staticmethod
    def saves(hooks: tuple[Any, Any]) -> bool:
        """Whether `saved_tensors_hooks` are those of a call on all rows."""
        return isinstance(getattr(hooks[0], "__self__", None), SavedWeights)

    @staticmethod
    def value_with_gradient(shards: DTensor) -> torch.Tensor:
        """The full tensor of shards; a gradient of it is that of its shards.

        The gradient is the same in all processes, and can be differentiated again.
        """
        with torch.enable_grad():
            return _gathered(shards)

    @staticmethod
    def shards_of(full: torch.Tensor, like: DTensor) -> DTensor:
        """The shards of a tensor that is equal in all processes."""
        return _Shards.apply(full, like)  # type: ignore[no-any-return]

    @staticmethod
    def layout(variable: Any) -> ShardLayout | None:
        """The layout of a variable; None without shards."""
        raw = raw_value(variable)
        return layout_of(raw) if is_sharded(raw) else None


class _FullVariables(StatePolicy):
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


class _ReadShards(torch.autograd.Function):
    """A gathered value; its gradient, equal in all processes, is that of its shards."""

    @staticmethod
    def forward(ctx: Any, shards: DTensor, full: torch.Tensor) -> torch.Tensor:
        ctx.shards = shards.detach()
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return _Shards.apply(gradient.to(ctx.shards.dtype), ctx.shards), None


def _gathered(shards: DTensor) -> torch.Tensor:
    """The full tensor of shards, with its gradient."""
    found: torch.Tensor = _ReadShards.apply(shards, gather_shards(shards.detach()))
    return found


class _Shards(torch.autograd.Function):
    """The shards of a tensor that is equal in all processes."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, like: DTensor) -> DTensor:
        own = layout_of(like).shard_of(full, like.device_mesh.get_local_rank())
        return as_shards(own, like)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:  # type: ignore[override]
        return _gathered(gradient), None
