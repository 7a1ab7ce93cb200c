"""Variables that an update of one variable reads or assigns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from keras_strategies.keras_compat.state_scope import StatePolicy


class _ZerosOnRead(StatePolicy):
    """Variables are zeros until they are assigned; `values` has those in use."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}

    def read(self, variable: Any) -> Any:
        if id(variable) not in self.values:
            zeros = keras.ops.zeros(variable.shape, variable.dtype)
            self.values[id(variable)] = zeros
        return self.values[id(variable)]

    def assign(self, variable: Any, value: Any) -> None:
        self.values[id(variable)] = value


def used_by_update(
    optimizer: Any, trained: Any, candidates: Iterable[Any]
) -> list[Any]:
    """Variables that an optimizer reads or assigns to update one trained variable.

    Its `apply` is traced with shapes only (Keras 3.15: `backend.compute_output_spec`),
    without accumulation, which treats all variables alike, and without averages.

    Args:
        optimizer: a Keras optimizer that has been built.
        trained: one of the variables that it was built for.
        candidates: the variables to be checked.

    Returns:
        Those of the candidates that the update uses.
    """
    from keras.src import backend

    used: set[int] = set()

    def update(gradient: Any) -> Any:
        state = _ZerosOnRead()
        with state.scope():
            optimizer.apply([gradient], [trained])
        used.update(state.values)
        return gradient

    settings = ("gradient_accumulation_steps", "use_ema")
    before = {name: getattr(optimizer, name) for name in settings}
    try:
        for name in settings:
            setattr(optimizer, name, None)
        gradient = keras.KerasTensor(trained.shape, trained.dtype)
        backend.compute_output_spec(update, gradient)
    finally:
        for name, value in before.items():
            setattr(optimizer, name, value)
    return [variable for variable in candidates if id(variable) in used]
