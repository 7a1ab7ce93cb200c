"""Variances and deviations as means, which replicas can exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops


def _variance(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    from_mean = x - ops.mean(x, axis, keepdims=True)
    return ops.mean(ops.square(from_mean), axis, keepdims=keepdims)


def _deviation(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    return ops.sqrt(_variance(x, axis, keepdims))


_COMPOSED = {"var": _variance, "std": _deviation}


def as_means(name: str, x: Any) -> Callable[..., Any] | None:
    """The composition of means that a function of Keras computes; None for others.

    Args:
        name: str, the name of the function.
        x: its argument. In 16 bits Keras computes with more.
    """
    found = _COMPOSED.get(name)
    if found is None or not hasattr(x, "dtype"):
        return None
    dtype = keras.backend.standardize_dtype(x.dtype)
    return found if dtype in ("float32", "float64") else None
