"""Updates of variables in shards and of their slots, as ordinary tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from keras_strategies.engines.torch.compat import local_shard, spec_of
from keras_strategies.engines.torch.model_parallel.process_mesh import gather_shards
from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    updates_lists_of_entries,
    updating_by,
)
from keras_strategies.keras_compat.state_scope import StatePolicy
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.thread_state import outside_stateless_scopes
from keras_strategies.keras_compat.variables.values import raw_value

#: Makes a context for operations on ordinary tensors.
Ordinary = Callable[[], contextlib.AbstractContextManager[None]]


def updating_by_shards(
    optimizer: Any, ordinary: Ordinary
) -> contextlib.AbstractContextManager[None]:
    """A context in which an optimizer updates the shards of this process.

    Keras's own updates for Torch compute each entry from those at its place, by
    operations on lists of tensors. On DTensors these take more time in Python than in
    the update. Other optimizers get the DTensors.

    Args:
        optimizer: the optimizer.
        ordinary: makes a context for operations on ordinary tensors.
    """
    if not updates_lists_of_entries(optimizer):
        return contextlib.nullcontext()
    methods: dict[str, Callable[..., None]] = {
        "_backend_update_step": _update,
        "_backend_increment_gradient_accumulators": _accumulate,
    }
    if optimizer.weight_decay is not None:
        methods["_apply_weight_decay"] = _decay
    on_shards = functools.partial(_on_shards, _Slots(optimizer), ordinary)
    return updating_by(
        optimizer,
        {name: functools.partial(own, on_shards) for name, own in methods.items()},
    )


class _Shards(StatePolicy):
    """The shards of this process in place of variables; they are changed in place."""

    def read(self, variable: Any) -> Any:
        raw = raw_value(variable)
        return local_shard(raw) if isinstance(raw, DTensor) else raw

    def assign(self, variable: Any, value: Any) -> None:
        # A number, such as a product of decays.
        with outside_stateless_scopes():
            variable.assign(value)


#: Calls a function of gradients, with variables and slots as ordinary tensors.
_OnShards = Callable[
    [Callable[[Sequence[Any]], None], Sequence[Any], Sequence[Any]], None
]


def _update(
    on_shards: _OnShards,
    update: Callable[..., None],
    gradients: Sequence[Any],
    variables: Sequence[Any],
    learning_rate: Any,
) -> None:
    def own(gradients: Sequence[Any]) -> None:
        update(gradients, variables, learning_rate)

    on_shards(own, gradients, variables)


def _accumulate(
    on_shards: _OnShards,
    increment: Callable[..., None],
    gradients: Sequence[Any],
    sums: Sequence[Any],
) -> None:
    def own(gradients: Sequence[Any]) -> None:
        increment(gradients, sums)

    on_shards(own, gradients, sums)


def _decay(
    on_shards: _OnShards, decay: Callable[..., None], variables: Sequence[Any]
) -> None:
    def own(gradients: Sequence[Any]) -> None:
        decay(variables)

    on_shards(own, [None] * len(variables), variables)


class _Slots:
    """The slots of an optimizer, which may be built later.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        self._count = -1
        self._are_of_strategy = False

    def are_of_strategy(self) -> bool:
        """Whether all were made in a scope; others are not in shards."""
        slots = self._optimizer.variables
        if len(slots) != self._count:
            self._count = len(slots)
            self._are_of_strategy = all(strategy_of(s) is not None for s in slots)
        return self._are_of_strategy


@torch.no_grad()
def _on_shards(
    slots: _Slots,
    ordinary: Ordinary,
    change: Callable[[Sequence[Any]], None],
    gradients: Sequence[Any],
    variables: Sequence[Any],
) -> None:
    """Changes variables and slots as ordinary tensors.

    Args:
        slots: those of the optimizer.
        ordinary: see `updating_by_shards`.
        change: a function of the gradients.
        gradients: those of the variables.
        variables: the variables.
    """
    if not slots.are_of_strategy():
        change(gradients)
        return
    raws = [raw_value(variable) for variable in variables]
    parts = [_own(gradient, raw) for gradient, raw in zip(gradients, raws, strict=True)]
    with ordinary(), _Shards().scope():
        change(parts)
    for raw in raws:
        if isinstance(raw, DTensor):
            # As an operation on the DTensor does.
            torch.autograd.graph.increment_version(raw)


def _own(gradient: Any, raw: torch.Tensor) -> Any:
    """The part of a gradient for what this process has of a variable."""
    if not isinstance(gradient, DTensor):
        return gradient
    if not isinstance(raw, DTensor):
        # After a global clipping, which multiplies all of them by one DTensor.
        return gather_shards(gradient)
    if spec_of(gradient) is not spec_of(raw) and (
        gradient.placements != raw.placements
    ):
        gradient = gradient.redistribute(raw.device_mesh, raw.placements)
    return local_shard(gradient)
