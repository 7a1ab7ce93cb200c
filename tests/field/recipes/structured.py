"""Graphs, recommenders, mixtures of experts, vision transformers, densities."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from harness.data import Data
from keras import layers, ops

from field.compare import FieldCase
from field.recipes.common import crossentropy, digits, matched, random_rows, ready, sgd
from field.recipes.sequences import Block, Positions
from field.steps import StepModel

NODES, EDGES = 12, 30
#: How many of them there are.
IDS = {"user": 30, "item": 20, "day": 7}


# --- Graphs -------------------------------------------------------------------


class GraphConvolution(layers.Layer):
    """Adds up messages along edges; nodes and edges of one graph."""

    def __init__(self, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.message, self.update = layers.Dense(units), layers.Dense(units, "tanh")

    def build(self, shapes: Any) -> None:
        self.message.build(shapes[0])
        self.update.build((*shapes[0][:-1], shapes[0][-1] + self.message.units))

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        sent = ops.take(self.message(nodes), edges[:, 0], axis=0)
        count = ops.shape(nodes)[0]
        received = ops.segment_sum(sent, edges[:, 1], num_segments=count)
        return self.update(ops.concatenate([nodes, received], axis=-1))


class NodeClassifier(keras.Model):
    """A fixed graph; the input is the numbers of nodes to classify."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(1)
        self.nodes = ops.convert_to_tensor(random_rows(NODES, 6))
        self.edges = ops.convert_to_tensor(
            random.integers(0, NODES, (EDGES, 2)).astype("int32")
        )
        self.convolutions = [GraphConvolution(8), GraphConvolution(8)]
        self.out = layers.Dense(3)
        self.call(ops.zeros((1,), "int32"))

    def call(self, numbers: Any) -> Any:
        x = self.nodes
        for convolution in self.convolutions:
            x = convolution([x, self.edges])
        return self.out(ops.take(x, ops.reshape(numbers, (-1,)), axis=0))


def node_numbers(rows: int) -> Data:
    random = np.random.default_rng(2)
    numbers = random.permutation(NODES)[:rows].astype("int32")
    return Data(numbers, random.integers(0, 3, rows).astype("int32"))


def whole_graphs() -> keras.Model:
    """The inputs of a batch are the nodes and the edges of one graph."""
    nodes, edges = keras.Input((6,)), keras.Input((2,), dtype="int32")
    x = GraphConvolution(8)([nodes, edges])
    x = GraphConvolution(8)([x, edges])
    return ready(keras.Model((nodes, edges), layers.Dense(3)(x)), loss=crossentropy())


