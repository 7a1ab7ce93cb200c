"""Small data sets, and the forms in which they can be given to Keras."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

Structure = Any


@dataclass(frozen=True)
class Data:
    """Inputs, targets and sample weights; each an array or a structure of them."""

    x: Structure
    y: Structure | None
    w: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return len(keras.tree.flatten(self.x)[0])


def take(data: Data, rows: slice | int) -> Data:
    """Some rows of the data."""

    def part(structure: Structure | None) -> Structure | None:
        if structure is None:
            return None
        return keras.tree.map_structure(lambda array: array[rows], structure)

    return Data(part(data.x), part(data.y), part(data.w))


def _random(rows: int) -> np.random.Generator:
    return np.random.default_rng(1000 + rows)


def classes(rows: int) -> Data:
    """Six features, one of three classes."""
    rng = _random(rows)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return Data(x, rng.integers(0, 3, rows), _weights(rng, rows))


def one_hot(rows: int) -> Data:
    data = classes(rows)
    return Data(data.x, np.eye(3, dtype="float32")[data.y], data.w)


def binary(rows: int) -> Data:
    """Six features, 0 or 1."""
    rng = _random(rows)
    x = rng.normal(size=(rows, 6)).astype("float32")
    y = rng.integers(0, 2, (rows, 1)).astype("float32")
    return Data(x, y, _weights(rng, rows))


def regression(rows: int) -> Data:
    """Six features, two targets."""
    rng = _random(rows)
    x = rng.normal(size=(rows, 6)).astype("float32")
    y = rng.normal(size=(rows, 2)).astype("float32")
    return Data(x, y, _weights(rng, rows))


def large_targets(rows: int) -> Data:
    """Six features, two targets far from zero: gradients leave float16's range."""
    data = regression(rows)
    return Data(data.x, 20.0 + data.y, data.w)


def images(rows: int) -> Data:
    """8 x 8 pixels in two channels, one of three classes."""
    rng = _random(rows)
    x = rng.normal(1.0, 2.0, size=(rows, 8, 8, 2)).astype("float32")
    return Data(x, rng.integers(0, 3, rows), _weights(rng, rows))


def tokens(rows: int) -> Data:
    """Sentences of one to five words, padded with zeros to five."""
    rng = _random(rows)
    x = rng.integers(1, 11, (rows, 5))
    lengths = rng.integers(1, 6, rows)
    x[np.arange(5) >= lengths[:, None]] = 0
    return Data(x.astype("int32"), rng.integers(0, 3, rows), _weights(rng, rows))


def tagged(rows: int) -> Data:
    """Sentences with a class and a weight for each word."""
    x = tokens(rows).x
    rng = _random(rows + 1)
    weights = rng.uniform(0.5, 2.0, x.shape).astype("float32")
    return Data(x, rng.integers(0, 3, x.shape), weights)


def named(rows: int) -> Data:
    """Two named inputs and two named targets."""
    rng = _random(rows)
    x = {
        "left": rng.normal(size=(rows, 4)).astype("float32"),
        "right": rng.normal(size=(rows, 3)).astype("float32"),
    }
    y = {
        "kind": rng.integers(0, 3, rows),
        "size": rng.normal(size=(rows, 1)).astype("float32"),
    }
    return Data(x, y)


def paired(rows: int) -> Data:
    """A tuple of inputs, one target."""
    data = named(rows)
    return Data((data.x["left"], data.x["right"]), data.y["size"])


def nested(rows: int) -> Data:
    """A dictionary that contains another one and a list, one target."""
    data = named(rows)
    x = {
        "a": {"deep": data.x["left"]},
        "b": [data.x["right"], data.x["left"][:, :2]],
    }
    return Data(x, data.y["size"])


def structured(rows: int) -> Data:
    """The inputs of `nested`, the targets of `named`."""
    return Data(nested(rows).x, named(rows).y)


def many_targets(rows: int) -> Data:
    """Six features, a target for each of several losses."""
    data = regression(rows)
    targets = dict.fromkeys("abcdefg", data.y)
    targets["smoothed"] = one_hot(rows).y
    targets["focal"] = binary(rows).y
    return Data(data.x, targets, data.w)


def pair_of_targets(rows: int) -> Data:
    """A tuple of inputs, two named targets of two numbers."""
    targets = dict.fromkeys(("scalar", "contrastive"), regression(rows).y)
    return Data(paired(rows).x, targets)


def three_targets(rows: int) -> Data:
    """Six features, a target for each kind of metrics."""
    data = regression(rows)
    targets = {
        "binary": binary(rows).y,
        "numbers": data.y,
        "classes": one_hot(rows).y,
    }
    return Data(data.x, targets, data.w)


def _weights(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.uniform(0.5, 2.0, rows).astype("float32")


# Feeds: each gives the keyword arguments of `fit` and `evaluate`, or, for data
# without targets, of `predict`. One that can be read once only is recreated.

Feed = Callable[[Data, int], dict[str, Any]]


def _item(data: Data) -> Structure:
    """What a data set yields: (x, y, w), (x, y), or x in a tuple of one."""
    parts = (data.x, data.y, data.w)
    return tuple(part for part in parts if part is not None)


def _batches(data: Data, batch: int) -> list[Structure]:
    starts = range(0, data.rows, batch)
    return [_item(take(data, slice(i, i + batch))) for i in starts]


def arrays(data: Data, batch: int) -> dict[str, Any]:
    found = {"x": data.x, "batch_size": batch}
    if data.y is not None:
        found["y"] = data.y
    if data.w is not None:
        found["sample_weight"] = data.w
    return found


def tensors(data: Data, batch: int) -> dict[str, Any]:
    found = arrays(data, batch)
    del found["batch_size"]
    found = keras.tree.map_structure(keras.ops.convert_to_tensor, found)
    return {**found, "batch_size": batch}


def pandas_frames(data: Data, batch: int) -> dict[str, Any]:
    import pandas as pd

    found: dict[str, Any] = {"x": pd.DataFrame(data.x), "batch_size": batch}
    if data.y is not None:
        found["y"] = pd.Series(data.y)
    if data.w is not None:
        found["sample_weight"] = pd.Series(data.w)
    return found


def tf_data(data: Data, batch: int) -> dict[str, Any]:
    import tensorflow as tf

    return {"x": tf.data.Dataset.from_tensor_slices(_item(data)).batch(batch)}


def loader(data: Data, batch: int) -> dict[str, Any]:
    import torch

    items = [_item(take(data, i)) for i in range(data.rows)]
    return {"x": torch.utils.data.DataLoader(items, batch_size=batch)}


class _Sequence(keras.utils.PyDataset):
    def __init__(self, batches: list[Structure], **kwargs: Any):
        super().__init__(**kwargs)
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, index: int) -> Structure:
        return self._batches[index]


def py_dataset(data: Data, batch: int) -> dict[str, Any]:
    return {"x": _Sequence(_batches(data, batch))}


def py_dataset_2_workers(data: Data, batch: int) -> dict[str, Any]:
    return {"x": _Sequence(_batches(data, batch), workers=2)}


def generator(data: Data, batch: int) -> dict[str, Any]:
    return {"x": (item for item in _batches(data, batch))}


def endless(data: Data, batch: int) -> dict[str, Any]:
    batches = _batches(data, batch)

    def forever() -> Iterator[Structure]:
        while True:
            yield from batches

    return {"x": forever(), "steps": len(batches)}
