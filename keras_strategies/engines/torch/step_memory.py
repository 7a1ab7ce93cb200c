"""Memory of a training step, by Torch's tracker, without running it.

The step is computed on tensors without values ("fake tensors"), with the kernels of the
device, while `MemTracker` counts the memory that is alive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import torch

from keras_strategies.engines.torch.compat import (
    fake_tensor_mode,
    memory_tracker,
    tracked_bytes,
)
from keras_strategies.keras_compat.variables.generator_seeds import is_seed_state
from keras_strategies.runtime.state.replica_state import ReplicaState


def step_peak(
    model: Any,
    batch: Any,
    share: int,
    device: torch.device,
    own_shape: Callable[[Any], Sequence[int]],
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

    Raises:
        RuntimeError: if an operation has no result without values.
    """
    variables = [*model.variables, *model.optimizer.variables]
    variables += model.metrics_variables
    with keras.device(str(device)), fake_tensor_mode():
        with memory_tracker() as passes:
            own = _values(variables, own_shape, device)
            state = tracked_bytes(passes, "current")
            sharded = [v for v in model.variables if tuple(own_shape(v)) != v.shape]
            full = {**own, **_values(sharded, _shape, device, model.compute_dtype)}
            gathered = tracked_bytes(passes, "current") - state
            _compute_passes(model, _rows(batch, share, device), full)
            kept = tracked_bytes(passes, "current") - state - gathered
        with memory_tracker() as update:
            own = _values(variables, own_shape, device)
            trained = model.trainable_variables
            gradients = [torch.empty_like(own[id(v)]) for v in trained]
            with ReplicaState(lambda v: own[id(v)]).scope(), torch.no_grad():
                model.optimizer.apply(gradients, trained)
    return max(
        tracked_bytes(passes, "peak") - gathered, kept + tracked_bytes(update, "peak")
    )


def _compute_passes(model: Any, batch: Any, values: dict[int, torch.Tensor]) -> None:
    """Computes outputs, loss and gradients, which are forgotten.

    Args:
        model: the model.
        batch: the rows of a replica.
        values: by the id of a variable, its value.
    """
    for variable in model.trainable_variables:
        value = values[id(variable)]
        if value.is_floating_point():
            value.requires_grad_()
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    with ReplicaState(lambda v: values[id(v)]).scope(), torch.enable_grad():
        outputs = model(x, training=True)
        loss = model.compute_loss(x, y, outputs, weights, training=True)
        if loss.requires_grad:
            loss.backward()
    for value in values.values():
        value.grad = None


def _rows(batch: Any, share: int, device: torch.device) -> Any:
    def rows(leaf: Any) -> torch.Tensor:
        shape = list(leaf.shape)
        if shape:
            shape[0] = math.ceil(shape[0] / share)
        return torch.empty(shape, dtype=getattr(torch, leaf.dtype), device=device)

    return keras.tree.map_structure(rows, batch)


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.shape)


def read_dtype(variable: Any, compute_dtype: str | None) -> torch.dtype:
    """The dtype in which layers read a variable; None for that of the variable."""
    name = variable.dtype
    if compute_dtype and keras.backend.is_float_dtype(name):
        name = compute_dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _values(
    variables: Iterable[Any],
    shape_of: Callable[[Any], Sequence[int]],
    device: torch.device,
    compute_dtype: str | None = None,
) -> dict[int, torch.Tensor]:
    """By the ids of variables, tensors without values; see `read_dtype`."""
    found = {}
    for variable in {id(v): v for v in variables}.values():
        shape, dtype = tuple(shape_of(variable)), read_dtype(variable, compute_dtype)
        if is_seed_state(variable) or not shape:
            # Seeds and learning rates are read as numbers of Python.
            zeros = np.zeros(shape).tolist()
            value = torch.tensor(zeros, dtype=dtype, device=device)
        else:
            value = torch.empty(shape, dtype=dtype, device=device)
        found[id(variable)] = value
    return found
