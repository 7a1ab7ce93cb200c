"""Batches on the host: structures of arrays with the same number of rows.

Leaves are arrays and tensors of any framework, or None. Only frameworks that are
already loaded are considered; none is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_strategies.engines import get_engine
from keras_strategies.errors import BatchError
from keras_strategies.values import flatten, map_structure


def loaded(name: str) -> Any:
    """A framework's module if it has been imported, else None."""
    return sys.modules.get(name)


def is_array(value: Any) -> bool:
    """Whether a value is an array or tensor of any framework."""
    if isinstance(value, np.ndarray):
        return True
    if isinstance(value, (type, keras.Variable)):
        return False
    return hasattr(value, "shape") and hasattr(value, "dtype")


def named_leaves(structure: Any, name: str = "batch") -> dict[str, Any]:
    """The leaves of a structure, by expressions such as `batch[0]['left']`.

    >>> named_leaves(({"a": 1}, 2))
    {"batch[0]['a']": 1, 'batch[1]': 2}
    """
    if isinstance(structure, Mapping):
        items: Any = structure.items()
    elif isinstance(structure, (list, tuple)):
        items = enumerate(structure)
    else:
        return {} if structure is None else {name: structure}
    found: dict[str, Any] = {}
    for key, value in items:
        found.update(named_leaves(value, f"{name}[{key!r}]"))
    return found


def shape_of(leaf: Any) -> tuple[int | None, ...]:
    """The shape of an array, a tensor, a specification or a scalar."""
    shape = getattr(leaf, "shape", None)
    if shape is None:
        return () if np.isscalar(leaf) else np.shape(leaf)
    # TensorFlow's shapes of unknown rank have no length.
    if getattr(shape, "rank", 0) is None:
        return (None,)
    return tuple(None if size is None else int(size) for size in shape)


def check_rows(batch: Any, what: str) -> int | None:
    """The number of rows of a batch, after checking that all parts have it.

    Args:
        batch: structure of arrays, or of specifications with a `shape`.
        what: str, the origin of the batch, for messages.

    Returns:
        int; None if the specifications do not define it.

    Raises:
        ValueError: for a batch without rows, parts with different numbers of rows, or
            parts that the backend does not support.
    """
    leaves = named_leaves(batch)
    _check_kinds(leaves, what)
    shapes = {name: shape_of(leaf) for name, leaf in leaves.items()}
    if not shapes:
        raise BatchError(f"{what} yielded a batch without arrays: {batch!r}.")
    found = ", ".join(f"{name} of shape {shape}" for name, shape in shapes.items())
    hint = "Batch it first, as in `dataset.batch(global_batch_size)`"
    if any(len(shape) == 0 for shape in shapes.values()):
        raise BatchError(
            f"Batches are split by rows, but {what} is not batched: it yielded "
            f"{found}. {hint}."
        )
    rows = {shape[0] for shape in shapes.values()} - {None}
    if len(rows) > 1:
        raise BatchError(
            f"All arrays of a batch must have the same number of rows. {what} "
            f"yielded {found}. If these are single samples, the dataset is not "
            f"batched. {hint}."
        )
    return rows.pop() if rows else None


def has_rows(batch: Any) -> bool:
    """Whether all arrays of a batch have the same first axis, its rows.

    Args:
        batch: structure of arrays, or of specifications with a `shape`.
    """
    shapes = [shape_of(leaf) for leaf in named_leaves(batch).values()]
    rows = {shape[0] for shape in shapes if shape} - {None}
    return all(shapes) and len(rows) < 2


