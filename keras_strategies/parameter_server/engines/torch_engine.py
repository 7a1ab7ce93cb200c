"""Parameter servers and their workers on Torch."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import torch

from keras_strategies.engines.torch.compat import version_of
from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.models import keras_classes
from keras_strategies.keras_compat.variables.values import (
    raw_value,
    set_raw_value,
    stored_dtype,
)
from keras_strategies.parameter_server.engines.engine_interface import (
    Body,
    CompilableStep,
    ParameterServerEngine,
    StepProgram,
    StepVariables,
)
from keras_strategies.parameter_server.engines.torch_arrays import (
    as_array,
    as_tensor,
    original_array,
)
from keras_strategies.parameter_server.engines.torch_graphs import GraphRecorder
from keras_strategies.parameter_server.engines.torch_steps import (
    TorchStepProgram,
    set_stub,
)

# Attribute of a parameter on an accelerator: its value as it was pulled.
_PULLED = "_keras_strategies_pulled"


class TorchParameterServerEngine(ParameterServerEngine):
    """Tensors share the memory of arrays; updates are in place."""

    # Graphs have static shapes.
    pads_rows = True
    updates_in_place = True

    def tensor_state(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return None
        gradient = tensor.grad if tensor.is_leaf else None
        of_gradient = None if gradient is None else version_of(gradient)
        return version_of(tensor), of_gradient

    def install(self) -> None:
        patching.install("torch servers")

    def on_cpu(self) -> contextlib.AbstractContextManager[Any]:
        # Torch takes no memory of accelerators before a tensor is placed there.
        context: contextlib.AbstractContextManager[Any] = keras.device("cpu")
        return context

    def model_body(self, model: Any, kind: str) -> Body:
        step: Body = getattr(model, f"{kind}_step")
        if model.run_eagerly:
            return step
        if model.jit_compile or keras_classes.uses_only_builtin_keras(model):
            return CompilableStep(step, is_requested=bool(model.jit_compile))
        return step

    def program(
        self, body: Body, variables: StepVariables, gradients: bool
    ) -> StepProgram:
        return TorchStepProgram(body, variables, gradients)

    def replace_storage(self, variable: Any, shape: tuple[int, ...]) -> None:
        set_stub(variable)

    def set_value(self, variable: Any, value: np.ndarray) -> None:
        raw, tensor = raw_value(variable), as_tensor(value)
        if raw is None or raw.device != tensor.device or raw.dtype != tensor.dtype:
            dtype = stored_dtype(variable)
            tensor = keras.ops.convert_to_tensor(tensor, dtype=dtype)
        # Autograd stores the shape of a parameter with a gradient.
        if raw is not None and raw.dtype == tensor.dtype and raw.shape == tensor.shape:
            raw.data = tensor
        else:
            trains = variable.trainable and tensor.is_floating_point()
            raw = torch.nn.Parameter(tensor, requires_grad=trains)
            set_raw_value(variable, raw)
        if tensor.device.type != "cpu":
            setattr(raw, _PULLED, value)

    def get_value(self, variable: Any) -> np.ndarray:
        raw = raw_value(variable)
        pulled: np.ndarray | None = getattr(raw, _PULLED, None)
        return np.asarray(as_array(raw)) if pulled is None else pulled

    def compile_update(
        self, update: Callable[..., Any], uses_only_builtin_keras: bool
    ) -> Callable[..., Any]:
        return _Update(update, uses_only_builtin_keras)


class _Update:
    """An optimizer's in-place update of arrays.

    Args:
        update: as for `ParameterServerEngine.compile_update`.
        is_recorded: bool, whether it may run as a graph.
    """

    def __init__(self, update: Callable[..., Any], is_recorded: bool):
        self._update = update
        self._recorder = GraphRecorder(self._flat, fuses=True) if is_recorded else None
        self._scalars = 0
        self._slots: list[int] = []

    def __call__(self, scalars: Any, values: Any, slots: Any, gradients: Any) -> Any:
        self._scalars = len(scalars)
        self._slots = [len(own) for own in slots]
        arrays = [*scalars, *values, *itertools.chain(*slots), *gradients]
        tensors = [as_tensor(array) for array in arrays]
        graph = self._recorder.graph(tensors) if self._recorder is not None else None
        if graph is not None:
            found = graph(*tensors)
        else:
            with torch.no_grad():
                found, _ = self._flat(*tensors)
        after = [as_array(tensor) for tensor in found[: self._scalars]]
        changed = map(original_array, arrays[self._scalars :], found[self._scalars :])
        return after, *self._split(changed)

    def _flat(self, *tensors: torch.Tensor) -> tuple[Any, Any]:
        given = iter(tensors)
        scalars = [next(given) for _ in range(self._scalars)]
        values, slots = self._split(given)
        new_scalars, new_values, new_slots = self._update(
            scalars, values, slots, list(given)
        )
        return [*new_scalars, *new_values, *itertools.chain(*new_slots)], None

    def _split(self, items: Iterator[Any]) -> tuple[list[Any], list[list[Any]]]:
        """Values, and the slots of each."""
        values = [next(items) for _ in self._slots]
        return values, [[next(items) for _ in range(count)] for count in self._slots]
