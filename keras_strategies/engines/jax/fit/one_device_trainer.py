"""Training on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from keras_strategies.engines.jax.batch_placement import DevicePlacer
from keras_strategies.engines.jax.devices import jax_device
from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.fit.jax_trainer import JaxTrainer
from keras_strategies.keras_compat.backends.keras_on_jax import move_variable
from keras_strategies.keras_compat.variables.values import raw_value

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class OneDeviceTrainer(JaxTrainer):
    """Variables and batches on one device."""

    def __init__(self, strategy: StrategyCore):
        device = jax_device(strategy.placement.variables)
        super().__init__(strategy, DevicePlacer(device))
        self.state_sharding_of_loops = jax.sharding.SingleDeviceSharding(device)

    def step(self, model: Any, kind: str) -> compiled_steps.Step:
        step = compiled_steps.keras_step(model, kind)
        if not compiled_steps.compiles(model):
            return step
        return compiled_steps.CompiledStep(model, kind, step)

    def is_placed(self, variable: Any) -> bool:
        # JAX moves uncommitted arrays by itself.
        raw = raw_value(variable)
        return raw is None or not raw.committed or raw.devices() == {self.home}

    def place(self, variable: Any) -> None:
        move_variable(variable, None)
        raw = raw_value(variable)
        variable.assign(jax.device_put(raw, self.home))
