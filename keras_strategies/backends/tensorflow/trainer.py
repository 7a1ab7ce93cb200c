"""`Model.fit` and its siblings on TensorFlow."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies import context, keras_compat
from keras_strategies.backends.base import TrainerAdapter, VariableCopy
from keras_strategies.backends.tensorflow.data_parallel import (
    TensorFlowDataParallelCall,
)
from keras_strategies.backends.tensorflow.devices import device_of
from keras_strategies.backends.tensorflow.replicas import ReplicaEngine
from keras_strategies.backends.tensorflow.run import (
    TensorFlowRun,
    creating_variables,
    sum_gradients,
)
from keras_strategies.backends.tensorflow.steps import StepFunction
from keras_strategies.values import select_replica

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
        self.run = TensorFlowRun(strategy, self.engine)

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

    @contextlib.contextmanager
    def creating_variable(self) -> Iterator[None]:
        # The first replica makes what all of them use, before the others have begun.
        with (
            keras_compat.outside_stateless_scopes(),
            creating_variables(self.run.lead),
        ):
            yield

    def variable_assigned(self, variable: Any, value: Any) -> None:
        self.run.local_values.assigned(variable, value)

    def apply_gradients(
        self,
        optimizer: Any,
        apply: Callable[..., Any],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        aggregate: bool,
    ) -> Any:
        replica = context.current_replica()
        assert replica is not None

        def update(strategy: Strategy, gradients: Sequence[Any]) -> None:
            if aggregate:
                total = sum_gradients(gradients)
            else:
                total = [select_replica(0, gradient) for gradient in gradients]
            apply(total, variables)

        replica.merge_call(update, args=(list(gradients),))
        return optimizer.iterations


def _on_replica() -> bool:
    return context.current_replica() is not None


def _has_several_devices(model: Any) -> bool:
    strategy = keras_compat.strategy_of(model)
    return strategy is not None and not strategy.placement.is_single
