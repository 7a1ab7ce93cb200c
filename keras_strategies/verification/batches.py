"""The global batches of a script's data, and their checksums."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_strategies.communication.checksums import checksum
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.input.arrays import from_arrays
from keras_strategies.input.batches import is_array, named_leaves
from keras_strategies.strategies.default import DefaultStrategy
from keras_strategies.verification.processes.records import row_checksums

_DATA = ("x", "y", "sample_weight")
#: Arguments of `fit` that verification has its own values for, or leaves out.
_LEFT_OUT = (
    "epochs",
    "initial_epoch",
    "steps_per_epoch",
    "validation_batch_size",
    "validation_data",
    "validation_freq",
    "validation_split",
    "validation_steps",
    "verbose",
)


@dataclass(frozen=True)
class Batch:
    """A global batch on the host.

    Args:
        parts: tuple `(x, y)`, `(x,)` or `(x, y, sample_weight)` of arrays of shape
            `(rows, ...)`, or of structures of them.
    """

    parts: tuple[Any, ...]

    @property
    def rows(self) -> int:
        leaves = keras.tree.flatten(self.parts)
        return len(leaves[0]) if leaves else 0

    def part(self, start: int, stop: int) -> Batch:
        """Some of the rows."""
        return Batch(
            keras.tree.map_structure(lambda leaf: leaf[start:stop], self.parts)
        )

    def leaf_checksums(self) -> list[int]:
        """The CRC-32 of each leaf."""
        return [checksum(np.asarray(leaf)) for leaf in keras.tree.flatten(self.parts)]

    def shapes(self) -> dict[str, str]:
        """The shape of a row and the dtype of each leaf, by its expression."""
        return {
            name: f"{tuple(leaf.shape[1:])} {leaf.dtype}"
            for name, leaf in named_leaves(self.parts).items()
        }


def fit_arguments(data: Any) -> dict[str, Any]:
    """The arguments of `fit` that describe the data.

    Args:
        data: see `ks.verify`. A callable is called.
    """
    if callable(data) and not isinstance(data, keras.utils.PyDataset):
        data = data()
    if isinstance(data, Iterator):
        raise InvalidArgumentError(
            "`data` of `verify` is read several times, and an iterator can be read "
            f"once. Received: {data!r}. Pass a function that returns it."
        )
    if isinstance(data, dict) and "x" in data:
        return {key: value for key, value in data.items() if key not in _LEFT_OUT}
    is_of_arrays = isinstance(data, tuple) and len(data) in (1, 2, 3)
    if is_of_arrays and all(map(is_array, keras.tree.flatten(data))):
        return dict(zip(_DATA, data, strict=False))
    return {"x": data}


def read_batches(
    arguments: dict[str, Any], steps: int, repeated: bool = True
) -> list[Batch]:
    """The first batches, in the order of the data, repeated where it is shorter."""
    given = [arguments[key] for key in _DATA if arguments.get(key) is not None]
    first = keras.tree.flatten(given[0])
    dataset = given[0]
    if first and all(map(is_array, first)):
        dataset = from_arrays(tuple(given)).batch(arguments.get("batch_size") or 32)
    source = DefaultStrategy().experimental_distribute_dataset(dataset)
    found: list[Batch] = []
    for _ in range(steps):
        before = len(found)
        for batch in itertools.islice(source, steps - len(found)):
            found.append(Batch(_on_host(batch)))
        if not repeated or len(found) in (before, steps):
            break
    if not found:
        raise InvalidArgumentError("`data` of `verify` has no batches.")
    return found


def _on_host(batch: Any) -> tuple[Any, ...]:
    parts = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    return keras.tree.map_structure(  # type: ignore[no-any-return]
        lambda leaf: np.array(
            leaf
            if isinstance(leaf, np.ndarray)
            else keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(leaf))
        ),
        parts,
        none_is_leaf=False,
    )


def data_problem(
    alone: list[Batch],
    found: list[Batch],
    replicas: int,
    again: Callable[[bool], list[Batch]],
) -> tuple[int, str, str] | None:
    """How the batches of the two trainings differ.

    Args:
        alone: the batches on one device.
        found: those under the strategy.
        replicas: int, the number of replicas.
        again: reads all batches once more, on one device or, with True, under the
            strategy.

    Returns:
        None if they are equal; else the step, what differs, and the cause.
    """
    for step, (one, other) in enumerate(zip(alone, found, strict=True), 1):
        if one.shapes() != other.shapes():
            text = f"{one.shapes()} on one device, found {other.shapes()}"
            return step, text, "data_depends_on_replicas"
        if one.leaf_checksums() == other.leaf_checksums():
            continue
        every = again(False)
        if every[(step - 1) % len(every)].leaf_checksums() != one.leaf_checksums():
            text = "other values each time that the data is read"
            return step, text, "unseeded_data"
        text = f"{one.rows} rows on one device, found {other.rows}"
        if other.rows in (one.rows * replicas, one.rows // replicas):
            return step, text, "batch_size_per_replica"
        if sorted(_rows(every)) == sorted(_rows(again(True))):
            return step, "the same rows in another order", "order_of_rows"
        return step, f"other values in {text}", "data_depends_on_replicas"
    return None


def _rows(batches: list[Batch]) -> list[int]:
    leaves = [keras.tree.flatten(batch.parts) for batch in batches]
    return [row for each in leaves for row in row_checksums(each)]
