"""Initial values of variables, computed shard by shard on their servers."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import cloudpickle
import keras
import numpy as np

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.variables.generator_seeds import set_initializer_seed
from keras_strategies.parameter_server.variables.dtype_sizes import bytes_per_element

_PIECE_BYTES = 8 << 20
#: Initializers with the same value everywhere.
CONSTANTS = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)


def shard_factory(
    initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str
) -> Callable[[int, int], bytes]:
    """Pickled initializers of a variable's shards, for variables of any size.

    Args:
        initializer: initializer of the unsharded variable.
        shape: tuple of int, of the unsharded variable.
        dtype: str.

    Returns:
        A callable of a shard's first and last row (exclusive) that returns the pickled
        function which computes the shard.

    Raises:
        ValueError: for an initializer that cannot compute rows independently.
    """
    if not isinstance(initializer, CONSTANTS):
        initializer = _per_shard(initializer, shape)

    def shard(start: int, stop: int) -> bytes:
        part_shape = (stop - start, *shape[1:]) if shape else ()
        make = functools.partial(
            make_initial_values, initializer, part_shape, dtype, start
        )
        return cloudpickle.dumps(make)  # type: ignore[no-any-return]

    return shard


def make_initial_values(
    initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str, start: int
) -> np.ndarray:
    """Computes the initial values of a shard, some rows at a time.

    Args:
        initializer: makes values of any shape, with independent rows.
        shape: tuple of int, of the shard.
        dtype: str.
        start: int, the shard's first row in the variable.
    """
    if not shape:
        return _values(initializer, shape, dtype)
    row = max(1, math.prod(shape[1:]) * bytes_per_element(dtype))
    step = max(1, _PIECE_BYTES // row)
    found: np.ndarray | None = None
    seed = getattr(initializer, "seed", None)
    for first in range(0, max(1, shape[0]), step):
        rows = min(step, shape[0] - first)
        if isinstance(seed, int):
            # Different seeds for all pieces of a variable.
            set_initializer_seed(
                initializer, (seed + (start + first) * 1_000_003) % 2**31
            )
        piece = _values(initializer, (rows, *shape[1:]), dtype)
        if found is None:
            found = np.empty(shape, piece.dtype)
        found[first : first + rows] = piece
    assert found is not None
    return found


def _values(initializer: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(initializer(shape, dtype=dtype)))


def _per_shard(initializer: Any, shape: tuple[int, ...]) -> Any:
    """An initializer of single shards, with the distribution of the given one."""
    names = keras.initializers
    independent = (names.RandomNormal, names.RandomUniform, names.TruncatedNormal)
    if isinstance(initializer, independent):
        return initializer
    if isinstance(initializer, names.VarianceScaling):
        receptive = math.prod(shape[:-2])
        into, out = shape[-2] * receptive, shape[-1] * receptive
        fans = {"fan_in": into, "fan_out": out, "fan_avg": (into + out) / 2}
        variance = initializer.scale / max(1.0, fans[initializer.mode])
        seed = initializer.seed
        if initializer.distribution == "uniform":
            limit = math.sqrt(3 * variance)
            return names.RandomUniform(-limit, limit, seed=seed)
        if initializer.distribution == "truncated_normal":
            # Standard deviation of a normal distribution truncated at two deviations.
            deviation = math.sqrt(variance) / 0.87962566103423978
            return names.TruncatedNormal(0.0, deviation, seed=seed)
        return names.RandomNormal(0.0, math.sqrt(variance), seed=seed)
    raise InvalidArgumentError(
        f"A variable of shape {shape} is too large for one process, and "
        f"{type(initializer).__name__} cannot initialize it shard by shard. Use a "
        "normal, uniform or constant initializer."
    )
