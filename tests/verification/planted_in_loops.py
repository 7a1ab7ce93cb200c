"""Mistakes in custom loops on uneven batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops
from verification.planted_in_fit import BATCH, SCALED, Planted, arrays, dense

import keras_strategies as ks

per_row = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)


def rows_of(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], "float32")


def global_mean(losses: Any, rows: float) -> Any:
    return ops.sum(losses) / rows


def own_mean(losses: Any, rows: float) -> Any:
    return ops.mean(losses)


def mean_of_means(losses: Any, rows: float) -> Any:
    return ops.mean(losses) / ks.get_replica_context().num_replicas_in_sync


def apply(model: Any, grads: Any) -> None:
    model.optimizer.apply(grads, model.trainable_variables)


def sound_loss(strategy: Any, losses: Any, rows: Any) -> Any:
    return strategy.reduce("SUM", losses) / strategy.reduce("SUM", rows)


def loop(
    to_scalar: Callable[[Any, float], Any] = global_mean,
    apply: Callable[[Any, Any], None] = apply,
    logs: Callable[[Any, Any, Any], Any] = sound_loss,
    change: Callable[[Any], Any] = lambda x: x,
    regularized: Callable[[Any], Any] | None = None,
) -> Callable[[Any, Any, Any], Any]:
    """A step of a loop, sound by default."""

    def step(strategy: Any, model: Any, batch: Any) -> Any:
        own = strategy.experimental_local_results(batch[1])
        global_rows = float(sum(each.shape[0] for each in own))

        def on_replica(x: Any, y: Any) -> Any:
            x = change(x)

            def loss_fn() -> Any:
                outputs = model(x, training=True)
                losses = per_row(y, outputs)
                loss = to_scalar(losses, global_rows)
                if regularized is not None:
                    loss = loss + regularized(outputs)
                return loss, losses

            variables = model.trainable_variables
            (_, losses), grads = ks.value_and_grad(loss_fn, variables, has_aux=True)()
            apply(model, grads)
            return ops.sum(losses), rows_of(x)

        losses, rows = strategy.run(on_replica, args=batch)
        return logs(strategy, losses, rows)

    return step


def first(strategy: Any, value: Any) -> Any:
    return strategy.experimental_local_results(value)[0]


def means(strategy: Any, losses: Any, rows: Any) -> Any:
    own = strategy.experimental_local_results(losses)
    counts = strategy.experimental_local_results(rows)
    every = [float(a) / float(b) for a, b in zip(own, counts, strict=True)]
    return sum(every) / len(every)


def summed_means(strategy: Any, losses: Any, rows: Any) -> Any:
    own = strategy.experimental_local_results(losses)
    counts = strategy.experimental_local_results(rows)
    return sum(float(a) / float(b) for a, b in zip(own, counts, strict=True))


def loss_of_first(strategy: Any, losses: Any, rows: Any) -> Any:
    return float(first(strategy, losses)) / float(first(strategy, rows))


def metric_of_means(strategy: Any, losses: Any, rows: Any) -> Any:
    return {
        "loss": sound_loss(strategy, losses, rows),
        "perplexity": means(strategy, losses, rows),
    }


def metric_of_first(strategy: Any, losses: Any, rows: Any) -> Any:
    return {
        "loss": sound_loss(strategy, losses, rows),
        "last": loss_of_first(strategy, losses, rows),
    }


def unreduced(model: Any, grads: Any) -> None:
    with ks.gradients_are_aggregated():
        apply(model, grads)


def summed_twice(model: Any, grads: Any) -> None:
    apply(model, ks.get_replica_context().all_reduce("SUM", grads))


def mean_of_sums(model: Any, grads: Any) -> None:
    grads = ks.get_replica_context().all_reduce("MEAN", grads)
    with ks.gradients_are_aggregated():
        apply(model, grads)


def by_root(model: Any, grads: Any) -> None:
    count = ks.get_replica_context().num_replicas_in_sync
    apply(model, [g / count**0.5 for g in grads])


def clipped(model: Any, grads: Any) -> None:
    norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
    apply(model, [g * ops.minimum(1.0, 0.05 / norm) for g in grads])


def normalized(model: Any, grads: Any) -> None:
    apply(model, [g / (ops.max(ops.abs(g)) + 1e-6) for g in grads])


def without_last(model: Any, grads: Any) -> None:
    variables = model.trainable_variables
    if ks.get_replica_context().num_replicas_in_sync > 1:
        grads = [*grads[:-1], ops.zeros_like(grads[-1])]
    model.optimizer.apply(grads, variables)


def noisy(x: Any) -> Any:
    return x + ops.convert_to_tensor(np.random.normal(size=6), x.dtype)


def standardized(x: Any) -> Any:
    return x - ops.mean(x, axis=0, keepdims=True)


def contrastive(outputs: Any) -> Any:
    products = ops.matmul(outputs, ops.transpose(outputs))
    return 0.1 * ops.mean(products) / ks.get_replica_context().num_replicas_in_sync


def variance(outputs: Any) -> Any:
    return -0.1 * ops.mean(ops.var(outputs, axis=0))


class ConstantSeed(keras.layers.Layer):
    """The same mask on each replica."""

    def call(self, x: Any) -> Any:
        return x * uniform((ops.shape(x)[0], 5))


def uniform(shape: Any) -> Any:
    """Numbers of the framework, with the same seed on each replica."""
    if keras.backend.backend() == "torch":
        import torch

        return torch.rand(shape, generator=torch.Generator().manual_seed(3))
    if keras.backend.backend() == "jax":
        import jax

        return jax.random.uniform(jax.random.key(3), shape)
    import tensorflow as tf

    return tf.random.stateless_uniform(shape, (3, 3))


class BatchMax(keras.layers.Layer):
    """Of the rows themselves: sums over rows would be exchanged."""

    def call(self, x: Any) -> Any:
        return x - ops.max(x, axis=0, keepdims=True)


class Spread(keras.layers.Layer):
    """Divides by the median size of all rows."""

    def call(self, x: Any) -> Any:
        return x / (ops.median(ops.abs(x), axis=0, keepdims=True) + 0.1)


def faster(strategy: Any, model: Any, batch: Any) -> Any:
    model.optimizer.learning_rate = 0.1 * strategy.num_replicas_in_sync
    return loop()(strategy, model, batch)


#: JAX refuses collectives of replicas with different numbers of rows.
COLLECTIVES = {"backends": ("torch", "tensorflow")}
OF_REPLICA = "per_replica_function"


def data() -> dict[str, Any]:
    x, y = arrays()
    return {"x": x, "y": y, "batch_size": BATCH}


def _case(
    name: str, cause: str, kind: str, step: Any, *layers: Any, **options: Any
) -> Planted:
    build = lambda: dense(*[each() for each in layers])  # noqa: E731
    return Planted(f"loop_{name}", cause, kind, build, data, step, **options)


CASES = [
    _case("own_means", SCALED, "gradient", loop(own_mean)),
    _case("mean_of_means", "mean_of_means", "gradient", loop(mean_of_means)),
    _case("log_of_means", "mean_of_means", "loss", loop(logs=means)),
    _case("log_of_sums", SCALED, "loss", loop(logs=summed_means)),
    _case("log_of_first", "one_replica_only", "loss", loop(logs=loss_of_first)),
    _case("metric_of_means", "mean_of_means", "metric", loop(logs=metric_of_means)),
    _case("metric_of_first", "one_replica_only", "metric", loop(logs=metric_of_first)),
    _case("unreduced", "one_replica_only", "gradient", loop(apply=unreduced)),
    _case("summed_twice", SCALED, "gradient", loop(apply=summed_twice), **COLLECTIVES),
    _case("mean_of_sums", SCALED, "gradient", loop(apply=mean_of_sums), **COLLECTIVES),
    _case("by_root", SCALED, "gradient", loop(apply=by_root)),
    _case("clipped", OF_REPLICA, "gradient", loop(apply=clipped)),
    _case("normalized", OF_REPLICA, "gradient", loop(apply=normalized)),
    _case("without_last", "variable_left_out", "gradient", loop(apply=without_last)),
    _case("noisy", "unseeded_random_numbers", "", loop(change=noisy)),
    _case("standardized", OF_REPLICA, "loss", loop(change=standardized)),
    _case("contrastive", OF_REPLICA, "gradient", loop(regularized=contrastive)),
    _case("variance", OF_REPLICA, "gradient", loop(regularized=variance)),
    _case("constant_seed", "same_random_numbers", "output", loop(), ConstantSeed),
    _case("batch_max", "mixes_rows", "output", loop(), BatchMax),
    _case("spread", "mixes_rows", "output", loop(), Spread),
    _case("faster", "learning_rate_scaled", "slot", faster),
]
SOUND = _case("sound", "", "", loop())
