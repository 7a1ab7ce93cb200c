"""Optimizers that wrap another one: `LossScaleOptimizer`."""

from __future__ import annotations

from typing import Any

import keras


def has_dynamic_scale(optimizer: Any) -> bool:
    """Whether an optimizer is a `LossScaleOptimizer`."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def innermost(optimizer: Any) -> Any:
    """The wrapped optimizer, or the given one."""
    return optimizer.inner_optimizer if has_dynamic_scale(optimizer) else optimizer
