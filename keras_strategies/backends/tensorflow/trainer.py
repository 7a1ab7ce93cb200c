"""`Model.fit` and its siblings on TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies import context, keras_compat
from keras_strategies.backends.base import TrainerAdapter, VariableCopy
from keras_strategies.backends.tensorflow.data_parallel import (
    TensorFlowDataParallelCall,
)
from keras_strategies.backends.tensorflow.devices import device_of
from keras_strategies.backends.tensorflow.replicas import ReplicaEngine
from keras_strategies.backends.tensorflow.steps import StepFunction

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy


class TensorFlowTrainer(TrainerAdapter):
    """Steps on the device of the variables; layers on all replicas."""

    def __init__(self, strategy: Strategy):
        super().__init__(strategy)
        self.engine = ReplicaEngine(self.placement.replicas)
        self._call: TensorFlowDataParallelCall | None = None
        if not self.placement.is_single:
            self._call = TensorFlowDataParallelCall(strategy, self.engine)
            keras_compat.hook_tensorflow(_on_replica, _has_several_devices)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return keras.device(str(self.placement.variables))

    def step_function(
        self, model: Any, kind: str, make: Callable[[bool], Any], force: bool
    ) -> None:
        name = f"{kind}_function"
        if getattr(model, name) is not None and not force:
            return
        if self._call is None:
            make(force)
        else:
            setattr(model, name, StepFunction(model, kind, self._call))

    def copies(self, variable: Any) -> list[VariableCopy]:
        # Replicas on other devices get the values of a step when they read them.
        raw = keras_compat.raw_value(variable)
        nbytes = raw.dtype.size * raw.shape.num_elements()
        return [VariableCopy(str(device_of(raw)), nbytes, "variable", raw)]


def _on_replica() -> bool:
    return context.current_replica() is not None


def _has_several_devices(model: Any) -> bool:
    strategy = keras_compat.strategy_of(model)
    return strategy is not None and not strategy.placement.is_single
