"""Arithmetic of splitting rows, in pure functions."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from typing import Any

from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.errors import BatchError, InvalidArgumentError
from keras_strategies.values import flatten

_PARTS = ("x", "y", "sample_weight")
_of_custom_step = contextvars.ContextVar("of_custom_step", default=False)


@contextlib.contextmanager
def batches_of_custom_step(is_custom: bool) -> Iterator[None]:
    """Entered around a method of a model whose step defines what a batch is.

    Its parts may then have different numbers of rows, such as a batch without labels
    beside a smaller one with labels.
    """
    token = _of_custom_step.set(is_custom)
    try:
        yield
    finally:
        _of_custom_step.reset(token)


def split_sizes(rows: int, parts: int) -> list[int]:
    """The number of rows of each part: as equal as possible, larger parts first.

    Args:
        rows: int, rows of the global batch, 0 or more.
        parts: int, 1 or more.

    Returns:
        list of `parts` ints that add up to `rows`.

    Raises:
        ValueError: for a negative number of rows or no parts.

    >>> split_sizes(7, 2), split_sizes(1, 4), split_sizes(13, 5)
    ([4, 3], [1, 0, 0, 0], [3, 3, 3, 2, 2])
    """
    if rows < 0 or parts < 1:
        raise InvalidArgumentError(
            "`parts` must be 1 or more, and `rows` 0 or more. Received: "
            f"rows={rows}, parts={parts}"
        )
    base, larger = divmod(rows, parts)
    return [base + 1] * larger + [base] * (parts - larger)


def replica_ranges(rows: int, counts: ReplicaCounts) -> list[tuple[int, int]]:
    """The rows of a global batch that each local replica takes.

    Args:
        rows: int, rows of the global batch.
        counts: the replicas of all workers.

    Returns:
        list of pairs `(start, stop)`, one for each local replica.

    >>> replica_ranges(7, ReplicaCounts((2,)))
    [(0, 4), (4, 7)]
    >>> replica_ranges(7, ReplicaCounts((2, 2), worker=1))
    [(4, 6), (6, 7)]
    """
    bounds = itertools.accumulate(split_sizes(rows, counts.total), initial=0)
    ranges = list(itertools.pairwise(bounds))
    return ranges[counts.first : counts.first + counts.count]


def check_batch(batch: Any) -> None:
    """Raises an error if the parts of a batch have no rows, or different numbers.

    Inputs may have several lengths, such as the nodes and edges of graphs, and so may
    all parts in `batches_of_custom_step`.

    Args:
        batch: `x`, or a tuple or list of `x`, `y` and `sample_weight`: structures of
            objects with a `shape`; its first entry is the number of rows or None.

    Raises:
        ValueError: with the parts and their shapes.
    """
    # Some loaders return a list of the parts, which Keras treats as a tuple.
    parts = batch if isinstance(batch, (tuple, list)) else (batch,)
    shapes = {
        f"{name}[{i}]" if i else name: shape
        for name, part in zip(_PARTS, parts, strict=False)
        for i, leaf in enumerate(flatten(part))
        if (shape := _known_shape(leaf)) is not None
    }
    found = ", ".join(f"{name} of shape {shape}" for name, shape in shapes.items())
    if any(len(shape) == 0 for shape in shapes.values()):
        raise BatchError(
            f"Batches are split by rows, but the input yields {found}. Batch it "
            "first, for example with `dataset.batch(batch_size)`; batch_size is the "
            "global batch."
        )
    lengths = {shape[0] for shape in shapes.values()} - {None}
    inputs = {
        shape[0] for name, shape in shapes.items() if name.split("[")[0] == "x"
    } - {None}
    # A graph for each batch has inputs of several lengths: nodes and edges. The layer
    # calls on them are not split.
    if len(lengths) > 1 and len(inputs) < 2 and not _of_custom_step.get():
        raise BatchError(
            "All arrays of a batch must have the same number of rows. The input "
            f"yields {found}. If these are single samples, batch them first, for "
            "example with `dataset.batch(batch_size)`."
        )


def _known_shape(leaf: Any) -> tuple[int | None, ...] | None:
    """The shape of a part of a batch; None without one, and for an unknown rank."""
    shape = getattr(leaf, "shape", None)
    # Specifications of `tf.data` may have an unknown rank.
    if shape is None or getattr(shape, "rank", 0) is None:
        return None
    return tuple(shape)
