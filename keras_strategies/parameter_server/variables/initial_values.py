"""Initial values of variables that are computed on their servers.

A variable has *blocks* of rows, each with random numbers of its own: a row has the same
value in any number of shards. They are NumPy's, at several times the speed of Keras's
generators on CPUs, and several threads compute blocks at a time.
"""

from __future__ import annotations

import concurrent.futures
import functools
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import keras
import numpy as np

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.variables.generator_seeds import set_initializer_seed
from keras_strategies.parameter_server.variables.dtype_sizes import bytes_per_element
from keras_strategies.training.row_initializer import RowInitializer

#: Numbers in a block, at least a row of them. Another size gives other initial values.
_BLOCK_SIZE = 1 << 19
#: Bytes of a shard that one request initializes.
_REQUEST_BYTES = 64 << 20
#: Initializers with the same value everywhere.
CONSTANTS = (
    keras.initializers.Zeros,
    keras.initializers.Ones,
    keras.initializers.Constant,
)


@dataclass(frozen=True)
class ShardInitializer:
    """Initial values of a shard.

    Args:
        initializer: makes values of any shape, with independent rows.
        seed: tuple of int, of its random numbers.
        shape: tuple of int, of the shard.
        dtype: str.
        start: int, the shard's first row in the variable.
    """

    initializer: Callable[..., Any]
    seed: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    start: int

    def __call__(self) -> np.ndarray:
        """The shard's values."""
        array = self.empty()
        self.fill(array, 0, self.rows)
        return array

    @property
    def rows(self) -> int:
        """int, the shard's rows; a scalar is one."""
        return self.shape[0] if self.shape else 1

    @property
    def _row_shape(self) -> tuple[int, ...]:
        return self.shape[1:]

    def requests(self) -> Iterator[tuple[int, int]]:
        """First and last rows (exclusive) that are computed at a time."""
        row = max(1, math.prod(self._row_shape) * bytes_per_element(self.dtype))
        step = max(1, _REQUEST_BYTES // row)
        for first in range(0, max(1, self.rows), step):
            yield first, min(first + step, self.rows)

    def empty(self) -> np.ndarray:
        """An array for the values; of zeros if all are zero."""
        dtype = np.asarray(_values(keras.initializers.Zeros(), (1,), self.dtype)).dtype
        # Memory of zeros is taken when it is first written.
        return np.zeros(self.shape, dtype)

    def fill(self, array: np.ndarray, first: int, last: int) -> None:
        """Computes consecutive rows of the shard.

        Args:
            array: of `empty`.
            first: int, the first row.
            last: int, the row after the last.
        """
        if type(self.initializer) is keras.initializers.Zeros or not array.size:
            return
        array = array if self.shape else array.reshape(1)
        if isinstance(self.initializer, CONSTANTS):
            array[first:last] = _values(self.initializer, (1,), self.dtype)
            return
        if isinstance(self.initializer, RowInitializer):
            self.initializer.fill(array[first:last], self.start + first)
            return
        rows = max(1, _BLOCK_SIZE // max(1, math.prod(self._row_shape)))
        begin, end = self.start + first, self.start + last
        blocks = range(begin // rows, -(-end // rows))

        def compute(block: int) -> None:
            low, high = max(begin, block * rows), min(end, (block + 1) * rows)
            values = self._block(block, rows)
            here = slice(low - block * rows, high - block * rows)
            array[low - self.start : high - self.start] = values[here]

        if not _is_numpy(self.initializer):
            # Functions of frameworks have threads of their own.
            list(map(compute, blocks))
            return
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(compute, blocks))

    def _block(self, block: int, rows: int) -> np.ndarray:
        """The values of a block of the variable."""
        shape = (rows, *self._row_shape)
        if _is_numpy(self.initializer):
            seed = np.random.SeedSequence([*self.seed, block])
            generator = np.random.Generator(np.random.SFC64(seed))
            return self.initializer(generator, shape)  # type: ignore[no-any-return]
        number = sum(s * 7919**i for i, s in enumerate(self.seed))
        set_initializer_seed(self.initializer, (number + block * 1_000_003) % 2**31)
        return _values(self.initializer, shape, self.dtype)


def shard_initializers(
    initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str
) -> Callable[[int, int], ShardInitializer]:
    """Initializers of a variable's shards, for variables of any size.

    Args:
        initializer: initializer of the unsharded variable.
        shape: tuple of int, of the unsharded variable.
        dtype: str.

    Returns:
        A callable of a shard's first and last row (exclusive) that returns its
        initializer.

    Raises:
        ValueError: for an initializer that cannot compute rows independently.
    """
    seed: tuple[int, ...] = ()
    if not isinstance(initializer, (*CONSTANTS, RowInitializer)):
        seed = _seed(initializer)
        initializer = _in_numpy(_per_shard(initializer, shape))

    def shard(start: int, stop: int) -> ShardInitializer:
        part_shape = (stop - start, *shape[1:]) if shape else ()
        return ShardInitializer(initializer, seed, part_shape, dtype, start)

    return shard


def pickled(initializer: ShardInitializer) -> bytes:
    """A shard's initializer for its server."""
    return cloudpickle.dumps(initializer)  # type: ignore[no-any-return]


def _seed(initializer: Any) -> tuple[int, ...]:
    """The seed of an initializer; the next one of a generator of seeds."""
    seed = getattr(initializer, "seed", None)
    if isinstance(seed, keras.random.SeedGenerator):
        state = np.asarray(keras.ops.convert_to_numpy(seed.next()))
        return tuple(int(number) for number in state)
    if isinstance(seed, int):
        return (seed % 2**32,)
    return tuple(int(n) for n in np.random.SeedSequence().generate_state(2))


def _values(initializer: Any, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(initializer(shape, dtype=dtype)))


# Distributions in float32, of a NumPy generator and a shape


def _uniform(
    low: float, high: float, generator: np.random.Generator, shape: tuple[int, ...]
) -> np.ndarray:
    values = generator.random(shape, np.float32)
    values *= np.float32(high - low)
    values += np.float32(low)
    return values


def _normal(
    mean: float,
    deviation: float,
    generator: np.random.Generator,
    shape: tuple[int, ...],
) -> np.ndarray:
    values = generator.standard_normal(shape, np.float32)
    values *= np.float32(deviation)
    values += np.float32(mean)
    return values


def _truncated(
    mean: float,
    deviation: float,
    generator: np.random.Generator,
    shape: tuple[int, ...],
) -> np.ndarray:
    values = generator.standard_normal(shape, np.float32).reshape(-1)
    while len(outside := np.flatnonzero(np.abs(values) > 2)):
        values[outside] = generator.standard_normal(len(outside), np.float32)
    values *= np.float32(deviation)
    values += np.float32(mean)
    return values.reshape(shape)


def _is_numpy(initializer: Any) -> bool:
    return isinstance(initializer, functools.partial)


def _in_numpy(initializer: Any) -> Any:
    """The distribution of an initializer of Keras; a subclass of one is left."""
    names, kind = keras.initializers, type(initializer)
    if kind is names.RandomUniform:
        return functools.partial(_uniform, initializer.minval, initializer.maxval)
    known = {names.RandomNormal: _normal, names.TruncatedNormal: _truncated}
    if kind in known:
        return functools.partial(known[kind], initializer.mean, initializer.stddev)
    return initializer


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
