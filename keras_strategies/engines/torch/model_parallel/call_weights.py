"""Weights in one call of a layer: gathered while operations use them.

As in ZeRO-3 (Rajbhandari et al., 2020) and PyTorch's FSDP (Zhao et al., 2023), a
process has its shards of all weights, and the full values of those that it computes
with. A pack of weights is gathered when one of them is read, forward and again
backward; the pack that the last pass has read after it is gathered meanwhile. Two packs
are in memory. Which they are follows from the order of reads alone, never from when
memory is freed, so that all workers take part in the same collectives.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_strategies.engines.torch.compat import version_of
from keras_strategies.engines.torch.model_parallel.saved_weights import (
    SavedWeights,
    check_version,
)
from keras_strategies.engines.torch.model_parallel.shards import is_sharded
from keras_strategies.engines.torch.model_parallel.weight_packs import (
    Gather,
    PackRead,
    PackValues,
    Pass,
    WeightPacks,
)
from keras_strategies.keras_compat.variables.values import raw_value


class CallWeights:
    """The weights in one call of a layer.

    A replica's copy of a variable in shards, which has its gradient, is a tensor
    without memory of its own: an operation reads a value that is gathered for it.

    Args:
        packs: the packs of the strategy.
        layer: the layer.
    """

    def __init__(self, packs: WeightPacks, layer: Any):
        self._packs = packs
        self._layer = layer
        self._of_layer = packs.of_layer(layer)
        self._saved = SavedWeights()
        self._copies: dict[int, torch.Tensor] = {}
        # The values of packs, that of the last read at the end; with the pack that is
        # being gathered two at most.
        self._kept: dict[PackRead, PackValues] = {}
        self._ahead: tuple[PackRead, Gather] | None = None
        self._pass = Pass(torch.is_grad_enabled(), is_backward=False)
        # What this pass has read, and what the last one like it has.
        self._reads: list[PackRead] = []
        self._before: Sequence[PackRead] = ()

    def copy(self, variable: Any) -> torch.Tensor | None:
        """The replica's copy of a variable in shards; None for others."""
        raw = raw_value(variable)
        if not is_sharded(raw):
            return None
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
        found = torch.empty_strided(
            *(like.shape, (0,) * like.dim()),
            dtype=dtype,
            device=like.device,
            requires_grad=requires_grad,
        )
        self._copies[id(found)] = found
        return found

    def used(self, variable: Any, copy: torch.Tensor, name: str | None) -> torch.Tensor:
        """What an operation reads from a copy; other tensors are unchanged.

        Args:
            variable: the variable.
            copy: see `copy`.
            name: str, the dtype that is read; None for that of the variable.
        """
        if id(copy) not in self._copies:
            return copy
        dtype = copy.dtype if name is None else getattr(torch, name)
        full = self.full(variable, dtype)
        if copy.requires_grad and torch.is_grad_enabled():
            return _read(copy, full)
        return full

    def full(self, variable: Any, dtype: torch.dtype) -> torch.Tensor:
        """The full value, which autograd does not keep."""
        raw = raw_value(variable)
        version = version_of(raw)

        def again() -> torch.Tensor:
            check_version(raw, version)
            return self._value(variable, dtype)

        full = self._value(variable, dtype)
        self._saved.note(full, again)
        return full

    def saved(self) -> contextlib.AbstractContextManager[None]:
        """A context in which autograd keeps no gathered weight."""
        return self._saved.entered()

    def end_pass(self, *, keeps: bool = False) -> None:
        """Called after a pass, forward or backward.

        Args:
            keeps: bool, whether the values that were read last are those that the next
                pass reads first.
        """
        self._pass = Pass(self._pass.is_recorded, is_backward=True)
        self._reads = []
        if keeps:
            self._drop_ahead()
        else:
            self.free()

    def free(self) -> None:
        """Frees the values that no operation uses."""
        self._kept.clear()
        self._drop_ahead()

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            _, gather = self._ahead
            self._ahead = None
            gather.drop()

    # Packs.

    def _value(self, variable: Any, dtype: torch.dtype) -> torch.Tensor:
        """The full value of a variable, without gradient."""
        of_layer = self._of_layer
        if id(variable) not in of_layer.of:
            of_layer.add(self._layer, variable, self._packs.workers)
        read = of_layer.of[id(variable)], dtype
        if not self._reads:
            self._before = of_layer.reads.get(self._pass, ())
            of_layer.reads[self._pass] = self._reads
        if not self._reads or self._reads[-1] != read:
            self._reads.append(read)
            self._turn_to(read)
        elif read not in self._kept:
            # Another call has had its weights in memory since.
            self._turn_to(read)
        return self._kept[read][id(variable)]

    def _turn_to(self, read: PackRead) -> None:
        """Gathers a pack that is missing, and begins to gather the next one."""
        self._packs.let_hold(self)
        following = self._following()
        values = self._kept.pop(read, None)
        other = next(reversed(self._kept), None) if following is None else following
        self._kept = {k: v for k, v in self._kept.items() if k == other}
        if self._ahead is not None and self._ahead[0] == read:
            values = self._ahead[1].values()
            self._ahead = None
        else:
            # Another order than that of the last pass.
            self._drop_ahead()
        if values is None:
            values = read[0].gather(read[1]).values()
        if following is not None and following not in self._kept:
            self._ahead = following, following[0].gather(following[1])
        self._kept[read] = values

    def _following(self) -> PackRead | None:
        """The pack that the last pass has read after this one; None if unknown."""
        place = len(self._reads)
        if self._before[place - 1 : place] != self._reads[-1:]:
            self._before = ()
        return self._before[place] if place < len(self._before) else None


class _Read(torch.autograd.Function):
    """A gathered value; its gradient is that of the replica's copy."""

    @staticmethod
    def forward(ctx: Any, copy: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
        ctx.dtype = copy.dtype
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient.to(ctx.dtype), None


#: `_Read.apply`, without what serves only the transforms of `torch.func`.
_read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_read = super(torch.autograd.Function, _Read).apply
