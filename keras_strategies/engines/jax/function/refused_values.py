"""Objects of several arrays, such as sparse ones, which programs do not take."""

from __future__ import annotations

from typing import Any

import jax
import keras
import numpy as np

from keras_strategies.errors import InvalidTypeError
from keras_strategies.values import DistributedValues, flatten

_LEAVES = (jax.Array, np.ndarray, np.generic, keras.Variable, keras.KerasTensor, type)


def check_values(structure: Any) -> None:
    """Raises for a node of JAX's trees that is no dict, list or tuple.

    Args:
        structure: arguments or results of a program.

    Raises:
        TypeError: for an object such as a `BCOO`, which would be taken for a constant.
    """
    for leaf in flatten(structure):
        is_distributed = isinstance(leaf, DistributedValues)
        if isinstance(leaf, (*_LEAVES, type(None))):
            continue
        for value in leaf.values if is_distributed else [leaf]:
            is_array = isinstance(value, (*_LEAVES, type(None)))
            if not is_array and not jax.tree_util.all_leaves([value]):
                raise InvalidTypeError(
                    "A function that `run` or `ks.function` compiles received or "
                    f"returned an object of type {type(value).__name__}. On JAX such "
                    "functions take and return arrays, in dicts, lists and tuples. "
                    "Pass the object's arrays, and make the object in the function."
                )
