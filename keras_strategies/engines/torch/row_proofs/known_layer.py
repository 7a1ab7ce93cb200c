"""A layer that is known by type in a recorded call, as one operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import torch

from keras_strategies.engines.torch.compat import storage_key
from keras_strategies.engines.torch.row_proofs.call_recorder import CallRecorder
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import get_mask, set_mask
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime import context
from keras_strategies.runtime.replicas.collectives import SingleReplica
from keras_strategies.runtime.row_proofs.known_calls import (
    KnownArguments,
    KnownResults,
)
from keras_strategies.runtime.state.replica_state import CallState, ReplicaState

_META = torch.device("meta")


def recorded_known_call(
    recorder: CallRecorder,
    state: CallState,
    arguments: KnownArguments,
    known: KnownResults,
    rows: int,
) -> Any:
    """Records a call as one operation.

    Args:
        recorder: the recorder.
        state: the variables of the recorded call.
        arguments: the arguments of the layer.
        known: what its call gives.
        rows: int, the number of rows.

    Returns:
        The outputs.
    """
    given = [*arguments.tensors, *arguments.masks]
    assigned = [
        state.updates[id(variable)][1]
        for variable in known.reads
        if id(variable) in state.updates
    ]
    masks = [mask for mask in known.masks if mask is not None]
    shapes: list[tuple[Any, torch.dtype]] = [
        ((rows, *traits.shape), traits.dtype) for traits in (*known.outputs, *masks)
    ]
    shapes += [(tuple(raw.shape), raw.dtype) for raw in map(raw_value, known.updates)]

    def record() -> list[torch.Tensor]:
        return recorder.add_step(
            "known_layer",
            (given, assigned, len(known.updates)),
            shapes,
        )

    weights = None
    if known.is_trained:
        weights = recorder.add_input(
            ("weights", recorder.place), (), torch.float32, requires_grad=True
        )
    found = list(_KnownCall.apply(recorder, record, weights, *given))
    outputs = found[: len(known.outputs)]
    of_masks = iter(found[len(known.outputs) :])
    for output, mask in zip(outputs, known.masks, strict=True):
        if mask is not None:
            set_mask(output, next(of_masks))
    for variable, value in zip(known.updates, of_masks, strict=True):
        state.assign(variable, value)
    return known.packed(outputs), weights


class _KnownCall(torch.autograd.Function):
    """One operation in the call, and one in the backward pass."""

    @staticmethod
    def forward(ctx, recorder, record, weights, *given):  # type: ignore[no-untyped-def]
        ctx.set_materialize_grads(False)
        ctx.recorder = recorder
        ctx.traits = [
            None if each is None else (tuple(each.shape), each.dtype)
            for each in (weights, *given)
        ]
        found = record()
        ctx.mark_non_differentiable(
            *(each for each in found if not each.is_floating_point())
        )
        return tuple(found)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        needed = ctx.needs_input_grad[2:]
        given = [gradient for gradient in gradients if gradient is not None]
        traits = [
            each
            for each, is_needed in zip(ctx.traits, needed, strict=True)
            if is_needed
        ]
        found = iter(ctx.recorder.add_step("known_layer_gradient", (given,), traits))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


def run_without_values(
    strategy: Any,
    recorder: CallRecorder,
    layer: Any,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rows: int,
) -> KnownResults | None:
    """Runs a layer's code once on tensors of the meta device, not recorded.

    Args:
        strategy: the strategy.
        recorder: the recorder of the call that the layer is in.
        layer: the layer.
        call: its `__call__`.
        args: its arguments.
        kwargs: its keyword arguments.
        rows: int, the number of rows.

    Returns:
        What the call gives; None if it adds losses, assigns trained variables, or
        returns what is no tensor with the rows, or views of arguments.
    """
    state = ReplicaState(_without_values_of)
    # Batch normalization has no collectives on one of one.
    replica = context.ReplicaContext(strategy, 0, SingleReplica(), num_replicas=1)
    with (
        recorder.paused(),
        torch.no_grad(),
        keras.device("meta"),
        state.scope() as scope,
        context.on_replica(replica),
        layer_calls_through(None),
    ):
        args, kwargs = keras.tree.map_structure(_argument, (args, kwargs))
        given = [
            leaf for leaf in keras.tree.flatten((args, kwargs)) if _is_tensor(leaf)
        ]
        try:
            outputs = call(*args, **kwargs)
        except Exception:
            # As where it reads a value. Its operations are recorded instead.
            return None
    memory = {storage_key(tensor) for tensor in given}
    return KnownResults.of(
        outputs,
        scope,
        state,
        lambda leaf: _is_made(leaf, rows, memory),
        lambda variable: bool(raw_value(variable).requires_grad),
    )


def _argument(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    found = torch.empty(leaf.shape, dtype=leaf.dtype, device=_META)
    mask = get_mask(leaf)
    if mask is not None:
        set_mask(found, torch.empty(mask.shape, dtype=mask.dtype, device=_META))
    return found


def _without_values_of(variable: Any) -> torch.Tensor | None:
    raw = raw_value(variable)
    if raw is None:
        return None
    return torch.empty(raw.shape, dtype=raw.dtype, device=_META)


def _is_made(leaf: Any, rows: int, memory: set[int]) -> bool:
    """Whether an output is a tensor of its own with the rows."""
    return (
        _is_tensor(leaf)
        and leaf.dim() > 0
        and leaf.shape[0] == rows
        and storage_key(leaf) not in memory
    )


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)
