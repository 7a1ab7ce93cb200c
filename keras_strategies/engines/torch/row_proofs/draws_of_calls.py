"""The random numbers of a layer call, recorded on tensors without memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch

from keras_strategies.engines.torch.replicas.recorded_draws import (
    DrawRecorder,
    RecordedDraw,
)
from keras_strategies.keras_compat.models.layers import get_mask, set_mask
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.row_proofs.layer_calls import LayerCall
from keras_strategies.runtime.state.replica_state import ReplicaState


def recorded_draws(
    call: LayerCall, with_rows: Sequence[bool], rows: int
) -> list[RecordedDraw]:
    """The draws of a call of Keras's own layers, in their order.

    Args:
        call: the call.
        with_rows: for each leaf, whether it has the rows.
        rows: int, the number of rows.
    """
    leaves = [
        _without_memory(leaf, rows if has_rows else None)
        for leaf, has_rows in zip(call.leaves, with_rows, strict=True)
    ]
    args, kwargs = call.arguments(leaves)
    recorder, state = DrawRecorder(), ReplicaState(_value_of)
    # As Keras computes the shapes of outputs.
    with keras.device("meta"), torch.no_grad(), state.scope(), recorder:
        call.call(*args, **kwargs)
    return recorder.draws


def _without_memory(leaf: Any, rows: int | None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    found = _meta(leaf, rows)
    mask = get_mask(leaf)
    if mask is not None:
        set_mask(found, _meta(mask, rows))
    return found


def _meta(tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
    shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _value_of(variable: Any) -> torch.Tensor | None:
    raw = raw_value(variable)
    return None if raw is None else _meta(raw, None)
