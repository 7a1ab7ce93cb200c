"""Layers that are computed again in the backward pass: numbers, and how often."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from harness.strategies import STRATEGIES

import keras_strategies as ks

X = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")
Y = X[:, ::-1] * 2
BACKEND = keras.backend.backend()


#: An entry for each time that a function ran.
RUNS: list[None] = []


class Block(keras.layers.Layer):
    """Calls a function of a layer's with `keras.remat`."""

    def __init__(self, mixes_rows: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.mixes_rows = mixes_rows
        self.dense = keras.layers.Dense(3)
        self.inner = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(3)])

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        def function(x: Any) -> Any:
            RUNS.append(None)
            return self.inner(keras.ops.tanh(self.dense(x)))

        if self.mixes_rows:
            x = x + keras.ops.max(x, axis=0)
        return keras.remat(function)(x)


def model_on(strategy: Any, *layers: Any) -> keras.Model:
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        keras.utils.set_random_seed(3)
        made = [make() for make in layers]
        model = keras.Sequential([keras.Input((3,)), *made])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def weights_of(model: keras.Model) -> list[Any]:
    model.fit(X, Y, batch_size=5, epochs=3, shuffle=False, verbose=0)
    return [np.array(value) for value in model.get_weights()]


def assert_trains_as_on_one_device(strategy: Any, *layers: Any) -> None:
    expected = weights_of(model_on(None, *layers))
    assert_close(weights_of(model_on(strategy, *layers)), expected)


def assert_close(found: list[Any], expected: list[Any]) -> None:
    for value, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


@pytest.mark.one_backend
@pytest.mark.filterwarnings("ignore")
@pytest.mark.nightly(unless=["one_device-True", "mirrored_2-True"])
@pytest.mark.parametrize("mixes_rows", [False, True])
@pytest.mark.parametrize(
    "name",
    ["one_device", "mirrored_2", "central"] if BACKEND == "torch" else ["mirrored_2"],
)
def test_remat_in_a_layer(name, mixes_rows) -> None:
    assert_trains_as_on_one_device(STRATEGIES[name].make(), lambda: Block(mixes_rows))


@pytest.mark.skipif(BACKEND != "torch", reason="traced calls run once")
def test_remat_runs_once_and_once_again_on_each_replica(mirrored) -> None:
    model = model_on(mirrored, Block)
    with warnings.catch_warnings(action="error"):
        model.train_on_batch(X, Y)
    for step in range(1, 4):
        RUNS.clear()
        model.train_on_batch(X, Y)
        assert len(RUNS) == 2 * mirrored.num_replicas_in_sync, step


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mode", "layer"),
    [
        # In the backward pass variables are assigned, and a mask is drawn, again.
        ("full", keras.layers.BatchNormalization),
        ("full", lambda: keras.layers.Dropout(0.5, seed=4)),
        # Keras puts `layer.activation` aside in each call; replicas share the layer.
        ("activations", lambda: keras.layers.Dense(3, "gelu")),
    ],
    ids=["normalization", "dropout", "activation"],
)
def test_layers_of_a_scope(mirrored, mode, layer) -> None:
    if mode == "full" and BACKEND != "torch":
        pytest.skip("Keras cannot trace `training` in it")

    def rematerialized() -> Any:
        with keras.RematScope(mode=mode):
            return keras.Sequential(
                [keras.layers.Dense(5, "tanh"), layer(), keras.layers.Dense(3)]
            )

    assert_trains_as_on_one_device(mirrored, rematerialized)


class Calls(keras.layers.Layer):
    """Has another layer."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def build(self, shape: Any) -> None:
        self.inner.build(shape)


class Kept(Calls):
    """Calls a layer by a function that it keeps, as in the documentation of Keras."""

    def __init__(self, again: Any) -> None:
        super().__init__(keras.layers.Dense(3, "tanh"))
        self.again = again(self.inner)

    def call(self, x: Any) -> Any:
        return self.again(x)


def test_a_function_that_a_layer_keeps_is_trained(mirrored) -> None:
    """Plain Keras on JAX has the values with which the model was built in it."""
    expected = weights_of(model_on(None, lambda: Kept(lambda layer: layer)))
    assert_close(weights_of(model_on(mirrored, lambda: Kept(keras.remat))), expected)


class Rematerialized(Calls):
    """Calls Keras's layers that assign variables, in a function of its own."""

    def call(self, x: Any, training: bool = False) -> Any:
        return keras.remat(lambda given: self.inner(given, training=training))(x)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.nightly(unless=["dropout", "dense"])
@pytest.mark.skipif(
    BACKEND == "jax",
    reason="plain Keras raises: assigned values leave the function that JAX traces",
)
@pytest.mark.parametrize(
    "layer",
    [
        keras.layers.BatchNormalization,
        lambda: keras.layers.Dropout(0.5, seed=4),
        lambda: keras.layers.Dense(3, "tanh"),
    ],
    ids=["normalization", "dropout", "dense"],
)
def test_functions_that_read_or_assign_variables_in_the_backward_pass_too(
    mirrored, layer
) -> None:
    """Layers that are known by their types have operations in both passes."""

    def make() -> Any:
        inner = [keras.layers.Dense(3, "tanh"), layer()]
        return Rematerialized(keras.Sequential(inner))

    one_device = ks.OneDeviceStrategy("cpu:0", random_numbers="keras")
    expected = weights_of(model_on(one_device, make))
    with warnings.catch_warnings(action="ignore"):
        assert_close(weights_of(model_on(mirrored, make)), expected)


def checkpoint(function: Any, x: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(function, x, use_reentrant=False)


class CheckpointedBlock(Calls):
    """Calls a layer in Torch's own checkpoint."""

    def call(self, x: Any) -> Any:
        return checkpoint(lambda x: keras.ops.tanh(self.inner(x)), x)


@pytest.mark.skipif(BACKEND != "torch", reason="a function of Torch")
@pytest.mark.parametrize("name", ["mirrored_2", "central"])
def test_checkpoints_of_torch_in_a_layer(name) -> None:
    def make() -> Any:
        return CheckpointedBlock(keras.layers.Dense(3))

    strategy = STRATEGIES[name].make()
    assert_trains_as_on_one_device(strategy, make, lambda: keras.layers.Dense(3))


class CheckpointingStep(keras.Sequential):
    """Calls one of its layers in Torch's checkpoint, in a custom step."""

    def train_step(self, data: Any) -> Any:
        import torch

        x, y = data
        first, second = self.layers
        outputs = checkpoint(lambda h: keras.ops.tanh(second(h)), first(x))
        loss = keras.ops.mean((outputs - y) ** 2)
        self.zero_grad()
        loss.backward()
        variables = self.trainable_variables
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        return {"loss": loss.detach()}


@pytest.mark.skipif(BACKEND != "torch", reason="a function of Torch")
def test_checkpoints_of_torch_in_a_step(mirrored) -> None:
    found = []
    for strategy in (ks.OneDeviceStrategy("cpu:0"), mirrored):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layers = [keras.layers.Dense(4), keras.layers.Dense(3)]
            model = CheckpointingStep([keras.Input((3,)), *layers])
            model.compile(keras.optimizers.SGD(0.1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            history = model.fit(X, Y, batch_size=5, epochs=2, shuffle=False, verbose=0)
        texts = [str(each.message) for each in caught]
        found.append((weights_of(model), history.history["loss"], texts))
    (expected, losses, _), (weights, others, texts) = found
    np.testing.assert_allclose(others, losses, 1e-5)
    assert_close(weights, expected)
    assert sum("exact but not parallel" in text for text in texts) == 1, texts
