"""Which variables an update of one variable reads or assigns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras


class _NotingScope(keras.StatelessScope):
    """Has zeros for each variable from when it is first asked for, or a new value."""

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) not in self.state_mapping:
            zeros = keras.ops.zeros(variable.shape, variable.dtype)
            self.state_mapping[id(variable)] = zeros
        return self.state_mapping[id(variable)]


def used_by_update(
    optimizer: Any, trained: Any, candidates: Iterable[Any]
) -> list[Any]:
    """Which variables an optimizer reads or assigns to update one trained variable.

    Its `apply` is traced with shapes only (Keras 3.15: `backend.compute_output_spec`),
    without accumulation, which treats all variables alike, and without averages.

    Args:
        optimizer: a Keras optimizer that has been built.
        trained: one of the variables that it was built for.
        candidates: the variables that are asked about.

    Returns:
        Those of the candidates that the update uses.
    """
    from keras.src import backend

    used: set[int] = set()

    def update(gradient: Any) -> Any:
        with _NotingScope() as scope:
            optimizer.apply([gradient], [trained])
        used.update(scope.state_mapping)
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
