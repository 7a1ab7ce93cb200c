"""Torch tensors and NumPy arrays on the same memory."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import torch

from keras_strategies.parameter_server.engines.engine_interface import writable


def as_array(value: Any) -> Any:
    """An array on the memory of a tensor, where NumPy has its dtype."""
    if isinstance(value, torch.Tensor):
        if value.dtype == torch.bfloat16:
            return keras.ops.convert_to_numpy(value)
        return value.detach().cpu().numpy()
    # Other Python objects are unchanged.
    is_number = isinstance(value, (np.ndarray, np.generic, int, float, complex))
    return np.asarray(value) if is_number else value


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor on the memory of an array, where Torch has its dtype."""
    # Torch lacks dtypes that other packages add to NumPy, such as bfloat16.
    if array.dtype.kind == "V" or not array.flags.c_contiguous:
        tensor: torch.Tensor = keras.ops.convert_to_tensor(array)
        return tensor
    return torch.from_numpy(writable(array))


def on_device(array: np.ndarray) -> torch.Tensor:
    """A tensor on the default device; on the CPU, on the memory of the array."""
    tensor: torch.Tensor = keras.ops.convert_to_tensor(as_tensor(array))
    return tensor


def original_array(array: np.ndarray, tensor: torch.Tensor) -> np.ndarray:
    """The array that shares memory with a tensor; another one if it was copied.

    A new array would reference the tensor, and that one the old array, for each update.
    """
    if tensor.data_ptr() == array.__array_interface__["data"][0]:
        return array
    found: np.ndarray = as_array(tensor)
    return found
