"""Packs of weights in shards, gathered in one message."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from keras_strategies.engines.torch.compat import local_shard
from keras_strategies.engines.torch.model_parallel.shards import is_sharded, layout_of
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.keras_compat.variables.values import raw_value

#: The full value of each variable of a pack, by its `id`.
PackValues = dict[int, torch.Tensor]


class WeightPack:
    """Weights that are gathered in one message.

    Args:
        variables: in shards.
        workers: the processes, each of which has a shard.
    """

    def __init__(self, variables: Sequence[Any], workers: TorchCommunicator):
        self.variables = list(variables)
        self.layouts = [layout_of(raw_value(variable)) for variable in variables]
        self._workers = workers

    @torch.no_grad()
    def gather(self, dtype: torch.dtype) -> Gather:
        """Begins to gather the values in a dtype."""
        raws = [raw_value(variable) for variable in self.variables]
        own = torch.cat([local_shard(raw).reshape(-1).to(dtype) for raw in raws])
        every = own.new_empty((self.layouts[0].count, own.numel()))
        return Gather(self, every, self._workers.start_all_gather(every.view(-1), own))


@dataclass
class Gather:
    """A pack that is being gathered.

    Args:
        pack: the pack.
        every: receives the shards, of shape `(shards, numbers)`.
        wait: waits for them.
    """

    pack: WeightPack
    every: torch.Tensor
    wait: Callable[[], None]

    @torch.no_grad()
    def values(self) -> PackValues:
        """Waits for the values."""
        self.wait()
        variables, layouts = self.pack.variables, self.pack.layouts
        parts = self.every.split([layout.size for layout in layouts], 1)
        return {
            id(variable): layout.joined(part)
            for variable, layout, part in zip(variables, layouts, parts, strict=True)
        }

    def drop(self) -> None:
        """Leaves the values, for which other workers may wait in vain."""
        if self.every.device.type != "cpu":
            # Only a stream waits, before it uses the memory for something else.
            self.wait()


#: A pack, and the dtype of its values.
PackRead = tuple[WeightPack, torch.dtype]


@dataclass(frozen=True)
class Pass:
    """A kind of pass of a layer.

    Args:
        is_recorded: bool, whether the call has gradients.
        is_backward: bool.
    """

    is_recorded: bool
    is_backward: bool


class Holder(Protocol):
    """What has values of packs in memory."""

    def free(self) -> None:
        """Frees them."""


class LayerPacks:
    """The packs that calls of a layer read.

    Attributes:
        of: the pack of a variable, by the variable's `id`.
        reads: what the last pass of a kind has read, in its order.
    """

    def __init__(self) -> None:
        self.of: dict[int, WeightPack] = {}
        self.reads: dict[Pass, list[PackRead]] = {}

    def add(self, layer: Any, variable: Any, workers: TorchCommunicator) -> None:
        """Makes packs of a layer's variables in shards that have none, and of one."""
        wanted = {id(each): each for each in (*layer.variables, variable)}
        found = [
            each
            for key, each in wanted.items()
            if key not in self.of and is_sharded(raw_value(each))
        ]
        for places in workers.packs(list(map(raw_value, found)), are_sharded=True):
            pack = WeightPack([found[i] for i in places], workers)
            self.of.update((id(each), pack) for each in pack.variables)


class WeightPacks:
    """The packs of all layers.

    Args:
        workers: the processes.
    """

    def __init__(self, workers: TorchCommunicator):
        self.workers = workers
        self._layers: weakref.WeakKeyDictionary[Any, LayerPacks] = (
            weakref.WeakKeyDictionary()
        )
        self._holder: Holder | None = None

    def of_layer(self, layer: Any) -> LayerPacks:
        """The packs of a layer that is called."""
        return self._layers.setdefault(layer, LayerPacks())

    def let_hold(self, holder: Holder) -> None:
        """Lets a call have values in memory; those of another one are freed."""
        if self._holder is not holder:
            if self._holder is not None:
                self._holder.free()
            self._holder = holder
