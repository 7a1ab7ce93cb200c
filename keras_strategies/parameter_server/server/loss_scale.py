"""Dynamic loss scales: a worker judges its step, one server keeps the scale.

A worker pulls the scale with its variables, and has all gradients of its step. It
divides them by the scale that it pulled, and pushes them for the inner optimizer; of a
step with a gradient that is not finite it pushes none. Either way it *reports* what it
found, under the name of the update, so that each report counts once. The server that
workers pull the scale from then follows Keras's rule. The others' copies, which are as
they were last written, are never read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_strategies.parameter_server.server.variable_store import Key, Store


@dataclass(frozen=True)
class ScaleReport:
    """What a worker found of a step, for the server that keeps the scale.

    Args:
        scale: the key of `dynamic_scale`.
        counter: the key of `step_counter`.
        growth_steps: int, steps with finite gradients after which the scale doubles.
        used: float32, the scale that the gradients were computed with.
        is_finite: bool, whether all of them were finite.
    """

    scale: Key
    counter: Key
    growth_steps: int
    used: np.ndarray
    is_finite: bool

    def apply(self, store: Store) -> None:
        """Changes scale and counter as `LossScaleOptimizer.apply` does.

        Several workers may have computed with a scale that one of them has had changed
        since: what they report says nothing about the present one, and changes nothing.
        So a scale that is too large for several is halved once.
        """
        scale, counter = store.get(self.scale), store.get(self.counter)
        if scale != self.used:
            return
        after = counter + 1
        if not self.is_finite:
            after, scale = counter * 0, scale * np.float32(0.5)
        elif after == self.growth_steps:
            after, scale = counter * 0, scale * np.float32(2)
        store.write(self.scale, np.asarray(scale))
        store.write(self.counter, np.asarray(after))


def has_dynamic_scale(optimizer: Any) -> bool:
    """Whether an optimizer wraps another one, and scales the loss for it."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates variables: the wrapped one, or the one given."""
    return optimizer.inner_optimizer if has_dynamic_scale(optimizer) else optimizer
