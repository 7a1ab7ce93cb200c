"""Optimizers that wrap another one: `LossScaleOptimizer`."""

from __future__ import annotations

from typing import Any

import keras


def has_dynamic_scale(optimizer: Any) -> bool:
    """Whether an optimizer wraps another one, and scales the loss for it."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def innermost(optimizer: Any) -> Any:
    """The optimizer that updates variables: the wrapped one, or the one given."""
    return optimizer.inner_optimizer if has_dynamic_scale(optimizer) else optimizer
