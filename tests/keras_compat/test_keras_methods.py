"""Methods of Keras that change or restore a model: as without a strategy."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from harness.strategies import TWO_REPLICAS_BY_DAY
from keras.src.models.model import Trainer

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

X = np.linspace(-1, 1, 21).reshape(7, 3).astype("float32")
Y = np.linspace(2, -1, 7).reshape(7, 1).astype("float32")


def scope_of(strategy: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def new_model(optimizer: str = "adam") -> keras.Model:
    init = keras.initializers.RandomNormal(seed=3)
    first = keras.layers.Dense(4, "tanh", kernel_initializer=init)
    second = keras.layers.Dense(1, kernel_initializer=init)
    model = keras.Sequential([keras.Input((3,)), first, second])
    model.compile(optimizer, "mse")
    return model


def fitted(model: Any) -> Any:
    return model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)


@pytest.mark.parametrize("name", ["fit", "train_on_batch", "test_on_batch"])
def test_a_model_that_was_not_compiled_says_what_to_do(mirrored, name) -> None:
    with mirrored.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match=r"You must call `compile\(\)` before"):
        getattr(model, name)(X, Y)


def test_a_model_that_was_not_compiled_predicts(strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        expected = keras.ops.convert_to_numpy(model(X))
    np.testing.assert_allclose(model.predict(X, verbose=0), expected, rtol=1e-5)


class Doubled(keras.layers.Layer):
    """A layer that is proved by its operations."""

    def call(self, x: Any) -> Any:
        return x * 2.0


@TWO_REPLICAS_BY_DAY
@pytest.mark.parametrize("own_layer", [False, True])
def test_a_warning_about_the_structure_of_inputs_comes_as_often(strategy, own_layer):
    def count(each: Any, name: str, *arguments: Any) -> int:
        with scope_of(each):
            first, second = keras.Input((3,), name="a"), keras.Input((3,), name="b")
            y = keras.layers.Add()([first, second])
            y = keras.layers.Dense(1)(Doubled()(y) if own_layer else y)
            model = keras.Model({"a": first, "b": second}, y)
            model.compile("sgd", "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            getattr(model, name)([X, X], *arguments, batch_size=7, verbose=0)
        texts = [str(warning.message) for warning in caught]
        return sum("The structure of `inputs`" in text for text in texts)

    for arguments in (("fit", Y), ("evaluate", Y), ("predict",)):
        expected = count(None, *arguments)
        assert expected >= 1
        assert count(strategy, *arguments) == expected


def test_a_state_tree_of_an_unbuilt_optimizer_is_set_as_by_keras(mirrored) -> None:
    results = []
    for each in (None, mirrored):
        with scope_of(each):
            model = new_model()
        model.optimizer.learning_rate = 0.25
        before = model.get_weights()
        tree = model.get_state_tree(value_format="numpy_array")
        fitted(model)
        model.set_state_tree(tree)
        assert int(model.optimizer.iterations) == 0
        assert float(model.optimizer.learning_rate) == 0.25
        for found, expected in zip(model.get_weights(), before, strict=True):
            np.testing.assert_array_equal(found, expected)
        results.append([*map(keras.ops.convert_to_numpy, model.optimizer.variables)])
    for found, expected in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_state_tree_of_another_optimizer_is_an_error(mirrored) -> None:
    with mirrored.scope():
        source, target = new_model("sgd"), new_model("adam")
    fitted(source)
    with pytest.raises(ks.errors.CheckpointError, match="not those of the optimizer"):
        target.set_state_tree(source.get_state_tree(value_format="numpy_array"))


class TrainedLayer(Trainer, keras.layers.Dense):
    """A layer that has Keras's `Trainer` and is no model."""

    def __init__(self) -> None:
        keras.layers.Dense.__init__(self, 1, kernel_initializer="ones")
        Trainer.__init__(self)


@pytest.mark.slow(seconds=8)
@TWO_REPLICAS_BY_DAY
@pytest.mark.parametrize("jit_compile", ["auto", True])
def test_a_layer_with_a_trainer_trains_as_on_one_device(strategy, jit_compile) -> None:
    if keras.backend.backend() == "torch" and jit_compile is True:
        pytest.skip("torch.compile takes minutes, and is not changed here")
    results = []
    for each in (None, strategy):
        with scope_of(each):
            layer = TrainedLayer()
            layer.compile("adam", "mse", metrics=["mae"], jit_compile=jit_compile)
        history = fitted(layer).history
        evaluated = layer.evaluate(X, Y, batch_size=4, verbose=0)
        predicted = layer.predict(X, batch_size=4, verbose=0)
        results.append([history["loss"], history["mae"], evaluated, predicted])
        assert isinstance(layer, TrainedLayer)
    for found, expected in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
