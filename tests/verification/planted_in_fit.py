"""Mistakes in models, layers, losses, metrics and data, trained by `fit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import ops

import keras_strategies as ks

ROWS, BATCH = 21, 7


@dataclass(frozen=True)
class Planted:
    """A mistake, and what `ks.verify` has to say.

    Args:
        name: str, what the test is called.
        cause: str, the cause that is to be named; several with "|" where more than one
            is right.
        kind: str, what differs at first; empty if several are right.
        build, data, step, options: arguments of `ks.verify`.
        strategy: options of `ks.MirroredStrategy`.
        backends: tuple of str.
    """

    name: str
    cause: str
    kind: str = ""
    build: Callable[[], Any] | None = None
    data: Any = None
    step: Any = None
    strategy: dict[str, Any] = field(default_factory=dict)
    backends: tuple[str, ...] = ("jax", "torch", "tensorflow")


def replicas() -> int:
    """What scripts should not ask for."""
    return ks.get_strategy().num_replicas_in_sync


def arrays(seed: Any = 0, rows: int = ROWS) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, 6)).astype("float32")
    return x, random.integers(0, 3, rows)


def data() -> dict[str, Any]:
    x, y = arrays()
    return {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}


def loss_of() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(model: Any, **options: Any) -> Any:
    model.compile(
        **{"optimizer": keras.optimizers.SGD(0.1), "loss": loss_of()} | options
    )
    return model


def dense(*layers: Any, kind: Any = keras.Sequential, **options: Any) -> Any:
    """A model with more layers after the first one."""
    first, last = keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)
    return compiled(kind([keras.Input((6,)), first, *layers, last]), **options)


# Settings.


def scaled_rate() -> Any:
    return dense(optimizer=keras.optimizers.SGD(0.1 * replicas()))


def root_of_rate() -> Any:
    return dense(optimizer=keras.optimizers.Adam(0.01 * replicas() ** 0.5))


def scaled_schedule() -> Any:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1 * replicas(), 10, 0.9)
    return dense(optimizer=keras.optimizers.SGD(schedule))


def scaled_clipping() -> Any:
    return dense(optimizer=keras.optimizers.SGD(0.1, clipnorm=1.0 / replicas()))


def scaled_decay() -> Any:
    return dense(optimizer=keras.optimizers.AdamW(0.01, weight_decay=0.1 / replicas()))


def accumulation_of_replicas() -> Any:
    steps = None if replicas() == 1 else 2
    return dense(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps))


def smoothing_of_replicas() -> Any:
    loss = keras.losses.CategoricalCrossentropy(True, label_smoothing=0.1 * replicas())
    return dense(loss=loss)


def wider() -> Any:
    return dense(keras.layers.Dense(4 * replicas()))


def deeper() -> Any:
    return dense(*[keras.layers.Dense(4) for _ in range(replicas())])


def policy_of_replicas() -> Any:
    policy = "mixed_bfloat16" if replicas() > 1 else "float32"
    return dense(keras.layers.Dense(4, dtype=policy))


# Data.


def batch_per_replica() -> dict[str, Any]:
    return data() | {"batch_size": 4 * replicas()}


def batch_divided() -> dict[str, Any]:
    return data() | {"batch_size": 8 // replicas()}


def unseeded_data() -> dict[str, Any]:
    x, y = arrays(None)
    return data() | {"x": x, "y": y}


def unseeded_order() -> dict[str, Any]:
    x, y = arrays()
    order = np.random.default_rng().permutation(ROWS)
    return data() | {"x": x[order], "y": y[order]}


def order_of_replicas() -> dict[str, Any]:
    x, y = arrays()
    order = np.random.default_rng(replicas()).permutation(ROWS)
    return data() | {"x": x[order], "y": y[order]}


def shard() -> dict[str, Any]:
    x, y = arrays(rows=42)
    return data() | {"x": x[:: replicas()], "y": y[:: replicas()]}


def padded() -> dict[str, Any]:
    x, y = arrays(rows=7)
    missing = -len(x) % (3 * replicas())
    x, y = (np.concatenate([each, each[:missing]]) for each in (x, y))
    return data() | {"x": x, "y": y}


def one_hot() -> dict[str, Any]:
    return {**data(), "y": np.eye(3, dtype="float32")[data()["y"]]}


# Layers.


class OwnNoise(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng()

    def call(self, x: Any) -> Any:
        return x + ops.convert_to_tensor(self.random.normal(size=5), x.dtype)


class GlobalNoise(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x + ops.convert_to_tensor(_random.normal(size=5), x.dtype)


_random = np.random.default_rng()


class Counted(keras.layers.Layer):
    """Warms up by calls, which it counts in Python; programs count none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, x: Any) -> Any:
        self.calls += 1
        # A strategy calls it more often: to build, to prove and to train.
        return x * (1.0 if self.calls < 3 * replicas() else 1.5)


