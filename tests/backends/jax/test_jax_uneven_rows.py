"""Rows that do not divide over the devices are sharded, as those that do."""

from __future__ import annotations

import math
from typing import Any

import jax
import keras
import numpy as np
import pytest
from backends.jax.jax_training import STRATEGIES, assert_same
from harness.strategies import MODEL_PARALLEL
from keras import layers, ops

from keras_strategies.engines.jax.fit.compiled_steps import CompiledStep
from keras_strategies.engines.jax.fit.hlo_collectives import sent_bytes

CLASSES = 5


def normal(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def convolutions() -> keras.Model:
    x = inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(8, 3, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU()(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(16, 3, strides=2, padding="same", groups=2)(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def language() -> keras.Model:
    """Integers, a mask, attention and dropout."""
    x = inputs = keras.Input((9,), dtype="int32")
    x = layers.Embedding(30, 16, mask_zero=True)(x)
    x = x + layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x)
    x = layers.Dropout(0.3, seed=4)(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def language_data(rows: int) -> Any:
    return np.random.default_rng(0).integers(0, 30, (rows, 9)).astype("int32")


class Contrast(keras.Model):
    """A custom step: rows of a batch are compared with each other."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = layers.Dense(16, activation="relu")
        self.out = layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **_) -> Any:
        similar = ops.matmul(y_pred, ops.transpose(y_pred))
        return ops.mean(ops.logsumexp(similar, axis=-1)) - ops.mean(y_pred[::-1] * 0.1)

    def train_step(self, state: Any, data: Any) -> Any:
        logs, state = super().train_step(state, data)
        return {**logs, "rows": ops.shape(data[0])[0] * ops.ones(())}, state


MODELS = {
    "convolutions": (convolutions, lambda rows: normal(rows, 12, 12, 3)),
    "language": (language, language_data),
    "contrast": (Contrast, lambda rows: normal(rows, 6)),
}


def labels(rows: int) -> Any:
    return np.random.default_rng(1).integers(0, CLASSES, rows).astype("int32")


def assert_as_one_device(results: Any, name: str, tolerance: float) -> None:
    """Compares what a function returns under two strategies."""
    found = results(STRATEGIES[name]())
    assert_same(found, results(STRATEGIES["one_device"]()), tolerance)


def compiled(name: str, **arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = MODELS[name][0]()
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["sparse_categorical_accuracy"],
        **arguments,
    )
    return model


def all_methods(strategy: Any, name: str, rows: int) -> Any:
    """Results of each method of a model on batches of this many rows."""
    x, y = MODELS[name][1](rows), labels(rows)
    weights = np.random.default_rng(2).uniform(0.2, 2, rows).astype("float32")
    with strategy.scope():
        model = compiled(name)
    fit = {"batch_size": rows, "verbose": 0, "shuffle": False}
    history = model.fit(x, y, epochs=2, **fit).history
    found = {"history": [history[key] for key in sorted(history)]}
    by_class = {i: 0.5 + i for i in range(CLASSES)}
    history = model.fit(x, y, class_weight=by_class, **fit).history
    found["class_weight"] = [history[key] for key in sorted(history)]
    found["train_on_batch"] = model.train_on_batch(x, y, sample_weight=weights)
    found["evaluate"] = model.evaluate(x, y, rows, 0)
    found["test_on_batch"] = model.test_on_batch(x, y)
    found["predict"] = [model.predict(x, rows, 0), model.predict_on_batch(x)]
    found["weights"] = model.get_weights()
    return found


@pytest.fixture
def programs(monkeypatch):
    """The compiled programs of steps, by their kind."""
    found: dict[str, list[Any]] = {"train": [], "test": [], "predict": []}
    jitted = CompiledStep.jitted

    def recording(self, state):
        program, executables = jitted(self, state), {}

        def run(*arguments):
            shapes = map(np.shape, jax.tree.leaves(arguments))
            key = (jax.tree.structure(arguments), *shapes)
            if key not in executables:
                executables[key] = program.lower(*arguments).compile()
                found[self._kind].append(executables[key])
            return executables[key](*arguments)

        return run

    monkeypatch.setattr(CompiledStep, "jitted", recording)
    return found


@pytest.mark.nightly(unless=["mirrored_4-contrast-1"])
@pytest.mark.parametrize(
    ("strategy", "name", "rows"),
    [
        ("mirrored_4", "convolutions", 10),
        ("mirrored_4", "language", 7),
        ("mirrored_4", "contrast", 1),
        ("central", "convolutions", 5),
        ("model_2x2", "language", 5),
    ],
)
def test_methods_give_the_numbers_of_one_device(strategy, name, rows, programs):
    make = {**STRATEGIES, "model_2x2": MODEL_PARALLEL["model_2x2"].make}[strategy]
    found = all_methods(make(), name, rows)
    sharded = {kind: list(each) for kind, each in programs.items()}
    for each in programs.values():
        each.clear()
    assert_same(found, all_methods(STRATEGIES["one_device"](), name, rows), 1e-4)
    if strategy == "mirrored_4" and name != "contrast":
        share = math.ceil(rows / 4) / rows
        for kind, own in sharded.items():
            assert len(own) == len(programs[kind])
            for many, one in zip(own, programs[kind], strict=True):
                flops = [each.cost_analysis()["flops"] for each in (many, one)]
                assert flops[0] < 1.35 * share * flops[1], kind
                # No activations: only the ids of an embedding, for its gradient.
                sent = sent_bytes(many.as_text())
                sent.pop("all-reduce", None)
                assert sum(nbytes for _, nbytes in sent.values()) < 400, (kind, sent)


def test_several_inputs_and_outputs_in_mixed_precision():
    """Also without a compiler, where JAX has no uneven shards."""

    def results(strategy, rows, **arguments):
        keras.utils.set_random_seed(5)
        with strategy.scope():
            one, two = keras.Input((6,)), keras.Input((3,), dtype="int32")
            policy = keras.DTypePolicy("mixed_float16")
            x = layers.Dense(8, activation="relu", dtype=policy)(one)
            y = layers.Flatten()(layers.Embedding(9, 4, dtype=policy)(two))
            joined = layers.Concatenate(dtype=policy)([x, y])
            a = layers.Dense(2, dtype="float32", name="a")(joined)
            b = layers.Dense(1, dtype="float32", name="b")(joined)
            # An output without rows of the batch.
            mean = layers.Lambda(lambda x: ops.mean(x, axis=0), dtype="float32")(joined)
            model = keras.Model({"one": one, "two": two}, {"a": a, "b": b, "m": mean})
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
            model.compile(optimizer, {"a": "mse", "b": "mae", "m": None}, **arguments)
        random = np.random.default_rng(0)
        x = {
            "one": random.normal(size=(rows, 6)).astype("float32"),
            "two": random.integers(0, 9, (rows, 3)).astype("int32"),
        }
        y = {"a": np.ones((rows, 2), "float32"), "b": np.zeros((rows, 1), "float32")}
        weights = {k: random.uniform(size=rows).astype("float32") for k in y}
        logs = model.train_on_batch(x, {**y, "m": None}, {**weights, "m": None})
        predicted = model.predict_on_batch(x)
        return {
            "logs": np.atleast_1d(logs),
            "weights": model.get_weights(),
            "predict": [predicted[key] for key in sorted(predicted)],
        }

    expected = results(STRATEGIES["one_device"](), 7)
    for arguments in ({}, {"run_eagerly": True}):
        found = results(STRATEGIES["mirrored_4"](), 7, **arguments)
        assert_same(found, expected, 3e-3)


class Tuple(keras.Model):
    """Unbuilt until it is called, with a structure of arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        one, two = inputs.values() if isinstance(inputs, dict) else inputs
        return self.dense(one + two)


@pytest.mark.parametrize("several", [1, 2])
@pytest.mark.parametrize("wrap", [tuple, lambda pair: {"a": pair[0], "b": pair[1]}])
@pytest.mark.parametrize("strategy", ["mirrored_2", "central"])
def test_an_unbuilt_model_predicts(strategy, wrap, several):
    """Keras calls it on the first batch, outside of a program."""
    x = wrap((normal(7, 6), 2 * normal(7, 6)))

    def predicted(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Tuple()
            model.compile("sgd", "mse", steps_per_execution=several)
        return {"predict": [model.predict(x, 3, 0), model.predict(x, 3, 0)]}

    assert_as_one_device(predicted, strategy, 1e-5)


def test_grouped_convolutions_with_sharded_kernels():
    """XLA's partitioner can end the process on them; here the kernel is gathered."""

    def results(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            inputs = keras.Input((6, 6, 8))
            x = layers.Conv2D(16, 3, groups=4)(inputs)
            x = layers.DepthwiseConv2D(3)(x)
            model = keras.Model(inputs, layers.Dense(2)(layers.Flatten()(x)))
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x = normal(6, 6, 6, 8)
        losses = [model.train_on_batch(x, x[:, 0, 0, :2]) for _ in range(2)]
        return {"losses": losses, "weights": model.get_weights()}

    found = results(MODEL_PARALLEL["fsdp_2x2"].make())
    assert_same(found, results(STRATEGIES["one_device"]()), 1e-4)


class Sorted(layers.Layer):
    """Gradients of what is sorted, along the rows and along another axis."""

    def call(self, x: Any) -> Any:
        ranked = ops.sort(x, axis=-1) + ops.median(x, axis=-1, keepdims=True)
        return ranked + ops.sort(x, axis=0) * ops.quantile(x, 0.3, axis=0)


class Pooled(layers.Layer):
    """Extremes of windows of rows, and of windows within rows."""

    def call(self, x: Any) -> Any:
        rows = ops.max_pool(x[None], 2, 1, "same")[0]
        least = -ops.max_pool(-x[None], 3, 2, "same")[0]
        inside = ops.max_pool(x[..., None], 2, 1, "same")[..., 0]
        return rows * inside + ops.sum(least, axis=0)


@pytest.mark.nightly(unless=["8-Pooled"])
@pytest.mark.parametrize("layer", [Sorted, Pooled])
@pytest.mark.parametrize("rows", [7, 8])
def test_gradients_of_what_is_ordered_along_the_rows(layer: Any, rows: int) -> None:
    def results(strategy: Any) -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [layers.Input((6,)), layers.Dense(8), layer(), layers.Dense(1)]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
        x, y = normal(rows, 6), normal(rows, 6)[:, :1]
        return {"loss": [model.train_on_batch(x, y)], "weights": model.get_weights()}

    assert_as_one_device(results, "mirrored_4", 1e-5)
