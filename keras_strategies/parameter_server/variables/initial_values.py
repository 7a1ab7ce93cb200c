"""First values of variables, made where their parts will be."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import cloudpickle
import keras
import numpy as np

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.parameter_server.wire.dtype_sizes import bytes_per_element

_PIECE_BYTES = 8 << 20
#: Initializers whose values are the same in every part.
CONSTANTS = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)


def shard_factory(
    initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str
) -> Callable[[int, int], bytes]:
    """What makes a variable in parts, so that no process holds it whole.

    Args:
        initializer: makes the whole.
        shape: tuple of int, of the whole.
        dtype: str.

    Returns:
        A callable of a part's first row and the row after its last, which returns the
        pickled function that makes the part.

    Raises:
        ValueError: for an initializer whose numbers depend on each other.
    """
    if not isinstance(initializer, CONSTANTS):
        initializer = _per_shard(initializer, shape)

    def part(start: int, stop: int) -> bytes:
        part_shape = (stop - start, *shape[1:]) if shape else ()
        make = functools.partial(
            make_initial_values, initializer, part_shape, dtype, start
        )
        return cloudpickle.dumps(make)  # type: ignore[no-any-return]

    return part


def make_initial_values(
    initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str, start: int
) -> np.ndarray:
    """The first values of a part, made where the part will be, some rows at a time.

    Args:
        initializer: makes values of any shape, each row without regard to the others.
        shape: tuple of int, of the part.
        dtype: str.
        start: int, the part's first row in the variable.
    """
    if not shape:
        return _values(initializer, shape, dtype)
    row = max(1, math.prod(shape[1:]) * bytes_per_element(dtype))
    step = max(1, _PIECE_BYTES // row)
    whole: np.ndarray | None = None
    seed = getattr(initializer, "seed", None)
    for first in range(0, max(1, shape[0]), step):
        rows = min(step, shape[0] - first)
        if isinstance(seed, int):
            # Rows differ, however many parts of a variable there are on a server.
            initializer.seed = (seed + (start + first) * 1_000_003) % 2**31  # type: ignore[attr-defined]
            setattr(initializer, "_init_seed", initializer.seed)  # type: ignore[attr-defined]  # noqa: B010
        piece = _values(initializer, (rows, *shape[1:]), dtype)
        if whole is None:
            whole = np.empty(shape, piece.dtype)
        whole[first : first + rows] = piece
    assert whole is not None
    return whole


def _values(initializer: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(initializer(shape, dtype=dtype)))


def _per_shard(initializer: Any, shape: tuple[int, ...]) -> Any:
    """An initializer that makes of parts what another one makes of a whole."""
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
            # The spread of a normal distribution that is cut at two deviations.
            deviation = math.sqrt(variance) / 0.87962566103423978
            return names.TruncatedNormal(0.0, deviation, seed=seed)
        return names.RandomNormal(0.0, math.sqrt(variance), seed=seed)
    raise InvalidArgumentError(
        f"A variable of shape {shape} is too large for one process, and "
        f"{type(initializer).__name__} cannot initialize it shard by shard. Use a "
        "normal, uniform or constant initializer."
    )