def _check_kinds(leaves: Mapping[str, Any], what: str) -> None:
    """Raises for strings, objects and ragged rows, except on TensorFlow."""
    engine = get_engine()
    if engine.has_text_and_ragged_tensors:
        return
    for name, leaf in leaves.items():
        if type(leaf).__name__ in ("RaggedTensor", "RaggedTensorSpec"):
            found = f"a {type(leaf).__name__} with rows of different lengths"
            hint = "Pad its rows, as in `dataset.map(lambda x: x.to_tensor())`"
        elif _is_of_text(leaf):
            found = f"dtype {leaf.dtype}"
            hint = "Encode it as numbers, for example with `keras.layers.StringLookup`"
        else:
            continue
        raise BatchError(
            f"{what} yielded {name} of {found}, but tensors of {engine.name} are "
            f"rectangular arrays of numbers. {hint} in the dataset, or use "
            "KERAS_BACKEND=tensorflow."
        )


def _is_of_text(leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    return getattr(dtype, "kind", "") in ("O", "S", "U") or (
        getattr(dtype, "name", "") == "string"
    )


def to_host(batch: Any, keep: Any, copy: bool = False) -> Any:
    """A batch with leaves that are the backend's own tensors or NumPy arrays.

    Args:
        batch: structure of arrays and tensors of any framework.
        keep: callable that returns whether a leaf is a tensor of the backend.
        copy: bool, whether NumPy arrays are copied, because their owner may overwrite
            them before they are used.
    """

    def leaf_to_host(leaf: Any) -> Any:
        if leaf is None or keep(leaf):
            return leaf
        if isinstance(leaf, np.ndarray):
            return leaf.copy() if copy else leaf
        return as_numpy(leaf)

    return map_structure(leaf_to_host, batch)


def as_numpy(leaf: Any) -> Any:
    """An array, tensor, frame or number as a NumPy array."""
    torch, tf = loaded("torch"), loaded("tensorflow")
    if torch is not None and isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu().numpy()
    if tf is not None and isinstance(leaf, tf.SparseTensor):
        return tf.sparse.to_dense(leaf).numpy()
    if hasattr(leaf, "toarray"):  # SciPy's sparse matrices.
        return leaf.toarray()
    return np.asarray(leaf)


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """Some rows of a batch; an empty range gives zero rows."""

    def rows_of(leaf: Any) -> Any:
        if leaf is None:
            return None
        tf = loaded("tensorflow")
        if tf is not None and isinstance(leaf, tf.SparseTensor):
            rest = leaf.dense_shape[1:]
            begin = tf.concat([[start], tf.zeros_like(rest)], 0)
            size = tf.concat([[stop - start], rest], 0)
            return tf.sparse.slice(leaf, begin, size)
        return leaf[start:stop]

    return map_structure(rows_of, batch)


def join_rows(batches: Sequence[Any]) -> Any:
    """The rows of several batches as one."""
    if len(batches) == 1:
        return batches[0]

    def join(*leaves: Any) -> Any:
        if leaves[0] is None:
            return None
        tf = loaded("tensorflow")
        if tf is not None:
            if isinstance(leaves[0], tf.SparseTensor):
                return tf.sparse.concat(0, leaves)
            if isinstance(leaves[0], (tf.Tensor, tf.RaggedTensor)):
                return tf.concat(leaves, 0)
        return np.concatenate([as_numpy(leaf) for leaf in leaves])

    return map_structure(join, *batches)


def leaf_specs(batch: Any) -> Any:
    """Shape and dtype of each leaf, with an open number of rows.

    Returns:
        The structure, with `keras.KerasTensor` for leaves: of shape `(None, ...)`, or
        of the leaf's own shape where the leaves have no rows in common.
    """
    of_rows = has_rows(batch)

    def spec(leaf: Any) -> Any:
        if leaf is None:
            return None
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        dtype = keras.backend.standardize_dtype(array.dtype)
        shape = shape_of(array)
        return keras.KerasTensor((None, *shape[1:]) if of_rows else shape, dtype=dtype)

    return map_structure(spec, batch)


def rows_of(batch: Any) -> int:
    """The number of rows of a checked batch."""
    leaf = next(leaf for leaf in flatten(batch) if leaf is not None)
    rows = shape_of(leaf)[0]
    assert rows is not None
    return rows
