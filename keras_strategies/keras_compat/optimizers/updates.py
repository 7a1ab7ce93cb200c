"""Updates with gradient accumulation and moving averages, without conditions."""

from __future__ import annotations

import functools
from typing import Any

import keras

from keras_strategies.keras_compat.thread_state import current_stateless_scope


def iterations_variable(optimizer: Any) -> Any:
    """The counter of an optimizer's steps (`BaseOptimizer._iterations`).

    With gradient accumulation, `iterations` counts updates instead.
    """
    return optimizer._iterations


def update_without_conditions(optimizer: Any) -> None:
    """Makes accumulation and averages of an optimizer work in a `StatelessScope`.

    Keras 3.15: `BaseOptimizer._backend_apply_gradients`. Where steps differ, by
    `gradient_accumulation_steps` or `ema_overwrite_frequency`, Keras assigns variables
    in the branches of a condition, from which TensorFlow returns no values; on JAX it
    makes zeros of `Variable.shape`, which may be open; and on Torch a variable and its
    average become one tensor, which is updated in place. Here both values are computed,
    and one is selected.

    Args:
        optimizer: a Keras optimizer that has been built.
    """
    if optimizer.gradient_accumulation_steps or optimizer.use_ema:
        apply = functools.partial(_apply_gradients, optimizer)
        optimizer._backend_apply_gradients = apply


def _apply_gradients(optimizer: Any, gradients: Any, variables: Any) -> None:
    if optimizer.gradient_accumulation_steps:
        _accumulate(optimizer, gradients, variables)
    else:
        _update(optimizer, gradients, variables)
    if optimizer.use_ema:
        _average(optimizer, variables)


def _update(optimizer: Any, gradients: Any, variables: Any) -> None:
    gradients = optimizer._clip_gradients(gradients)
    optimizer._apply_weight_decay(variables)
    optimizer._backend_update_step(gradients, variables, optimizer.learning_rate)


def _accumulate(optimizer: Any, gradients: Any, variables: Any) -> None:
    ops = keras.ops
    steps = optimizer.gradient_accumulation_steps
    is_update = ops.equal(ops.mod(optimizer._iterations + 1, steps), 0)
    index = optimizer._get_variable_index
    accumulators = [optimizer._accumulated_gradients[index(v)] for v in variables]
    sums = [g + a.value for g, a in zip(gradients, accumulators, strict=True)]
    scope = current_stateless_scope()
    # Copies: Torch updates in place.
    before = [
        (variable, ops.copy(variable.value))
        for variable in (*variables, *optimizer.variables)
        if scope.get_current_value(variable) is not None
    ]
    _update(optimizer, [each / steps for each in sums], variables)
    for variable, value in before:
        variable.assign(ops.where(is_update, variable.value, value))
    for accumulator, each in zip(accumulators, sums, strict=True):
        accumulator.assign(ops.where(is_update, ops.zeros_like(each), each))


def _average(optimizer: Any, variables: Any) -> None:
    ops = keras.ops
    is_later = ops.not_equal(optimizer.iterations, 0)
    every = optimizer.ema_overwrite_frequency
    for variable in variables:
        index = optimizer._get_variable_index(variable)
        average = optimizer._model_variables_moving_average[index]
        if average is None:
            continue
        momentum = ops.cast(is_later, variable.dtype) * optimizer.ema_momentum
        value = momentum * average.value + (1 - momentum) * variable.value
        average.assign(value)
        if every:
            overwrites = ops.equal(ops.mod(optimizer.iterations + 1, every), 0)
            variable.assign(ops.where(overwrites, value, variable.value))
