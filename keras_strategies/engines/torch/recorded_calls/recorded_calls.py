"""Layer calls by their recorded operations.

# Why

In a call of a small layer on Torch, Keras's Python code takes several times as long as
the kernels: 180 microseconds for each `Dense` of 64 units, which computes for 15. The
replicas of a process share one interpreter, so this code also runs for one replica at a
time. From the third call with arguments of the same kinds, a layer is therefore called
by the operations that an earlier call has recorded, one Python function of ATen calls.
Autograd sees these operations as in a call of the layer, so that outputs and gradients
are equal, bit by bit.

# When

Recorded operations contain Python state. So only layers of Keras's own code are
recorded, without `run_eagerly`, and a recording is used as long as every attribute of
the layer and of those in it is the same object as before: `trainable`, rates,
functions. A call with anything else that the recording does not contain (see
`operation_recorder.py`), with added losses, masks at its ends, several precisions or
hooks of torch runs as always. What is recorded is run once more before it is used, and
its outputs and the graph of their gradients are compared.
"""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import torch

from keras_strategies.engines.torch.compat import (
    DeviceContext,
    function_modes,
    has_global_hooks,
    is_transformed,
    saved_tensors_hooks_of_thread,
)
from keras_strategies.engines.torch.recorded_calls.layer_state import LayerState
from keras_strategies.engines.torch.recorded_calls.operation_recorder import (
    OperationRecorder,
)
from keras_strategies.engines.torch.recorded_calls.result_comparison import has_results
from keras_strategies.engines.torch.replicas.row_numbers import RowNumbers
from keras_strategies.keras_compat.models.keras_classes import calls_only_builtin_keras
from keras_strategies.keras_compat.models.layer_calls import calls_of_thread_through
from keras_strategies.keras_compat.models.layers import (
    clear_losses,
    count_losses,
    get_mask,
    has_one_precision,
    rematerializes,
)
from keras_strategies.keras_compat.thread_state import torch_device_in_scope
from keras_strategies.keras_compat.variables.values import values_in_scope

_logger = logging.getLogger(__name__)

# The call of one kind that is recorded: many kinds occur once or twice.
_RECORDED_CALL = 3
# Maximum number of kinds of calls, and of recordings of one kind, of a layer.
_MOST_KINDS = 32
_MOST_RECORDINGS = 4
# Function modes that need not see the functions of a layer; others are a user's.
_KNOWN_MODES = frozenset((DeviceContext, RowNumbers))
_PLAIN = (type(None), bool, int, float, str)
_ATTRIBUTE = "_keras_strategies_recordings"


class _OtherArgumentError(Exception):
    """An argument is neither a tensor nor a plain value."""


@dataclass(frozen=True)
class _Recording:
    """The operations of a call.

    Args:
        run: takes leaves of the arguments and values of variables, and returns tensors:
            outputs, then assigned values.
        state: the attributes of the layers with which it was recorded.
        variables: the variables of the layer.
        strides: those of the variables' values.
        outputs: the outputs, with the index of each tensor in its place.
        assigned: the variables that the call assigns.
    """

    run: Callable[..., Any]
    state: LayerState
    variables: list[Any]
    strides: list[tuple[int, ...]]
    outputs: Any
    assigned: list[Any]

    def call(self, leaves: Sequence[torch.Tensor]) -> tuple[Any] | None:
        """The outputs in a tuple; None if this is not the recording of such a call."""
        if not self.state.is_same():
            return None
        values = values_in_scope(self.variables)
        if [value.stride() for value in values] != self.strides:
            return None
        tensors = self.run(*leaves, *values)
        if self.assigned:
            new = tensors[-len(self.assigned) :]
            for variable, value in zip(self.assigned, new, strict=True):
                variable.assign(value)
        if self.outputs == 0:
            return (tensors[0],)
        return (keras.tree.map_structure(tensors.__getitem__, self.outputs),)


@dataclass
class _Kind:
    """Calls of a layer with arguments of the same kinds."""

    calls: int = 0
    recordings: int = 0
    recording: _Recording | None = None


@dataclass
class _Layer:
    """The calls of one layer, by the kinds of their arguments."""

    kinds: dict[Any, _Kind] = field(default_factory=dict)
    # Whether it has only Keras's own code; None until a call is to be recorded.
    is_recordable: bool | None = None


class _Recordings:
    """Attribute of a layer: its calls, by the instance of `RecordedCalls`.

    Recordings refer to the layer, so that they are collected with it.
    """

    def __init__(self) -> None:
        self.by_owner: weakref.WeakKeyDictionary[RecordedCalls, _Layer] = (
            weakref.WeakKeyDictionary()
        )

    def __reduce__(self) -> Any:
        # Copies of a layer have other variables.
        return (_Recordings, ())


