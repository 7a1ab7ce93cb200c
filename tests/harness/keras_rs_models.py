"""Models of keras_rs: ranking with its tables, loss and metrics, and a small DLRM."""

from __future__ import annotations

from typing import Any

import keras
import keras_rs
import numpy as np

BATCH = 8
LIST = 4


def ranking_data(rows: int = 30) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Ids of users and of the lists that they saw; relevance, -1 for no item.

    Ids are different in each batch: Keras's optimizers on TensorFlow square each of
    several gradients of one row.
    """
    random = np.random.default_rng(0)
    batches = -(-rows // BATCH)
    movies = [random.permutation(40).reshape(BATCH, 5) for _ in range(batches)]
    users = [random.permutation(60)[:BATCH] for _ in range(batches)]
    seen = np.concatenate(movies)[:rows].astype("int32")
    x = {
        "watched": seen[:, :3],
        "liked": seen[:, 3:],
        "user": np.concatenate(users)[:rows].astype("int32"),
    }
    return x, random.integers(-1, 4, (rows, LIST)).astype("float32")


def features() -> dict[str, Any]:
    """Three features, two of one table."""
    layers = keras_rs.layers
    table = layers.TableConfig
    movies = table("movies", 40, 4, combiner="mean", initializer=_uniform(1))
    users = table("users", 60, 6, initializer=_uniform(2))
    return {
        "watched": layers.FeatureConfig("watched", movies, (BATCH, 3), (BATCH, 4)),
        "liked": layers.FeatureConfig("liked", movies, (BATCH, 2), (BATCH, 4)),
        "user": layers.FeatureConfig("user", users, (BATCH,), (BATCH, 6)),
    }


def _uniform(seed: int) -> Any:
    return keras.initializers.RandomUniform(-0.5, 0.5, seed=seed)


class Ranking(keras.Model):
    """Scores of the items of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = keras_rs.layers.DistributedEmbedding(features())
        self.cross = keras_rs.layers.FeatureCross(kernel_initializer=_uniform(3))
        self.scores = keras.layers.Dense(LIST, kernel_initializer=_uniform(4))

    def call(self, inputs: dict[str, Any]) -> Any:
        found = self.embeddings(inputs)
        together = keras.ops.concatenate([found[name] for name in sorted(found)], -1)
        return self.scores(self.cross(together))


def ranking_model(optimizer: Any, loss: Any = None) -> Any:
    """A compiled model, by default with `PairwiseHingeLoss`."""
    model = Ranking()
    metrics = keras_rs.metrics
    model.compile(
        optimizer,
        loss or keras_rs.losses.PairwiseHingeLoss(),
        metrics=[
            metrics.NDCG(k=3, name="ndcg"),
            metrics.MeanReciprocalRank(name="mrr"),
            metrics.PrecisionAtK(k=2, name="precision"),
        ],
    )
    return model


#: Ids of each feature of `dlrm`.
VOCABULARY = {"user": 60, "item": 40, "city": 16}


def clicks(rows: int = 30) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Numbers, ids that are different in each batch, and whether there was a click."""
    random = np.random.default_rng(0)
    x = {"numbers": random.normal(size=(rows, 5)).astype("float32")}
    for name, count in VOCABULARY.items():
        own = [random.permutation(count)[:BATCH] for _ in range(-(-rows // BATCH))]
        x[name] = np.concatenate(own)[:rows].astype("int32")
    return x, (x["numbers"].sum(1, keepdims=True) + x["item"][:, None] % 3 > 1) * 1.0


class Dlrm(keras.Model):
    """DLRM as in the examples of keras_rs: dot products of features."""

    def __init__(self) -> None:
        super().__init__()
        layers = keras_rs.layers
        features = {}
        for i, (name, count) in enumerate(VOCABULARY.items()):
            table = layers.TableConfig(name, count, 4, initializer=_uniform(i))
            features[name] = layers.FeatureConfig(name, table, (BATCH,), (BATCH, 4))
        self.embeddings = layers.DistributedEmbedding(features)
        self.bottom = _dense(8, 4)
        self.interaction = layers.DotInteraction()
        self.top = _dense(8, 1)

    def call(self, inputs: dict[str, Any]) -> Any:
        numbers = self.bottom(inputs["numbers"])
        found = self.embeddings({name: inputs[name] for name in VOCABULARY})
        products = self.interaction([numbers, *(found[name] for name in VOCABULARY)])
        return self.top(keras.ops.concatenate([numbers, products], axis=-1))


def _dense(*units: int) -> Any:
    kinds = ["relu"] * (len(units) - 1) + [None]
    return keras.Sequential(
        [
            keras.layers.Dense(n, kind, kernel_initializer=_uniform(n))
            for n, kind in zip(units, kinds, strict=True)
        ]
    )


def dlrm() -> Any:
    """A compiled `Dlrm`."""
    model = Dlrm()
    model.compile(
        keras.optimizers.Adagrad(0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model
