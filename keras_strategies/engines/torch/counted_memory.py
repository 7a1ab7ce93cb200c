"""Memory of a training step, counted without running it.

The step is computed on tensors without values ("fake tensors"), with the kernels of the
device, and the bytes of all memory that is alive are counted with each operation.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import torch

from keras_strategies.engines.torch.compat import (
    TorchDispatchMode,
    fake_tensor_mode,
    tree_flatten,
)
from keras_strategies.keras_compat.variables.generator_seeds import is_seed_state
from keras_strategies.runtime.placement import itemsize
from keras_strategies.runtime.state.replica_state import ReplicaState

if TYPE_CHECKING:
    from keras_strategies.engines.torch.model_parallel.counted_reads import (
        CountedReads,
    )


class MemoryCounter(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        #: int, bytes that are alive.
        self.alive = 0
        #: int, the most bytes that have been alive.
        self.peak = 0
        self._is_counting = True
        self._known: set[int] = set()

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_flatten(result)[0]:
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        return result

    def add(self, tensor: torch.Tensor) -> None:
        """Counts the memory of a tensor until it is freed."""
        # Of a DTensor the shard: its own storage has no memory.
        own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = own.untyped_storage()
        key = id(storage)
        if key in self._known or not self._is_counting:
            return
        self._known.add(key)
        nbytes = storage.nbytes()
        self.alive += nbytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._freed, key, nbytes)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which tensors are not counted."""
        self._is_counting = False
        try:
            yield
        finally:
            self._is_counting = True

    def _freed(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.alive -= nbytes


def step_peak(
    model: Any,
    batch: Any,
    share: int,
    device: torch.device,
    own_shape: Callable[[Any], Sequence[int]],
    reads: CountedReads | None = None,
) -> int:
    """Bytes that a device needs while a training step runs.

    Args:
        model: a compiled and built model with variables without values.
        batch: structure of `keras.KerasTensor`, `(x, y)` or `(x, y, weights)`.
        share: int, the parts that the rows of the batch are divided into; the largest
            one is counted.
        device: the device that computes.
        own_shape: returns the shape of a variable, or of its shard, on the device. What
            is gathered of a variable in shards is not counted.
        reads: receives the reads of variables in shards; None without any.

    Raises:
        RuntimeError: if an operation has no result without values.
    """
    variables = [*model.variables, *model.optimizer.variables]
    variables += model.metrics_variables
    own = {id(variable): variable for variable in variables}
    state = sum(math.prod(own_shape(v)) * itemsize(v.dtype) for v in own.values())
    passes, kept = _memory_of_passes(model, batch, share, device, own_shape, reads)
    update = kept + _peak_of_update(model, device, own_shape)
    return state + max(passes, update)


def _memory_of_passes(
    model: Any,
    batch: Any,
    share: int,
    device: torch.device,
    own_shape: Callable[[Any], Sequence[int]],
    reads: CountedReads | None,
) -> tuple[int, int]:
    """Bytes of activations, gradients and temporary values in the two passes.

    Returns:
        The most, and what is left after them besides gradients.
    """
    values: dict[int, torch.Tensor] = {}

    def value(variable: Any) -> torch.Tensor:
        found = values.get(id(variable))
        if found is None:
            shape = tuple(variable.shape)
            found = values[id(variable)] = _without_values(
                variable, shape, device, counter
            )
            if variable.trainable and found.is_floating_point():
                found.requires_grad_()
                if tuple(own_shape(variable)) != shape:
                    found.register_post_accumulate_grad_hook(_forget_gradient)
        return found

    def rows(leaf: Any) -> torch.Tensor:
        shape = list(leaf.shape)
        if shape:
            shape[0] = math.ceil(shape[0] / share)
        return torch.empty(shape, dtype=getattr(torch, leaf.dtype), device=device)

    counter = MemoryCounter()
    used = None if reads is None else reads.used
    scope = ReplicaState(value, used=used).scope()
    saved = contextlib.nullcontext() if reads is None else reads.saved()
    with keras.device(str(device)), fake_tensor_mode(), scope, counter, saved:
        parts = keras.tree.map_structure(rows, batch)
        x, y, weights = keras.utils.unpack_x_y_sample_weight(parts)
        with torch.enable_grad():
            outputs = model(x, training=True)
            loss = model.compute_loss(x, y, outputs, weights, training=True)
            if loss.requires_grad:
                loss.backward()
        for found in values.values():
            found.grad = None
    return counter.peak, counter.alive


def _peak_of_update(
    model: Any, device: torch.device, own_shape: Callable[[Any], Sequence[int]]
) -> int:
    """Bytes of gradients and temporary values in the optimizer's update."""
    values: dict[int, torch.Tensor] = {}

    def value(variable: Any) -> torch.Tensor:
        if id(variable) not in values:
            values[id(variable)] = _without_values(
                variable, own_shape(variable), device, counter
            )
        return values[id(variable)]

    counter = MemoryCounter()
    scope = ReplicaState(value).scope()
    with keras.device(str(device)), fake_tensor_mode(), scope, counter:
        trained = model.trainable_variables
        gradients = [torch.empty_like(value(v), requires_grad=False) for v in trained]
        with torch.no_grad():
            model.optimizer.apply(gradients, trained)
    return counter.peak


def _without_values(
    variable: Any,
    shape: Sequence[int],
    device: torch.device,
    counter: MemoryCounter,
) -> torch.Tensor:
    dtype = getattr(torch, variable.dtype)
    with counter.paused():
        if is_seed_state(variable) or not shape:
            # Seeds and learning rates are read as numbers of Python.
            zeros = np.zeros(tuple(shape)).tolist()
            return torch.tensor(zeros, dtype=dtype, device=device)
        return torch.empty(tuple(shape), dtype=dtype, device=device)


def _forget_gradient(weight: torch.Tensor) -> None:
    weight.grad = None
