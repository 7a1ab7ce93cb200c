"""Bytes of an element, for the dtypes of every framework."""

from __future__ import annotations

from typing import Any

import numpy as np

from keras_strategies.errors import InvalidArgumentError


def bytes_per_element(dtype: Any, bytes_per_string: int = 16) -> int:
    """int, bytes of one element; strings count as `bytes_per_string`."""
    name = _dtype_name(dtype)
    if name.startswith(("str", "object", "bytes")):
        return bytes_per_string
    if name == "bfloat16":
        return 2
    if name.startswith("float8"):
        return 1
    try:
        return np.dtype(name).itemsize
    except TypeError:
        raise InvalidArgumentError(
            "A dtype is a name such as 'float32', or a dtype of NumPy, JAX, Torch or "
            f"TensorFlow. Received: {dtype!r}"
        ) from None


def _dtype_name(dtype: Any) -> str:
    """str, the name of a dtype of any framework: `np.float32`, `torch.float32`, ..."""
    inner = getattr(dtype, "dtype", None)
    if isinstance(inner, np.dtype):
        # `jnp.float32`
        return inner.name
    name = getattr(dtype, "name", None)
    if isinstance(name, str):
        return name
    if isinstance(dtype, type):
        return dtype.__name__
    return str(dtype).removeprefix("torch.")
