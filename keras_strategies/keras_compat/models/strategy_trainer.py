"""What models of a strategy have in place of private methods of Keras."""

from __future__ import annotations

from typing import Any

import keras
from keras.src.models.model import Trainer

from keras_strategies.keras_compat.backends.keras_on_jax import record_read_jax_state
from keras_strategies.keras_compat.backends.keras_on_tensorflow import (
    is_trained_on_several_devices,
)
from keras_strategies.keras_compat.hooks import installed_hooks
from keras_strategies.keras_compat.models.building import empty_input, is_unbuilt
from keras_strategies.keras_compat.models.first_batches import first_batch
from keras_strategies.keras_compat.models.input_adapters import own_part


def is_trainer(made: Any) -> bool:
    """Whether an object has Keras's `fit`, as models and some layers have."""
    return isinstance(made, Trainer)


class TrainerOfStrategy(Trainer):  # type: ignore[misc]
    """Keras's `Trainer` with the first batch, state and compiler of a strategy."""

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if data_batch is None and iterator is not None and is_unbuilt(self):
            data_batch = own_part(first_batch(iterator))
            if data_batch is None:
                raise empty_input()
        if data_batch is not None:
            installed_hooks().building(self, data_batch)
        super()._symbolic_build(iterator=iterator, data_batch=data_batch)

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        if keras.backend.backend() == "jax":
            # Keras 3.16 reads a batch here that `fit` would not see again.
            self._symbolic_build(iterator=iterator, data_batch=data_batch)
        else:
            super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)

    def _get_jax_state(
        self, purge_model_variables: bool = False, **groups: bool
    ) -> tuple[Any, ...]:
        # Keras empties the variables, and records their arrays after the first step: an
        # interrupt between the two would leave a model without weights.
        if not installed_hooks().has_state(self):
            return tuple([] for is_read in groups.values() if is_read)
        state: tuple[Any, ...] = super()._get_jax_state(**groups)
        if purge_model_variables:
            record_read_jax_state(self, groups, state)
            self._purge_model_variables(**groups)
        return state

    def _resolve_auto_jit_compile(self) -> bool:
        # XLA cannot compile a program of TensorFlow's for several devices.
        if is_trained_on_several_devices(self):
            return False
        return bool(super()._resolve_auto_jit_compile())

    def _initialize_ddp(self) -> None:
        """Keras 3.16 on Torch wraps models in `DistributedDataParallel` by it."""