class RecordedCalls:
    """Calls layers by recorded operations, or directly.

    An instance is for calls with one meaning of collectives: a layer may call them on
    replicas, and not elsewhere. It is a route of
    `keras_compat.models.layer_calls.layer_calls_through`.
    """

    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Returns what `call(*args, **kwargs)` returns, the layer's own `__call__`."""
        with calls_of_thread_through(None):
            known = self._calls_of(layer)
            if known.is_recordable is False or getattr(layer, "run_eagerly", False):
                return call(*args, **kwargs)
            leaves: list[torch.Tensor] = []
            try:
                key = (
                    torch.is_grad_enabled(),
                    # Keras moves arguments there before it computes.
                    torch_device_in_scope(),
                    _key(args, leaves),
                    _key(kwargs, leaves),
                )
            except _OtherArgumentError:
                return call(*args, **kwargs)
            if not leaves or _is_special(leaves):
                return call(*args, **kwargs)
            kind = known.kinds.get(key)
            if kind is None:
                if len(known.kinds) >= _MOST_KINDS:
                    return call(*args, **kwargs)
                kind = known.kinds[key] = _Kind()
            if kind.recording is not None:
                outputs = kind.recording.call(leaves)
                if outputs is not None:
                    return outputs[0]
                kind.recording, kind.calls = None, 0
            kind.calls += 1
            if kind.calls < _RECORDED_CALL or kind.recordings >= _MOST_RECORDINGS:
                return call(*args, **kwargs)
            if known.is_recordable is None:
                known.is_recordable = _is_recordable(layer)
            if not known.is_recordable:
                return call(*args, **kwargs)
            return _record(
                kind, layer, functools.partial(call, *args, **kwargs), leaves
            )

    def _calls_of(self, layer: Any) -> _Layer:
        found: _Recordings | None = vars(layer).get(_ATTRIBUTE)
        if found is None:
            found = vars(layer).setdefault(_ATTRIBUTE, _Recordings())
        known = found.by_owner.get(self)
        if known is None:
            known = found.by_owner.setdefault(self, _Layer())
        return known


def _key(value: Any, leaves: list[torch.Tensor]) -> Any:
    """A key of a structure: tensors by their kind, and plain values; fills `leaves`."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        # Operations depend on the layout in memory, such as those of `reshape`.
        return (
            value.shape,
            value.stride(),
            value.dtype,
            value.device,
            value.requires_grad,
        )
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) is dict:
        return dict, tuple((name, _key(part, leaves)) for name, part in value.items())
    if type(value) in (tuple, list):
        return type(value), tuple([_key(part, leaves) for part in value])
    raise _OtherArgumentError


def _is_special(leaves: Sequence[torch.Tensor]) -> bool:
    """Whether there is more to a call than recordings contain."""
    return (
        torch.is_autocast_enabled(leaves[0].device.type)
        or torch.is_inference_mode_enabled()
        or has_global_hooks()
        or saved_tensors_hooks_of_thread() is not None
        or is_transformed()
        or any(type(mode) not in _KNOWN_MODES for mode in function_modes())
        or any(
            type(leaf) is not torch.Tensor or get_mask(leaf) is not None
            for leaf in leaves
        )
    )


def _is_recordable(layer: Any) -> bool:
    """Whether a layer is Keras's own code, in one precision, and computed once."""
    found = (
        calls_only_builtin_keras(layer)
        and has_one_precision(layer)
        and not rematerializes(layer)
    )
    if not found:
        _logger.info("Not recorded: layer %r, by its classes or options", layer.name)
    return found


def _record(
    kind: _Kind, layer: Any, call: Callable[[], Any], leaves: list[torch.Tensor]
) -> Any:
    """Makes a call and records its operations; sets `kind.recording` if it can."""
    # If it cannot be recorded, the next call will not try it again.
    before, kind.recordings = kind.recordings, _MOST_RECORDINGS
    state = LayerState(layer)
    variables = list(layer.weights)
    values = values_in_scope(variables)
    clear_losses(layer)
    losses = count_losses(layer)
    recorder = OperationRecorder([*leaves, *values])
    with recorder:
        outputs = call()
    after = values_in_scope(variables)
    assigned = [i for i, value in enumerate(values) if after[i] is not value]
    found = keras.tree.flatten(outputs)
    expected = [*found, *(after[i] for i in assigned)]
    if not all(isinstance(leaf, torch.Tensor) for leaf in found):
        recorder.reject("an output is not a tensor")
    elif any(get_mask(tensor) is not None for tensor in found):
        recorder.reject("an output has a mask")
    if count_losses(layer) != losses:
        recorder.reject("it adds losses")
    if not state.is_same():
        recorder.reject("it changes attributes of the layer")
    run = recorder.graph(expected)
    if run is not None and not has_results(run, [*leaves, *values], expected):
        recorder.reject("its recording has other results")
        run = None
    if run is None:
        _logger.info("Not recorded: layer %r, since %s", layer.name, recorder.problem)
        return outputs
    indices = itertools.count()
    kind.recording = _Recording(
        run,
        state,
        variables,
        [value.stride() for value in values],
        keras.tree.map_structure(lambda leaf: next(indices), outputs),
        [variables[i] for i in assigned],
    )
    kind.recordings = before + 1
    return outputs
