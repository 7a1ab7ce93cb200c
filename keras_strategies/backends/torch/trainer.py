"""`Model.fit` and its siblings on Torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import torch

from keras_strategies import keras_compat
from keras_strategies.backends.base import TrainerAdapter, VariableCopy
from keras_strategies.backends.torch.data_parallel import TorchDataParallelCall
from keras_strategies.backends.torch.devices import device_of, torch_device
from keras_strategies.devices import Device

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy


class TorchTrainer(TrainerAdapter):
    """Steps on the device of the variables; layers on all replicas."""

    def __init__(self, strategy: Strategy):
        super().__init__(strategy)
        single = self.placement.is_single
        self._call = None if single else TorchDataParallelCall(strategy)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return keras.device(str(torch_device(self.placement.variables)))

    def step_function(
        self, model: Any, kind: str, make: Callable[[bool], Any], force: bool
    ) -> None:
        name = f"{kind}_function"
        if getattr(model, name) is not None and not force:
            return
        if model.steps_per_execution > 1:
            function = _several_steps(model, kind)
        else:
            make(force)
            function = getattr(model, name)
        setattr(model, name, self._routed(function))

    def _routed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        call = self._call
        if call is None:
            return function

        def step(data: Any) -> Any:
            with keras_compat.layer_calls_through(call):
                return function(data)

        return step

    def copies(self, variable: Any) -> list[VariableCopy]:
        raw = keras_compat.raw_value(variable)
        nbytes = raw.numel() * raw.element_size()
        lead = self.placement.variables
        found = [VariableCopy(str(_named(raw, lead)), nbytes, "variable", raw)]
        if not self.placement.mirrored or self._call is None:
            return found
        for device in self.placement.replicas:
            if device != lead:
                mirror = self._call.mirror(variable, device)
                found.append(VariableCopy(str(device), nbytes, "variable", mirror))
        return found


def _named(tensor: torch.Tensor, expected: Device) -> Device:
    """The device of a tensor; virtual CPUs are one to torch, so the expected one."""
    found = device_of(tensor)
    return expected if found.kind == expected.kind == "cpu" else found


def _several_steps(model: Any, kind: str) -> Callable[[list[Any]], Any]:
    """`steps_per_execution` steps on a list of batches.

    Keras 3.15 refuses more than one step on Torch; eagerly it is a loop, whose
    only effect is that callbacks are called once for all of them.
    """
    one_step = getattr(model, f"{kind}_step")

    def steps(data: list[Any]) -> Any:
        with torch.set_grad_enabled(kind == "train"):
            outputs = [one_step(batch) for batch in data]
        if kind != "predict":
            return outputs[-1]
        return keras.tree.map_structure(lambda *parts: torch.cat(parts), *outputs)

    return steps
