"""Transforms of a step's gradients on a worker, before they are pushed.

Only a worker has all gradients of a step: it checks that they are finite, divides them
by the loss scale and clips them by their norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    clip_gradients,
)


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
