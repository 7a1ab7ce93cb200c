"""Variables of a strategy: a subclass of their class, with calls of the hooks."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from keras_strategies.keras_compat.backends import (
    keras_on_jax,
    keras_on_tensorflow,
    keras_on_torch,
)
from keras_strategies.keras_compat.hooks import installed_hooks
from keras_strategies.keras_compat.strategy_attribute import STRATEGY_ATTRIBUTE
from keras_strategies.keras_compat.thread_state import current_stateless_scope
from keras_strategies.keras_compat.variables import loaded_variables


class StrategyVariable:
    """A variable of a strategy. It stands before the variable's own class."""

    def _initialize(self, value: Any) -> None:
        loaded_variables.end_waits_for_optimizer()
        keras_on_tensorflow.initialize(self, super()._initialize, value)  # type: ignore[misc]
        installed_hooks().initialized(self)

    def _initialize_with_initializer(self, initializer: Any) -> None:
        loaded_variables.end_waits_for_optimizer()
        if loaded_variables.wait(self, initializer):
            return
        # Keras 3.16 does not call `_initialize` for a variable with a layout.
        super()._initialize_with_initializer(initializer)  # type: ignore[misc]
        installed_hooks().initialized(self)

    def _direct_assign(self, value: Any) -> None:
        if loaded_variables.end_wait(self):
            self._initialize(value)
            keras_on_torch.own_memory(self, value)
        else:
            super()._direct_assign(value)  # type: ignore[misc]

    def assign(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and current_stateless_scope() is None:
            value = installed_hooks().array_to_assign(self, value)
        # None: assigned by the hook.
        result = self if value is None else super().assign(value)  # type: ignore[misc]
        if current_stateless_scope() is None:
            installed_hooks().variable_assigned(self)
        return result

    def __array__(self, dtype: Any = None) -> Any:
        return keras_on_jax.variable_array(self, super().__array__, dtype)  # type: ignore[misc]

    def __repr__(self) -> str:
        return installed_hooks().representation(self, super().__repr__())


def set_variable_strategy(variable: Any, strategy: Any) -> None:
    """Records the strategy of a variable, which may not have been initialized yet."""
    # object.__setattr__: neither Keras nor TensorFlow may track a strategy.
    object.__setattr__(variable, STRATEGY_ATTRIBUTE, strategy)
    if not isinstance(variable, StrategyVariable):
        kind: Any = type(variable)
        object.__setattr__(variable, "__class__", _subclass(kind))


@functools.cache
def _subclass(kind: Any) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (StrategyVariable, kind), names)
