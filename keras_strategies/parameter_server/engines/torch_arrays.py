"""Torch's tensors and NumPy's arrays on the same memory."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch

from keras_strategies.parameter_server.engines.engine_interface import writable


def as_array(value: Any) -> Any:
    """An array on the memory of a tensor, where NumPy knows its dtype."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            return keras.ops.convert_to_numpy(value)
        return value.detach().cpu().numpy()
    # Strings and other Python objects stay as they are.
    is_number = isinstance(value, (np.ndarray, np.generic, int, float, complex))
    return np.asarray(value) if is_number else value


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor on the memory of an array, where Torch knows its dtype."""
    # Of NumPy's dtypes Torch knows all but those that others add, such as bfloat16.
    if array.dtype.kind == "V" or not array.flags.c_contiguous:
        tensor: torch.Tensor = keras.ops.convert_to_tensor(array)
        return tensor
    return torch.from_numpy(writable(array))


def original_array(array: np.ndarray, tensor: torch.Tensor) -> np.ndarray:
    """The array whose memory a tensor was made on, if it still is on it.

    Another array on it would hold the tensor, and that this one, update after update.
    """
    if tensor.data_ptr() == array.__array_interface__["data"][0]:
        return array
    found: np.ndarray = as_array(tensor)
    return found
