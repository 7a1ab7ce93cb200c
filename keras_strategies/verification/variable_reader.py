"""Copies of all variables of a training after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.backends.keras_on_tensorflow import program_of_reads
from keras_strategies.runtime.state.model_values import copied_value, in_numpy_dtype


class VariableReader:
    """Copies the values of variables.

    A small model has many of them, and reading them one by one takes longer than its
    step: TensorFlow reads them in one program, which is made at the second time.
    """

    def __init__(self) -> None:
        self._variables: list[Any] = []
        self._program: Callable[[], list[Any]] | None = None

    def read(self, variables: Sequence[Any]) -> list[np.ndarray]:
        """Reads the variables, of which most are those of the last call.

        Args:
            variables: `keras.Variable`s.

        Returns:
            list of arrays, which later steps leave unchanged; bfloat16 as float32.
        """
        if keras.backend.backend() == "jax":
            return [_copied_jax_value(each) for each in variables]
        if keras.backend.backend() != "tensorflow":
            return [copied_value(each) for each in variables]
        is_known = len(variables) == len(self._variables) and all(
            one is other for one, other in zip(variables, self._variables, strict=True)
        )
        if not is_known:
            self._variables, self._program = list(variables), None
            return [copied_value(each) for each in variables]
        if self._program is None:
            self._program = program_of_reads(variables)
        return [
            in_numpy_dtype(each.copy())
            if isinstance(each, np.ndarray)
            else copied_value(each)
            for each in self._program()
        ]


def _copied_jax_value(variable: Any) -> np.ndarray:
    value = variable.value
    if getattr(value, "is_fully_replicated", False):
        return in_numpy_dtype(np.array(value.addressable_data(0)))
    return copied_value(variable)