class _Graphs(keras.utils.PyDataset):
    """Three graphs of other sizes, a class for each node."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        nodes, edges = NODES - 2 * index, EDGES - 7 * index
        random = np.random.default_rng(index)
        pairs = random.integers(0, nodes, (edges, 2)).astype("int32")
        classes = random.integers(0, 3, nodes).astype("int32")
        return (random_rows(nodes, 6, seed=index), pairs), classes


def graphs(data: Data, batch: int) -> dict[str, Any]:
    return {"x": _Graphs()}


# --- Recommenders -------------------------------------------------------------


class Cross(layers.Layer):
    """A cross layer: x0 * (W x + b) + x."""

    def build(self, shape: Any) -> None:
        self.dense = layers.Dense(shape[0][-1])
        self.dense.build(shape[0])

    def call(self, inputs: Any) -> Any:
        first, x = inputs
        return first * self.dense(x) + x


def deep_and_cross() -> keras.Model:
    ids = {name: keras.Input((1,), dtype="int32", name=name) for name in IDS}
    rows = [layers.Flatten()(layers.Embedding(IDS[n], 4)(i)) for n, i in ids.items()]
    first = layers.Concatenate()(rows)
    crossed = Cross()([first, Cross()([first, first])])
    deep = layers.Dense(8, "relu")(layers.Dense(8, "relu")(first))
    outputs = layers.Dense(1)(layers.Concatenate()([crossed, deep]))
    model = keras.Model(ids, outputs)
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    return ready(model, sgd(0.2), loss, metrics=["auc"])


def clicks(rows: int) -> Data:
    random = np.random.default_rng(3)
    x = {n: random.integers(0, s, (rows, 1)).astype("int32") for n, s in IDS.items()}
    return Data(x, random.integers(0, 2, (rows, 1)).astype("float32"))


class TwoTowers(StepModel):
    """Items of the other rows of a batch are the negatives."""

    def __init__(self) -> None:
        super().__init__()
        self.users = keras.Sequential([layers.Embedding(30, 8), layers.Dense(4)])
        self.items = keras.Sequential([layers.Embedding(20, 8), layers.Dense(4)])
        self.users.build((None,))
        self.items.build((None,))

    def objective(self, data: Any) -> Any:
        x, _ = data
        users, items = self.users(x["user"][:, 0]), self.items(x["item"][:, 0])
        return ops.sum(matched(ops.matmul(users, ops.transpose(items)) / 0.1))


# --- Mixtures of experts ------------------------------------------------------


class Experts(layers.Layer):
    """The best expert of each row, and a loss that balances them over the batch."""

    def __init__(self, count: int, units: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.count = count
        self.router = layers.Dense(count)
        self.experts = [layers.Dense(units, "tanh") for _ in range(count)]

    def build(self, shape: Any) -> None:
        for layer in (self.router, *self.experts):
            layer.build(shape)

    def call(self, x: Any) -> Any:
        chance = ops.softmax(self.router(x))
        chosen = ops.one_hot(ops.argmax(chance, axis=-1), self.count)
        share, mean = ops.mean(chosen, axis=0), ops.mean(chance, axis=0)
        self.add_loss(self.count * ops.sum(share * mean))
        outputs = ops.stack([expert(x) for expert in self.experts], axis=1)
        return ops.sum(outputs * (chosen * chance)[..., None], axis=1)


def mixture() -> keras.Model:
    image = keras.Input((8, 8, 1))
    x = Experts(4, 8)(layers.Dense(16, "relu")(layers.Flatten()(image)))
    return ready(keras.Model(image, layers.Dense(10)(x)), loss=crossentropy())


# --- Vision -------------------------------------------------------------------


class Patches(layers.Layer):
    """Squares of 4 x 4 pixels, (rows, 4, 16)."""

    def call(self, images: Any) -> Any:
        x = ops.reshape(images, (-1, 2, 4, 2, 4))
        return ops.reshape(ops.transpose(x, (0, 1, 3, 2, 4)), (-1, 4, 16))


def vision_transformer() -> keras.Model:
    image = keras.Input((8, 8, 1))
    x = Block(8)(Positions()(layers.Dense(8)(Patches()(image))))
    model = keras.Model(image, layers.Dense(10)(layers.Flatten()(x)))
    return ready(model, loss=crossentropy(), metrics=["accuracy"])


def mlp_mixer() -> keras.Model:
    image = keras.Input((8, 8, 1))
    x = layers.Dense(8)(Patches()(image))
    turned = layers.Permute((2, 1))(layers.LayerNormalization()(x))
    turned = layers.Dense(4)(layers.Dense(8, "gelu")(turned))
    x = layers.Add()([x, layers.Permute((2, 1))(turned)])
    hidden = layers.Dense(16, "gelu")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dense(8)(hidden)])
    model = keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    return ready(model, loss=crossentropy())


# --- Densities ----------------------------------------------------------------


def probabilistic() -> keras.Model:
    """The mean and the deviation of the target, by its likelihood."""
    features = keras.Input((6,))
    hidden = layers.Dense(8, "tanh")(features)
    mean, raw = layers.Dense(1)(hidden), layers.Dense(1)(hidden)
    outputs = layers.Concatenate()([mean, layers.Activation("softplus")(raw)])

    def likelihood(y_true: Any, y_pred: Any) -> Any:
        deviation = y_pred[:, 1:] + 1e-2
        error = (y_true - y_pred[:, :1]) / deviation
        return ops.mean(0.5 * ops.square(error) + ops.log(deviation), axis=-1)

    return ready(keras.Model(features, outputs), loss=likelihood)


def measured(rows: int) -> Data:
    x = random_rows(rows, 6)
    return Data(x, x[:, :1] * x[:, 1:2] + 0.1 * random_rows(rows, 1, seed=1))


CASES = [
    FieldCase(
        "graph_nodes",
        lambda: ready(NodeClassifier(), loss=crossentropy()),
        node_numbers,
    ),
    FieldCase("graph_per_batch", whole_graphs, node_numbers, feed=graphs),
    FieldCase("deep_and_cross", deep_and_cross, clicks),
    FieldCase("two_towers", lambda: ready(TwoTowers()), clicks),
    FieldCase("mixture_of_experts", mixture, digits),
    FieldCase("vision_transformer", vision_transformer, digits),
    FieldCase("mlp_mixer", mlp_mixer, digits),
    FieldCase("probabilistic", probabilistic, measured),
]
