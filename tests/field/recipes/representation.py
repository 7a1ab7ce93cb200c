"""Contrastive, metric and self-supervised learning, distillation, consistency."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from harness.data import Data
from keras import layers, ops

from field.compare import FieldCase
from field.recipes.common import (
    convolutional,
    crossentropy,
    digits,
    losses_of,
    matched,
    ready,
    sgd,
)
from field.steps import StepModel


def views(rows: int) -> Data:
    """Each image twice, moved by a pixel and with noise, and its label."""
    images = digits(rows).x
    random = np.random.default_rng(9)
    noise = random.normal(0, 0.1, (2, *images.shape)).astype("float32")
    moved = np.roll(images, 1, axis=2)
    return Data({"a": images + noise[0], "b": moved + noise[1]}, digits(rows).y)


def triplets(rows: int) -> Data:
    data = digits(3 * rows)
    parts = {n: data.x[i::3] for i, n in enumerate(("anchor", "same", "other"))}
    return Data(parts, None)


def pairs(rows: int) -> Data:
    data = digits(2 * rows)
    same = (data.y[::2] == data.y[1::2]).astype("float32")
    return Data((data.x[::2], data.x[1::2]), same[:, None])


def unit(vectors: Any) -> Any:
    return vectors / ops.sqrt(ops.sum(ops.square(vectors), -1, keepdims=True) + 1e-6)


def dense(units: int) -> keras.layers.Layer:
    """A layer of vectors of eight numbers."""
    layer = layers.Dense(units)
    layer.build((None, 8))
    return layer


class SimCLR(StepModel):
    """Both views of an image are to be most similar among the batch's."""

    def objective(self, data: Any) -> Any:
        x, _ = data
        a = unit(self.projection(self.encoder(x["a"], training=True)))
        b = unit(self.projection(self.encoder(x["b"], training=True)))
        similar = ops.matmul(a, ops.transpose(b)) / 0.5
        return ops.mean(matched(similar)) + ops.mean(matched(ops.transpose(similar)))


class SupervisedContrastive(keras.losses.Loss):
    """All images of one label are to be similar."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        vectors = unit(y_pred)
        similar = ops.matmul(vectors, ops.transpose(vectors)) / 0.5
        labels = ops.reshape(y_true, (-1, 1))
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), "float32")
        share = same / ops.sum(same, axis=1, keepdims=True)
        return -ops.sum(share * ops.log_softmax(similar, axis=-1), axis=-1)


def supervised_contrastive() -> keras.Model:
    return ready(convolutional(8), loss=SupervisedContrastive())


class MetricLearning(StepModel):
    """Similarities of anchors and positives of the batch are logits."""

    def call(self, x: Any, training: bool = False) -> Any:
        return unit(self.encoder(x, training=training))

    def objective(self, data: Any) -> Any:
        x, _ = data
        anchors, positives = self(x["a"], training=True), self(x["b"], training=True)
        return ops.mean(matched(ops.einsum("ae,pe->ap", anchors, positives) / 0.2))


def siamese() -> keras.Model:
    """One tower twice, a distance, and the contrastive loss of pairs."""
    left, right = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))
    tower = convolutional(6)
    apart = tower(left) - tower(right)
    distance = ops.sqrt(ops.sum(ops.square(apart), axis=-1, keepdims=True) + 1e-6)
    model = keras.Model((left, right), distance)

    def contrastive(y_true: Any, y_pred: Any) -> Any:
        far = ops.square(ops.maximum(1.0 - y_pred, 0.0))
        return ops.mean(y_true * ops.square(y_pred) + (1 - y_true) * far)

    return ready(model, loss=contrastive)


class Triplet(StepModel):
    def objective(self, data: Any) -> Any:
        anchor, same, other = (
            self.encoder(data[key], training=True)
            for key in ("anchor", "same", "other")
        )
        near = ops.sum(ops.square(anchor - same), axis=-1)
        far = ops.sum(ops.square(anchor - other), axis=-1)
        return ops.mean(ops.relu(near - far + 0.5))


class Distiller(keras.Model):
    """A student that learns from a teacher, by a `compute_loss` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = convolutional(10)
        self.teacher.trainable = False
        self.student = convolutional(10, norm=False)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.student(x, training=training)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        soft = ops.softmax(self.teacher(x, training=False) / 3.0)
        hard = super().compute_loss(x, y, y_pred, sample_weight, training)
        taught = keras.losses.kl_divergence(soft, ops.softmax(y_pred / 3.0))
        return 0.3 * hard + 0.7 * 9.0 * ops.mean(taught)


