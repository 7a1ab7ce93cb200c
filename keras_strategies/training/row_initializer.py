"""Initial values of rows that follow from the number of the row and a seed alone."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_strategies.errors import InvalidArgumentError

#: Of splitmix64.
_STEP, _MIX, _MIX_AGAIN = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
#: Numbers that are computed at a time.
_BLOCK_SIZE = 1 << 20


class RowInitializer(keras.initializers.Initializer):
    """Values of a table by NumPy, the same on every backend and in any shard.

    Rows of a larger table have the same values, too.

    Args:
        initializer: `RandomUniform`, `RandomNormal` or `Zeros` of Keras.
    """

    def __init__(self, initializer: Any):
        self.initializer = initializer

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        rows, columns = shape
        values = np.empty((rows, columns), np.float32)
        self.fill(values, 0)
        return keras.ops.convert_to_tensor(values, dtype or keras.config.floatx())

    def fill(self, array: np.ndarray, first: int) -> None:
        """Computes consecutive rows.

        Args:
            array: `(n, columns)`, for their values.
            first: int, the number of the first row.
        """
        rows, columns = array.shape
        step = max(1, _BLOCK_SIZE // max(1, columns))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            numbers = np.arange(first + start, first + stop)
            array[start:stop] = initial_rows(self.initializer, numbers, columns)


def initial_rows(initializer: Any, rows: np.ndarray, columns: int) -> np.ndarray:
    """Initial values of rows.

    Args:
        initializer: `RandomUniform`, `RandomNormal` or `Zeros` of Keras.
        rows: integers `(n,)`, their numbers.
        columns: int.

    Returns:
        float32 `(n, columns)`.
    """
    names, kind = keras.initializers, type(initializer)
    if kind is names.Zeros:
        return np.zeros((len(rows), columns), np.float32)
    seed = initializer.seed % 2**32
    if kind is names.RandomUniform:
        low, high = initializer.minval, initializer.maxval
        return (low + (high - low) * _uniform(rows, columns, seed)).astype(np.float32)
    # Of Box and Muller.
    size = np.sqrt(-2 * np.log(1 - _uniform(rows, columns, seed)))
    angle = 2 * np.pi * _uniform(rows, columns, seed + 2**32)
    values = initializer.mean + initializer.stddev * size * np.cos(angle)
    return values.astype(np.float32)


def with_seed(initializer: Any) -> Any:
    """The initializer with the seed that it has drawn, which files then have.

    Raises:
        ValueError: if it cannot compute rows from their numbers.
    """
    names = keras.initializers
    seed = getattr(initializer, "seed", 0)
    known = (names.Zeros, names.RandomUniform, names.RandomNormal)
    if type(initializer) not in known or not isinstance(seed, int):
        raise InvalidArgumentError(
            "`initializer` computes each row from its number: give RandomUniform or "
            f"RandomNormal with an integer seed, or Zeros. Received: {initializer!r}"
        )
    config = initializer.get_config()
    if "seed" in config:
        config["seed"] = seed
    return type(initializer).from_config(config)


def _uniform(rows: np.ndarray, columns: int, seed: int) -> np.ndarray:
    """Numbers in [0, 1) by splitmix64 of row, column and seed."""
    with np.errstate(over="ignore"):
        start = _mixed(rows.astype(np.uint64) ^ _mixed(np.array([seed], np.uint64)))
        steps = np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(_STEP)
        mixed = _mixed(start[:, None] + steps)
    return (mixed >> np.uint64(11)) * 2.0**-53


def _mixed(values: np.ndarray) -> np.ndarray:
    values = values + np.uint64(_STEP)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_AGAIN)
    return values ^ (values >> np.uint64(31))
