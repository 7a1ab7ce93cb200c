"""Dataset of array rows: batch, shuffle, repeat."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.errors import BatchError, InvalidArgumentError, InvalidTypeError
from keras_strategies.input.batches import (
    as_numpy,
    is_array,
    loaded,
    named_leaves,
    rows_of,
    shape_of,
)
from keras_strategies.runtime.row_splits import replica_ranges
from keras_strategies.values import map_structure

#: The rows of each local replica, as pairs `(start, stop)`.
Ranges = list[tuple[int, int]]


@dataclass(frozen=True)
class ArrayDataset:
    """The rows of arrays, with a few methods of `tf.data.Dataset`.

    `strategy.make_experimental_numpy_dataset` returns it on JAX and Torch. Each method
    returns a new dataset; each iteration starts from the first row.

    Args:
        arrays: structure of arrays with the same first axis, shape `(rows, ...)`.
        batch_size: int, rows of a batch; None gives single rows.
        drop_remainder: bool, whether to omit a smaller last batch.
        shuffled: bool, whether rows are shuffled, in another order in each pass.
        seed: int, for the orders; None to draw one from NumPy's global generator,
            which `keras.utils.set_random_seed` seeds.
        repeats: int, passes over the rows; None for no end.

    Example:

    >>> dataset = strategy.make_experimental_numpy_dataset((x, y))
    >>> dataset = dataset.shuffle(len(x), seed=1).batch(64)
    """

    arrays: Any
    batch_size: int | None = None
    drop_remainder: bool = False
    shuffled: bool = False
    seed: int | None = None
    repeats: int | None = 1
    _iterations: Iterator[int] = field(
        default_factory=itertools.count, init=False, repr=False, compare=False
    )

    def as_tf_data(self) -> Any:
        """A `tf.data.Dataset` of the rows."""
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices(self.arrays)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> ArrayDataset:
        """Batches of `batch_size` rows; the last one may have fewer."""
        if not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
            raise InvalidArgumentError(
                "`batch_size` must be the number of rows of the global batch, 1 or "
                f"more. Received: {batch_size!r}"
            )
        if self.batch_size is not None:
            raise InvalidArgumentError(
                f"This dataset has batches of {self.batch_size} rows already. Call "
                "`batch` once."
            )
        return dataclasses.replace(
            self, batch_size=int(batch_size), drop_remainder=drop_remainder
        )

    def shuffle(
        self, buffer_size: int | None = None, seed: int | None = None
    ) -> ArrayDataset:
        """Shuffles all rows, in another order in each pass.

        Args:
            buffer_size: ignored; accepted for compatibility with `tf.data`.
            seed: int, for the same orders in every run; None for different ones.
        """
        del buffer_size
        return dataclasses.replace(self, shuffled=True, seed=seed)

    def repeat(self, count: int | None = None) -> ArrayDataset:
        """`count` passes over the rows; None for no end."""
        if count is not None and count < 0:  # As in tf.data.
            count = None
        if self.repeats is None or count is None:
            return dataclasses.replace(self, repeats=None)
        return dataclasses.replace(self, repeats=self.repeats * count)

    def prefetch(self, buffer_size: int | None = None) -> ArrayDataset:
        """Returns the dataset itself: distributed datasets prefetch."""
        del buffer_size
        return self

    @property
    def rows(self) -> int:
        """int, the rows of the arrays."""
        return rows_of(self.arrays)

    def cardinality(self) -> int | None:
        """int, the number of elements; None if there is no end."""
        if self.repeats is None:
            return None
        if self.batch_size is None:
            return self.rows * self.repeats
        full, rest = divmod(self.rows, self.batch_size)
        return (full + bool(rest and not self.drop_remainder)) * self.repeats

    def __len__(self) -> int:
        count = self.cardinality()
        if count is None:
            raise InvalidTypeError(
                "`len` received a dataset that repeats endlessly. It needs a dataset "
                "with an end: call `repeat` with a number, or pass `steps_per_epoch` "
                "to `fit`."
            )
        return count

    def __iter__(self) -> Iterator[Any]:
        for rows in self.batch_rows():
            yield self.at(rows if self.batch_size else rows[0])

    def batches_of(self, counts: ReplicaCounts) -> Iterator[tuple[Any, Ranges]]:
        """Own rows of each batch, and those of them that each local replica takes.

        Args:
            counts: the replicas of all workers.
        """
        for rows in self.batch_rows():
            ranges = replica_ranges(len(rows), counts)
            first, last = ranges[0][0], ranges[-1][1]
            yield self.at(rows[first:last]), [(a - first, b - first) for a, b in ranges]

    def order(self) -> dict[str, Any]:
        """What the orders of the next passes follow from, beside NumPy's generator.

        Its values are those of JSON, also where NumPy's integers were given.
        """
        return {
            "rows": self.rows,
            "batch_size": self.batch_size,
            "drop_remainder": self.drop_remainder,
            "shuffled": self.shuffled,
            "seed": None if self.seed is None else int(self.seed),
            "repeats": None if self.repeats is None else int(self.repeats),
            "passes before": next(copy.copy(self._iterations)),
        }

    def batch_rows(self) -> Iterator[range | np.ndarray]:
        """A pass: the rows of each batch, or each single row."""
        seed = np.random.randint(2**31) if self.seed is None else self.seed
        random = np.random.default_rng([seed, next(self._iterations)])
        passes = math.inf if self.repeats is None else self.repeats
        done = 0
        while done < passes and self.rows:
            order = random.permutation(self.rows) if self.shuffled else None
            yield from self._one_pass(order)
            done += 1

    def _one_pass(self, order: np.ndarray | None) -> Iterator[range | np.ndarray]:
        size = self.batch_size or 1
        count = self.rows
        last = count - count % size if self.drop_remainder else count
        for start in range(0, last, size):
            stop = min(start + size, count)
            yield range(start, stop) if order is None else order[start:stop]

    def at(self, rows: Any) -> Any:
        """Rows of the arrays.

        Args:
            rows: range, or array of int; an int for a single row.
        """
        index = slice(rows.start, rows.stop) if isinstance(rows, range) else rows
        return map_structure(lambda a: None if a is None else a[index], self.arrays)


def from_arrays(arrays: Any) -> ArrayDataset:
    """The rows of a structure of arrays, tensors, frames or nested lists of numbers.

    Raises:
        ValueError: for scalars, and for arrays of different lengths.
    """
    arrays = map_structure(lambda a: None if a is None else as_numpy(a), arrays)
    shapes = {name: shape_of(a) for name, a in named_leaves(arrays, "data").items()}
    rows = {shape[:1] for shape in shapes.values()}
    if len(rows) != 1 or () in rows:
        found = ", ".join(f"{name} of shape {shape}" for name, shape in shapes.items())
        raise BatchError(
            "The arrays of a dataset must have the same number of rows. Received: "
            f"{found or 'no array'}."
        )
    return ArrayDataset(arrays)


def are_arrays(value: Any) -> bool:
    """Whether a value is an array, a frame, or a tuple or mapping of these.

    False for a list, which is a sequence of batches.
    """
    if is_frame(value) or is_array(value):
        return True
    if isinstance(value, tuple):
        return bool(value) and all(v is None or are_arrays(v) for v in value)
    if isinstance(value, dict):
        return bool(value) and all(are_arrays(v) for v in value.values())
    return False


def is_frame(value: Any) -> bool:
    """Whether a value is a frame or a series of pandas."""
    pandas = loaded("pandas")
    return pandas is not None and isinstance(value, (pandas.DataFrame, pandas.Series))