class Byol(StepModel):
    """A predictor of what a slowly following encoder makes of the other view."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = convolutional(8), convolutional(8)
        self.target.set_weights(self.online.get_weights())
        self.target.trainable = False
        self.predictor = dense(8)

    def step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        wanted_a = ops.stop_gradient(unit(self.target(x["b"], training=False)))
        wanted_b = ops.stop_gradient(unit(self.target(x["a"], training=False)))

        def loss() -> Any:
            a = unit(self.predictor(self.online(x["a"], training=True)))
            b = unit(self.predictor(self.online(x["b"], training=True)))
            return -ops.mean(ops.sum(a * wanted_a + b * wanted_b, axis=-1))

        found = self.minimize(loss, self.trainable_variables)
        for slow, fast in zip(self.target.weights, self.online.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        return {"objective": found}


class Queue(StepModel):
    """MoCo: negatives come from a queue of the keys of earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = convolutional(4, norm=False)
        self.queue = self.add_weight(
            shape=(8, 4), initializer="random_normal", trainable=False, name="queue"
        )

    def step(self, data: Any) -> dict[str, Any]:
        x, _ = data
        keys = ops.stop_gradient(unit(self.encoder(x["b"])))

        def loss() -> Any:
            queries = unit(self.encoder(x["a"], training=True))
            positive = ops.sum(queries * keys, axis=-1, keepdims=True)
            negative = ops.matmul(queries, ops.transpose(self.queue))
            logits = ops.concatenate([positive, negative], axis=-1) / 0.5
            return -ops.mean(ops.log_softmax(logits)[:, 0])

        found = self.minimize(loss, self.trainable_variables)
        self.queue.assign(ops.concatenate([keys, self.queue])[:8])
        return {"objective": found}


class Consistency(StepModel):
    """Weakly and strongly changed images are to have one answer."""

    def step(self, data: Any) -> dict[str, Any]:
        x, y = data
        strong = x + 0.5 * keras.random.normal(ops.shape(x), seed=self.seed)

        def loss() -> Any:
            weak = self.net(x, training=True)
            hard = losses_of(y, weak)
            answer = ops.stop_gradient(ops.softmax(weak))
            other = ops.softmax(self.net(strong, training=True))
            apart = keras.losses.kl_divergence(answer, other)
            return ops.mean(hard) + ops.mean(apart)

        return self.minimized(loss)


class SelfTraining(StepModel):
    """Confident answers become labels of the rows that have none (label -1)."""

    def objective(self, data: Any) -> Any:
        x, y = data
        logits = self.net(x, training=True)
        chance = ops.stop_gradient(ops.softmax(logits))
        sure = ops.cast(ops.max(chance, axis=-1) > 0.102, "float32")
        given = ops.cast(y >= 0, "float32")
        labels = ops.where(y >= 0, y, ops.cast(ops.argmax(chance, -1), y.dtype))
        use = ops.maximum(given, sure)
        return ops.sum(use * losses_of(labels, logits)) / (ops.sum(use) + 1e-6)


def half_labelled(rows: int) -> Data:
    data = digits(rows)
    return Data(data.x, np.where(np.arange(rows) % 2, -1, data.y).astype("int32"))


def unit_vectors() -> keras.Model:
    """Vectors of length one before the classes, short ones by a penalty."""
    images = keras.Input((8, 8, 1))
    vectors = convolutional(4)(images)
    vectors = layers.ActivityRegularization(l2=0.01)(vectors)
    model = keras.Model(images, layers.Dense(10)(layers.UnitNormalization()(vectors)))
    return ready(model, loss=crossentropy())


def simclr() -> keras.Model:
    return ready(SimCLR(encoder=convolutional(8), projection=dense(4)))


def distillation() -> keras.Model:
    return ready(Distiller(), loss=crossentropy(), metrics=["accuracy"])


def consistency() -> keras.Model:
    seed = keras.random.SeedGenerator(8)
    return ready(Consistency(net=convolutional(10), seed=seed))


def self_training() -> keras.Model:
    return ready(SelfTraining(net=convolutional(10, norm=False)), sgd(0.1))


CASES = [
    FieldCase("simclr", simclr, views),
    FieldCase("supervised_contrastive", supervised_contrastive, digits),
    FieldCase(
        "metric_learning",
        lambda: ready(MetricLearning(encoder=convolutional(8))),
        views,
    ),
    FieldCase("siamese", siamese, pairs),
    FieldCase("triplet", lambda: ready(Triplet(encoder=convolutional(6))), triplets),
    FieldCase("distillation", distillation, digits),
    FieldCase("byol", lambda: ready(Byol()), views),
    FieldCase("moco_queue", lambda: ready(Queue()), views),
    FieldCase("consistency", consistency, digits),
    FieldCase("self_training", self_training, half_labelled),
    FieldCase("unit_vectors", unit_vectors, digits),
]
