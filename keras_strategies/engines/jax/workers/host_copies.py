"""Values of variables while JAX's devices are replaced."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies.engines.jax.array_placement import local_value
from keras_strategies.keras_compat.backends.keras_on_jax import sync_jax_state
from keras_strategies.keras_compat.variables.values import raw_value


class HostCopies:
    """Copies, on the host, of the values of all variables of this process.

    Arrays of the previous devices can still be read, but not computed with. Between
    steps they are values of variables, those of seed generators included, or state of a
    loop of Keras, from which `sync_jax_state` assigns the variables.
    """

    def __init__(self) -> None:
        objects = gc.get_objects()
        for each in objects:
            if isinstance(each, keras.Model):
                sync_jax_state(each)
        self._values: list[tuple[Any, Any]] = []
        for each in objects:
            if isinstance(each, keras.Variable):
                self._add(each, raw_value(each))

    def _add(self, variable: Any, array: Any) -> None:
        if not isinstance(array, jax.Array) or array.is_deleted():
            return
        # The output of a failed program cannot be read.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._values.append((variable, np.asarray(local_value(array))))

    def restore(self) -> None:
        """Puts the values on the new devices, where the variables are placed."""
        for variable, value in self._values:
            variable.assign(value)
