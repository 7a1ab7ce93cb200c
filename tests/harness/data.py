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
    parts = (
        part if part is None else keras.tree.map_structure(lambda a: a[rows], part)
        for part in (data.x, data.y, data.w)
    )
    return Data(*parts)


def _random(rows: int) -> np.random.Generator:
    return np.random.default_rng(1000 + rows)


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype("float32")


def classes(rows: int) -> Data:
    """Six features, one of three classes."""
    rng = _random(rows)
    return Data(_normal(rng, rows, 6), rng.integers(0, 3, rows), _weights(rng, rows))


def one_hot(rows: int) -> Data:
    data = classes(rows)
    return Data(data.x, np.eye(3, dtype="float32")[data.y], data.w)


def binary(rows: int) -> Data:
    """Six features, 0 or 1."""
    rng = _random(rows)
    x, y = _normal(rng, rows, 6), rng.integers(0, 2, (rows, 1)).astype("float32")
    return Data(x, y, _weights(rng, rows))


def regression(rows: int) -> Data:
    """Six features, two targets."""
    rng = _random(rows)
    return Data(_normal(rng, rows, 6), _normal(rng, rows, 2), _weights(rng, rows))


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
    x = {"left": _normal(rng, rows, 4), "right": _normal(rng, rows, 3)}
    return Data(x, {"kind": rng.integers(0, 3, rows), "size": _normal(rng, rows, 1)})


def paired(rows: int) -> Data:
    """A tuple of inputs, one target."""
    data = named(rows)
    return Data((data.x["left"], data.x["right"]), data.y["size"])


def nested(rows: int) -> Data:
    """A dictionary that contains another one and a list, one target."""
    data = named(rows)
    left, right = data.x["left"], data.x["right"]
    return Data({"a": {"deep": left}, "b": [right, left[:, :2]]}, data.y["size"])


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
    targets = {"binary": binary(rows).y, "numbers": data.y}
    return Data(data.x, {**targets, "classes": one_hot(rows).y}, data.w)


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
    given = {"x": data.x, "y": data.y, "sample_weight": data.w, "batch_size": batch}
    return {key: value for key, value in given.items() if value is not None}


def tensors(data: Data, batch: int) -> dict[str, Any]:
    found = arrays(data, batch)
    del found["batch_size"]
    found = keras.tree.map_structure(keras.ops.convert_to_tensor, found)
    return {**found, "batch_size": batch}


def pandas_frames(data: Data, batch: int) -> dict[str, Any]:
    import pandas as pd

    found = {"x": pd.DataFrame(data.x), "batch_size": batch}
    series = {"y": data.y, "sample_weight": data.w}
    return found | {k: pd.Series(v) for k, v in series.items() if v is not None}


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


def py_dataset(data: Data, batch: int, workers: int = 1) -> dict[str, Any]:
    return {"x": _Sequence(_batches(data, batch), workers=workers)}


def py_dataset_2_workers(data: Data, batch: int) -> dict[str, Any]:
    return py_dataset(data, batch, workers=2)


def generator(data: Data, batch: int) -> dict[str, Any]:
    return {"x": (item for item in _batches(data, batch))}


def endless(data: Data, batch: int) -> dict[str, Any]:
    batches = _batches(data, batch)

    def forever() -> Iterator[Structure]:
        while True:
            yield from batches

    return {"x": forever(), "steps": len(batches)}
