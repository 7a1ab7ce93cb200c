"""What identifies the input of `fit` in a snapshot: sizes, and sums of some rows."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from keras_strategies.errors import CheckpointError
from keras_strategies.keras_compat.models import fit_position
from keras_strategies.runtime.state.model_values import in_numpy_dtype

#: Pieces of consecutive rows of an array that are compared, and bytes of each.
_PIECES = 8
_PIECE_BYTES = 64 << 10
#: Sums of floats may differ where another machine has computed the data.
_TOLERANCE = 1e-4


def described_data(epochs: Any) -> dict[str, Any]:
    """Sizes of the input, and sums of some rows of arrays.

    Nothing is read of datasets and loaders: a batch that is read here would be missing
    in training.

    Args:
        epochs: the epoch iterator of `fit`.

    Returns:
        dict of JSON values: "batch_size" and "rows", None where they are unknown, and
        "arrays", a list.
    """
    arrays = fit_position.arrays_of(epochs)
    return {
        "batch_size": fit_position.rows_per_batch(epochs),
        "rows": _length(arrays[0]) if arrays else _rows_of(epochs),
        "arrays": [_described(array) for array in arrays],
    }


def check_data(saved: dict[str, Any], own: dict[str, Any]) -> None:
    """Compares the input with that of a snapshot.

    Raises:
        ValueError: with the first difference.
    """
    for name, text in (("rows", "rows"), ("batch_size", "rows in a batch")):
        if saved.get(name) is not None and own[name] is not None:
            _check(saved[name] == own[name], f"{saved[name]} {text}", own[name])
    arrays = saved.get("arrays", [])
    if not arrays or not own["arrays"]:
        return
    _check(len(arrays) == len(own["arrays"]), f"{len(arrays)} arrays", own["arrays"])
    for i, (before, now) in enumerate(zip(arrays, own["arrays"], strict=True)):
        name = f"array {i} of {len(arrays)}"
        shapes = tuple(before["shape"]), tuple(now["shape"])
        _check(
            shapes[0] == shapes[1], f"rows of shape {shapes[0]} in {name}", shapes[1]
        )
        _check(_is_equal(before, now), f"other values in {name}", "these")


def _check(is_equal: bool, before: str, now: Any) -> None:
    if not is_equal:
        now = len(now) if isinstance(now, list) else now
        raise CheckpointError(
            f"The data had {before} when the snapshot was made, and has {now} now. "
            "Train on the same data with the same batch size, with a seed where they "
            "are drawn, or use another directory."
        )


def _rows_of(epochs: Any) -> int | None:
    """The rows of a map-style loader."""
    dataset: Any = getattr(fit_position.input_of(epochs), "dataset", None)
    try:
        return len(dataset)
    except TypeError:
        return None


def _length(array: Any) -> int:
    return int(array.shape[0])


def _described(array: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"shape": [int(size or 0) for size in array.shape[1:]]}
    try:
        values = np.concatenate([_in_numpy(piece) for piece in _pieces(array)])
    except (TypeError, ValueError, AttributeError, NotImplementedError):
        # Sparse and ragged: their sizes only.
        return found
    if values.dtype.kind == "f":
        values = np.nan_to_num(values.astype("float64"), posinf=0.0, neginf=0.0).ravel()
        weights = np.cos(np.arange(len(values)))
        found["sums"] = [float(np.abs(values).sum()), float(values @ weights)]
    elif values.dtype.kind in "biu":
        found["hash"] = hashlib.blake2b(values.astype("int64").tobytes()).hexdigest()
    else:
        found["hash"] = hashlib.blake2b(repr(values.tolist()).encode()).hexdigest()
    return found


def _pieces(array: Any) -> list[Any]:
    """Consecutive rows at the begin, at the end, and in between."""
    rows = _length(array)
    row_size = int(np.prod([size or 1 for size in array.shape[1:]], dtype=np.int64))
    count = max(1, _PIECE_BYTES // (4 * max(1, row_size)))
    indexed = getattr(array, "iloc", array)
    starts = np.linspace(0, max(0, rows - count), _PIECES).astype(int)
    return [indexed[int(start) : int(start) + count] for start in dict.fromkeys(starts)]


def _in_numpy(piece: Any) -> np.ndarray:
    if hasattr(piece, "detach"):  # A tensor of Torch, on any device.
        piece = piece.detach().cpu()
    values = np.asarray(piece)
    values = in_numpy_dtype(values)
    if values.dtype == object and not all(isinstance(v, str) for v in values.flat):
        raise TypeError
    return values


def _is_equal(before: dict[str, Any], now: dict[str, Any]) -> bool:
    if "sums" in before and "sums" in now:
        total = max(before["sums"][0], now["sums"][0])
        differences = np.abs(np.subtract(before["sums"], now["sums"]))
        return bool(np.all(differences <= _TOLERANCE * total))
    return before.get("hash") == now.get("hash") or "hash" not in before