class OfReplicas(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x / replicas()


@ks.row_wise
class Centered(keras.layers.Layer):
    """Declared to be of rows, and is not."""

    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0, keepdims=True)


@ks.row_wise
class Cumulative(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return ops.cumsum(x, axis=0)


@ks.row_wise
class Saturated(keras.layers.Layer):
    """Rows depend on one another for large values only, which random rows lack."""

    def call(self, x: Any) -> Any:
        largest = ops.max(ops.abs(x))
        return ops.where(largest > 50.0, x / largest, x)


def large() -> dict[str, Any]:
    x, y = arrays()
    x[0] *= 100.0
    return data() | {"x": x, "y": y}


def saturated() -> Any:
    layers = [keras.Input((6,)), Saturated(), keras.layers.Dense(3)]
    return compiled(keras.Sequential(layers))


# Losses, metrics and steps.


class DividedLoss(keras.Sequential):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) / replicas()


class MultipliedLoss(keras.Sequential):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * replicas()


class RootOfLoss(keras.Sequential):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) / replicas() ** 0.5


def weights_of_replicas() -> Any:
    return dense(loss_weights=1.0 / replicas())


class ScaledMetric(keras.metrics.SparseCategoricalAccuracy):
    """Divides by the replicas once more."""

    def result(self) -> Any:
        return super().result() / replicas()


class ScaledOptimizer(keras.optimizers.SGD):
    """Takes gradients for means."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        return super().apply([g * replicas() for g in grads], trainable_variables)


def scaled_gradients() -> Any:
    return dense(optimizer=ScaledOptimizer(0.1))


def trains_fewer() -> Any:
    model = dense()
    if replicas() > 1:
        model.layers[-1].bias.trainable = False
    return compiled(model)


SCALED, SETTING = "scaled_by_replicas", "setting_depends_on_replicas"
RATE, DATA = "learning_rate_scaled", "data_depends_on_replicas"
MODEL, DECLARED = "model_depends_on_replicas", "wrong_declaration"
CASES = [
    Planted("scaled_rate", RATE, "setting", scaled_rate),
    Planted("root_of_rate", RATE, "setting", root_of_rate),
    Planted("scaled_schedule", RATE, "setting", scaled_schedule),
    Planted("scaled_clipping", SETTING, "setting", scaled_clipping),
    Planted("scaled_decay", SETTING, "setting", scaled_decay),
    Planted("accumulation", f"{SETTING}|{MODEL}", "setting", accumulation_of_replicas),
    Planted("smoothing", SETTING, "setting", smoothing_of_replicas, one_hot),
    Planted("wider", MODEL, "setting", wider),
    Planted("deeper", MODEL, "setting", deeper),
    Planted("policy", "autocast_lost", "dtype policy", policy_of_replicas),
    Planted(
        "batch_per_replica", "batch_size_per_replica", "batch", data=batch_per_replica
    ),
    Planted("batch_divided", "batch_size_per_replica", "batch", data=batch_divided),
    Planted("unseeded_data", "unseeded_data", "batch", data=unseeded_data),
    Planted("unseeded_order", "unseeded_data", "batch", data=unseeded_order),
    Planted("order", "order_of_rows", "batch", data=order_of_replicas),
    Planted("shard", DATA, "batch", data=shard),
    Planted("padded", DATA, "batch", data=padded),
    Planted("own_noise", "unseeded_random_numbers", "", lambda: dense(OwnNoise())),
    Planted("global_noise", "not_repeatable", "", lambda: dense(GlobalNoise())),
    Planted(
        "counted", "python_state", "", lambda: dense(Counted()), backends=("torch",)
    ),
    Planted("of_replicas", SCALED, "output", lambda: dense(OfReplicas())),
    Planted("centered", DECLARED, "declaration", lambda: dense(Centered())),
    Planted("cumulative", DECLARED, "declaration", lambda: dense(Cumulative())),
    Planted("saturated", DECLARED, "declaration", saturated, large),
    Planted(
        "batch_norm",
        "mixes_rows|per_replica_function",
        build=lambda: dense(keras.layers.BatchNormalization()),
        strategy={"sync_batch_norm": False},
        backends=("torch", "tensorflow"),
    ),
    Planted("divided_loss", SCALED, "loss", lambda: dense(kind=DividedLoss)),
    Planted("multiplied_loss", SCALED, "loss", lambda: dense(kind=MultipliedLoss)),
    Planted("root_of_loss", SCALED, "loss", lambda: dense(kind=RootOfLoss)),
    Planted("loss_weights", SCALED, "loss", weights_of_replicas),
    Planted("scaled_metric", SCALED, "metric", lambda: dense(metrics=[ScaledMetric()])),
    Planted("scaled_optimizer", RATE, "variable", scaled_gradients),
    Planted("trains_fewer", f"{MODEL}|variable_left_out", "", trains_fewer),
]
