"""`Optimizer.apply` in a form that JAX can trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_strategies.keras_compat.optimizers.optimizer_parts import trained_variables


def traceable_apply(optimizer: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
    """`optimizer.apply` for a trace.

    A `LossScaleOptimizer` assigns variables in the branches of a condition; tracers
    may leave these only as results. Its `stateless_apply`, which `fit` uses, returns
    the new values.
    """
    if not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return apply

    def apply_stateless(gradients: Sequence[Any], variables: Any = None) -> Any:
        if not optimizer.built:
            optimizer.build(list(variables))
        trained = list(variables or trained_variables(optimizer))
        slots = list(optimizer.variables)
        values = [[v.value for v in group] for group in (slots, trained)]
        new_trained, new_slots = optimizer.stateless_apply(
            values[0], list(gradients), values[1]
        )
        for variable, value in zip(trained, new_trained, strict=True):
            variable.assign(value)
        for variable, value in zip(slots, new_slots, strict=True):
            variable.assign(value)
        return optimizer.iterations

    return apply_stateless
