"""Partitioners: the number of shards of a variable along its first axis.

Pure functions of shape and dtype. Rows are divided with the "div" strategy: the first
shards have one row more if the division has a remainder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.parameter_server.variables.dtype_sizes import bytes_per_element

#: A partitioner of this module, or a callable of a shape and a dtype that returns the
#: number of shards of each axis.
PartitionFunction = Callable[[tuple[int, ...], Any], Sequence[int]]


def split_rows(rows: int, parts: int) -> list[tuple[int, int]]:
    """Row ranges of the shards: consecutive, the first ones with one row more.

    Args:
        rows: int, the length of the first axis.
        parts: int, from 1 to `rows` (1 for no rows).

    Returns:
        list of pairs `(start, stop)`.

    >>> split_rows(13, 5)
    [(0, 3), (3, 6), (6, 9), (9, 11), (11, 13)]
    """
    full, rest = divmod(rows, parts)
    ranges = []
    start = 0
    for i in range(parts):
        stop = start + full + (i < rest)
        ranges.append((start, stop))
        start = stop
    return ranges


class Partitioner:
    """A rule for the number of shards; call it with a shape and a dtype.

    Subclasses define `parts`, or `__call__` as in `tf.distribute`.
    """

    def __call__(
        self, shape: Sequence[int], dtype: Any, axis: int = 0
    ) -> tuple[int, ...]:
        """The number of shards of each axis.

        Args:
            shape: sequence of int.
            dtype: str, or a dtype of NumPy, JAX, Torch or TensorFlow.
            axis: int; only the first axis is sharded.

        Returns:
            tuple of int, one for each axis, all 1 but that of `axis`.

        Raises:
            ValueError: for another axis than 0.
        """
        shape = tuple(int(n) for n in shape)
        if axis != 0:
            raise InvalidArgumentError(
                f"Variables are sharded along their first axis. Received: axis={axis}"
            )
        if not shape:
            return ()
        parts = max(1, min(self.parts(shape, dtype), shape[0]))
        return (parts, *(1 for _ in shape[1:]))

    def parts(self, shape: tuple[int, ...], dtype: Any) -> int:
        """The maximum number of shards of a variable with at least one axis."""
        raise InvalidArgumentError(
            f"{type(self).__name__} defines neither `parts(shape, dtype)` nor "
            "`__call__(shape, dtype)`. Define one of them."
        )


class FixedShardsPartitioner(Partitioner):
    """The same number of shards for every variable.

    Args:
        num_shards: int, 1 or more. A variable with fewer rows has a shard per row.

    Raises:
        ValueError: for a number below 1.

    Example:

    >>> FixedShardsPartitioner(4)((10, 3), "float32")
    (4, 1)
    """

    def __init__(self, num_shards: int):
        self._num_shards = _at_least_one("num_shards", num_shards)

    def parts(self, shape: tuple[int, ...], dtype: Any) -> int:
        return self._num_shards

    def __repr__(self) -> str:
        return f"FixedShardsPartitioner({self._num_shards})"


class MinSizePartitioner(Partitioner):
    """As many shards as possible, of about a minimum size.

    As in `tf.distribute`, the number of shards is the variable's bytes divided by
    `min_shard_bytes`, rounded up, and at most its rows: shards can be smaller by what
    the rounding adds. (6, 1) values of 4 bytes and a minimum of 10 bytes give 3 shards
    of 8 bytes.

    Args:
        min_shard_bytes: int, bytes.
        max_shards: int, maximum number of shards.
        bytes_per_string: int, assumed bytes of a string.

    Raises:
        ValueError: for a number below 1.

    Example:

    >>> MinSizePartitioner(min_shard_bytes=4 * 6 * 4, max_shards=8)((24, 4), "float32")
    (4, 1)
    """

    def __init__(
        self,
        min_shard_bytes: int = 256 << 10,
        max_shards: int = 1,
        bytes_per_string: int = 16,
    ):
        self._min_shard_bytes = _at_least_one("min_shard_bytes", min_shard_bytes)
        self._max_shards = _at_least_one("max_shards", max_shards)
        self._bytes_per_string = _at_least_one("bytes_per_string", bytes_per_string)

    def parts(self, shape: tuple[int, ...], dtype: Any) -> int:
        size = shape[0] * _row_bytes(shape, dtype, self._bytes_per_string)
        return min(self._max_shards, -(-size // self._min_shard_bytes))

    def __repr__(self) -> str:
        return (
            f"MinSizePartitioner(min_shard_bytes={self._min_shard_bytes}, "
            f"max_shards={self._max_shards})"
        )


class MaxSizePartitioner(Partitioner):
    """As few shards as possible, of a maximum size.

    A larger row is a shard of its own.

    Args:
        max_shard_bytes: int, bytes.
        max_shards: int, maximum number of shards, which takes precedence; None for
            no limit.
        bytes_per_string: int, assumed bytes of a string.

    Raises:
        ValueError: for a number below 1.

    Example:

    >>> MaxSizePartitioner(max_shard_bytes=5 * 4 * 4)((24, 4), "float32")
    (5, 1)
    """

    def __init__(
        self,
        max_shard_bytes: int,
        max_shards: int | None = None,
        bytes_per_string: int = 16,
    ):
        self._max_shard_bytes = _at_least_one("max_shard_bytes", max_shard_bytes)
        if max_shards is not None:
            _at_least_one("max_shards", max_shards)
        self._max_shards = max_shards
        self._bytes_per_string = _at_least_one("bytes_per_string", bytes_per_string)

    def parts(self, shape: tuple[int, ...], dtype: Any) -> int:
        row = _row_bytes(shape, dtype, self._bytes_per_string)
        most = max(1, self._max_shard_bytes // row) if row else max(shape[0], 1)
        parts = -(-shape[0] // most)
        return parts if self._max_shards is None else min(parts, self._max_shards)

    def __repr__(self) -> str:
        return (
            f"MaxSizePartitioner(max_shard_bytes={self._max_shard_bytes}, "
            f"max_shards={self._max_shards})"
        )


def number_of_parts(
    partitioner: PartitionFunction | None, shape: tuple[int, ...], dtype: Any
) -> int:
    """The number of shards that a strategy's partitioner returns for a variable.

    Args:
        partitioner: a partitioner, any callable of a shape and a dtype, or None.
        shape: tuple of int.
        dtype: str.

    Returns:
        int, 1 for an unsharded variable.

    Raises:
        ValueError: if the callable returns an invalid number.
    """
    if partitioner is None or not shape or shape[0] == 0:
        return 1
    given = partitioner(shape, dtype)
    try:
        found = tuple(int(n) for n in given)
    except (TypeError, ValueError):
        found = ()
    if len(found) != len(shape) or any(n < 1 for n in found):
        raise InvalidArgumentError(
            f"`variable_partitioner` returned {given!r} for a variable of shape "
            f"{shape}. Return the number of shards of each axis, 1 or more, such as "
            f"{(2, *(1 for _ in shape[1:]))}."
        )
    if any(n != 1 for n in found[1:]):
        raise InvalidArgumentError(
            f"`variable_partitioner` returned {given!r} for a variable of shape "
            f"{shape}. Variables are sharded along their first axis only: the "
            "other numbers must be 1."
        )
    if found[0] > shape[0]:
        raise InvalidArgumentError(
            f"`variable_partitioner` returned {given!r} for a variable of shape "
            f"{shape}, which has only {shape[0]} rows. Return at most {shape[0]}."
        )
    return found[0]


def _row_bytes(shape: tuple[int, ...], dtype: Any, bytes_per_string: int) -> int:
    return math.prod(shape[1:]) * bytes_per_element(dtype, bytes_per_string)


def _at_least_one(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(
            f"`{name}` must be an int of 1 or more. Received: {name}={value!r}"
        )
    return value
