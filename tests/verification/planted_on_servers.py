"""Mistakes of scripts that train with parameter servers, one step after the other."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops
from verification import planted_in_fit
from verification.planted_in_fit import Planted, arrays, compiled, dense
from verification.planted_in_loops import per_row

import keras_strategies as ks


def workers() -> int:
    return len(ks.get_strategy().extended.worker_devices)


def rate_of_workers() -> Any:
    return dense(optimizer=keras.optimizers.SGD(0.1 / workers()))


def batch_of_workers() -> dict[str, Any]:
    return planted_in_fit.data() | {"batch_size": 4 * workers()}


def shard_of_worker() -> dict[str, Any]:
    x, y = arrays(rows=42)
    return planted_in_fit.data() | {"x": x[:: workers()], "y": y[:: workers()]}


def table() -> Any:
    layers = keras.layers
    embedded = [keras.Input((3,), dtype="int32"), layers.Embedding(11, 4)]
    last = [layers.Flatten(), layers.Dense(3)]
    model = keras.Sequential([*embedded, *last])
    return compiled(model, optimizer=keras.optimizers.Adam(0.01))


def ids() -> dict[str, Any]:
    random = np.random.default_rng(0)
    # Of each id at most one in a batch: Keras's Adam on TensorFlow squares the
    # gradients of lookups one by one.
    x = np.concatenate([random.permutation(11)[:6].reshape(2, 3) for _ in range(6)])
    y = random.integers(0, 3, 12)
    return {"x": x.astype("int32"), "y": y, "batch_size": 2, "shuffle": False}


def step(strategy: Any, model: Any, batch: Any, divisor: float = 1.0) -> Any:
    """A step of a loop, on a worker; sound by default."""

    def on_worker(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            rows = ops.cast(ops.shape(x)[0], "float32")
            return ops.sum(per_row(y, model(x, training=True))) / rows

        variables = model.trainable_variables
        loss, grads = ks.value_and_grad(loss_fn, variables)()
        model.optimizer.apply([g / divisor for g in grads], variables)
        return loss

    return strategy.run(on_worker, args=batch)


def divided(strategy: Any, model: Any, batch: Any) -> Any:
    """Gradients are divided by the workers."""
    return step(strategy, model, batch, len(strategy.extended.worker_devices))


CASES = [
    Planted("server_rate", "learning_rate_scaled", "setting", rate_of_workers),
    Planted("server_batch", "batch_size_per_replica", "batch", data=batch_of_workers),
    Planted("server_shard", "data_depends_on_replicas", "batch", data=shard_of_worker),
    Planted("server_gradient", "scaled_by_replicas", "gradient", step=divided),
]
