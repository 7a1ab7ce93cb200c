"""Transforms of a step's gradients on a worker, before they are pushed.

Only a worker has all gradients of a step: it checks that they are finite, divides them
by the loss scale and clips them by their norms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    clip_gradients,
    optimizers_of,
    trained_variables,
)
from keras_strategies.parameter_server.engines.engine_interface import OptimizerCall
from keras_strategies.parameter_server.wire.step_messages import ScaleReport
from keras_strategies.parameter_server.wire.variable_description import (
    VariableDescription,
)


def unscale(
    optimizer: Any,
    gradients: Sequence[np.ndarray | None],
    used: np.ndarray,
    describe: Callable[[Any], VariableDescription],
) -> tuple[ScaleReport, list[np.ndarray | None]]:
    """Checks and unscales the gradients of a scaled loss.

    Args:
        optimizer: a `LossScaleOptimizer`.
        gradients: arrays, of all variables of the step; None for no gradient.
        used: float32 scalar, the loss scale of the gradients.
        describe: callable of a variable that returns its `VariableDescription`.

    Returns:
        The report, and the gradients divided by the scale; unchanged if one of them is
        not finite.
    """
    used = np.array(used)
    is_finite = all(g is None or bool(np.isfinite(g).all()) for g in gradients)
    report = ScaleReport(
        (describe(optimizer.dynamic_scale).number, 0),
        (describe(optimizer.step_counter).number, 0),
        optimizer.dynamic_growth_steps,
        used,
        is_finite,
    )
    if not is_finite:
        return report, list(gradients)
    return report, [None if g is None else g / used for g in gradients]


def split_by_optimizer(call: OptimizerCall) -> list[OptimizerCall]:
    """Splits a call of a `MultiOptimizer` into calls of its optimizers."""
    found = []
    optimizers = optimizers_of(call.optimizer)
    if not optimizers:
        return [call]
    pairs = list(zip(call.variables, call.gradients, strict=True))
    for optimizer in optimizers:
        own = {id(v) for v in trained_variables(optimizer)}
        trained = [(v, g) for v, g in pairs if id(v) in own]
        if trained:
            variables, gradients = map(list, zip(*trained, strict=True))
            found.append(OptimizerCall(optimizer, variables, gradients))
    return found


def clip(
    optimizer: Any, gradients: Sequence[np.ndarray | None]
) -> list[np.ndarray | None]:
    """Divides gradients by `loss_scale_factor` and clips them.

    Args:
        optimizer: a Keras optimizer.
        gradients: arrays, of all variables of the step; None for no gradient.
    """
    found = list(gradients)
    scale = optimizer.loss_scale_factor
    if scale is not None:
        found = [None if g is None else g / scale for g in found]
    clips = optimizer.clipnorm or optimizer.global_clipnorm or optimizer.clipvalue
    if clips and not optimizer.gradient_accumulation_steps:
        present = [keras.ops.convert_to_tensor(g) for g in found if g is not None]
        clipped = iter(clip_gradients(optimizer, present))
        found = [
            None if g is None else np.asarray(keras.ops.convert_to_numpy(next(clipped)))
            for g in found
        ]
    return found
