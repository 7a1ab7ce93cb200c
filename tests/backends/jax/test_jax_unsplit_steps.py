"""Steps that are too small to be split, under `MirroredStrategy` on JAX."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX backend", allow_module_level=True)

import jax
from harness.jax_training import assert_same, scope_of, small_model
from jax import lax
from jax import numpy as jnp
from keras import layers

import keras_strategies as ks
from keras_strategies.engines.jax.fit.step_cost import arithmetic_of
from keras_strategies.runtime.data_parallel.arithmetic import Arithmetic

ks.set_virtual_cpu_devices(4)

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(27, 6)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def mirrored(**options):
    return ks.MirroredStrategy(["cpu:1", "cpu:3"], **options)


def results(strategy, steps_per_execution):
    """What a model with all kinds of state gives, over uneven last batches."""
    keras.utils.set_random_seed(3)
    with scope_of(strategy):
        model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(1),
            ]
        )
        model.layers[0].trainable = False
        model.compile(
            keras.optimizers.Adam(0.01),
            "mse",
            metrics=["mae"],
            steps_per_execution=steps_per_execution,
        )
    history = model.fit(
        X, Y, batch_size=4, epochs=2, verbose=0, validation_data=(X[:11], Y[:11])
    ).history
    return model, {
        "history": [history[key] for key in sorted(history)],
        "evaluate": model.evaluate(X, Y, batch_size=4, verbose=0),
        "predict": [model.predict(X, batch_size=4, verbose=0)],
        "train_on_batch": model.train_on_batch(X[:3], Y[:3]),
        "test_on_batch": model.test_on_batch(X[:3], Y[:3]),
        "predict_on_batch": [model.predict_on_batch(X[:3])],
        "weights": model.get_weights(),
        "slots": [variable.numpy() for variable in model.optimizer.variables],
    }


# Two steps in one program, and the last one by itself.
@pytest.mark.parametrize(
    "steps_per_execution", [pytest.param(1, marks=pytest.mark.nightly), 2]
)
def test_results_are_those_of_one_device(steps_per_execution):
    strategy = mirrored()
    model, found = results(strategy, steps_per_execution)
    _, expected = results(ks.OneDeviceStrategy("cpu:1"), steps_per_execution)
    assert_same(found, expected, tolerance=1e-6)
    calls = strategy.unsplit_calls.of(model)
    assert calls == {"fit": [3, 4], "evaluate": [3, 4], "predict": [3, 4]}


@pytest.fixture
def threshold(monkeypatch):
    """Steps of `small_model` on 16 rows are worth splitting, those on 4 are not."""
    monkeypatch.setattr(Arithmetic, "worth_splitting", lambda self, _: self.flops > 500)


def batches(*sizes):
    ends = list(itertools.accumulate(sizes))
    for size, end in zip(sizes, ends, strict=True):
        yield X[end - size : end], Y[end - size : end]


def fitted_on_several_sizes(strategy):
    with scope_of(strategy):
        model = small_model(keras.optimizers.Adam(0.01))
    model.fit(batches(4, 4), verbose=0)
    model.fit(batches(16), verbose=0)
    # The second of these moves the loop to the mesh, the others stay there.
    model.fit(batches(4, 16, 4, 3), verbose=0)
    model.compile(model.optimizer, "mse", steps_per_execution=3)
    model.fit(batches(4, 4, 4, 4, 4), verbose=0)
    predicted = model.predict(((x,) for x, _ in batches(4, 16, 4)), verbose=0)
    return model, {"predict": [predicted], "weights": model.get_weights()}


def test_small_batches_before_and_after_large_ones(threshold):
    strategy = mirrored()
    model, found = fitted_on_several_sizes(strategy)
    _, expected = fitted_on_several_sizes(None)
    assert_same(found, expected)
    calls = strategy.unsplit_calls.of(model)
    assert calls == {"fit": [4], "predict": [4]}


def test_between_calls_variables_are_on_all_devices():
    class Reading(keras.callbacks.Callback):
        """Reads and assigns variables between steps."""

        def on_train_batch_end(self, batch, logs=None):
            self.read = self.model.get_weights()
            with strategy.scope():
                # An operation on arrays of which each has its own devices.
                total = sum(keras.ops.sum(v) for v in self.model.variables[-2:])
            assert np.isfinite(float(total))
            self.model.optimizer.learning_rate = 0.1 / (batch + 1)
            assert placements(self.model) == {(1, 3)}

    def placements(model):
        variables = [*model.variables, *model.optimizer.variables]
        return {tuple(sorted(d.id for d in v.value.devices())) for v in variables}

    strategy = mirrored()
    with strategy.scope():
        model = small_model()
    model.fit(X, Y, batch_size=4, shuffle=False, verbose=0, callbacks=[Reading()])
    model.evaluate(X, Y, batch_size=4, verbose=0)
    model.predict(X, batch_size=4, verbose=0)
    assert placements(model) == {(1, 3)}

    @ks.function
    def outputs(x):
        return strategy.run(lambda part: model(part), args=(x,))

    for part in strategy.experimental_distribute_dataset(X[:8], batch_size=8):
        parts = strategy.experimental_local_results(outputs(part))
    expected = model.predict(X[:8], verbose=0)
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-5, atol=1e-6)


def test_a_variable_beside_the_model():
    """The trace has its value as a constant, which is on all devices."""
    strategy = mirrored()
    with strategy.scope():
        scale = keras.Variable(2.0, trainable=False)
        model = small_model()
        model.compile("sgd", lambda y, p: scale * keras.ops.mean((y - p) ** 2, axis=-1))
    with strategy.scope():
        once = model.evaluate(X, Y, batch_size=4, verbose=0)
    scale.assign(1.0)
    model.compile("sgd", "mse")
    twice = model.evaluate(X, Y, batch_size=4, verbose=0)
    assert once == pytest.approx(2 * twice, rel=1e-5)


def test_train_on_batch_is_split():
    strategy = mirrored()
    with strategy.scope():
        model = small_model()
    model.train_on_batch(X[:4], Y[:4])
    model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    assert strategy.unsplit_calls.of(model) == {"fit": [8]}


def test_always_split_splits_small_batches():
    strategy = mirrored(always_split=True)
    with strategy.scope():
        model = small_model()
    model.fit(X, Y, batch_size=4, verbose=0)
    assert strategy.unsplit_calls.of(model) == {}
    assert "Unsplit" not in str(strategy.describe(model))


def trace(function, *shapes):
    return arithmetic_of(jax.make_jaxpr(function)(*map(jnp.zeros, shapes)).jaxpr)


def test_the_arithmetic_of_a_trace():
    product = trace(lambda a, b: a @ b + 1, (4, 8), (8, 16))
    assert product == Arithmetic(2 * 4 * 8 * 16, 2)
    filters = {"window_strides": (1, 1), "padding": "SAME"}
    images = trace(lambda a, b: lax.conv(a, b, **filters), (2, 3, 8, 8), (5, 3, 3, 3))
    assert images == Arithmetic(2 * (2 * 5 * 8 * 8) * (3 * 3 * 3), 1)

    def loop(a):
        return lax.scan(lambda a, _: (jax.jit(jnp.matmul)(a, a), None), a, length=10)

    assert trace(loop, (4, 4)) == Arithmetic(10 * 2 * 4**3, 10)
    either = trace(lambda a: lax.cond(True, lambda a: a @ a, lambda a: a, a), (4, 4))
    assert either.flops == 2 * 4**3


def test_splitting_is_worth_it_by_the_share_of_a_replica():
    assert Arithmetic(4e7, 10).worth_splitting(4)
    assert not Arithmetic(4e7, 10).worth_splitting(5)
    assert not Arithmetic(0, 0).worth_splitting(2)
