"""How calls ran on replicas, as `describe` and `fit` say it, counted by hand."""

from __future__ import annotations

import re
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies.runtime.data_parallel.call_notes import multiplications

pytestmark = pytest.mark.one_backend

IS_ONE_PROGRAM = keras.backend.backend() == "jax"
split_by_calls = pytest.mark.skipif(IS_ONE_PROGRAM, reason="a step is one program")
X = np.random.default_rng(0).normal(size=(10, 8)).astype("float32")
Y = X[:, :4]


class Sorted(layers.Layer):
    """Sorts over the batch: no replica can compute its own rows alone."""

    def call(self, x):
        return keras.ops.sort(x, axis=0)


class Scaled(layers.Layer):
    """Code of the user's own that Keras's operations prove."""

    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(16)

    def call(self, x):
        return 2 * self.inner(x)


def trained(strategy: Any, *parts: Any, verbose: int = 1) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), *parts, layers.Dense(4)])
        model.compile("sgd", "mse")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # A layer that is not split is named.
        model.fit(X, Y, batch_size=5, epochs=2, verbose=verbose)
    return model


def calls_of(strategy: Any, model: keras.Model) -> dict[str, str]:
    """The column, by variable of the model."""
    described = strategy.describe(model)
    assert str(described).splitlines()[2].split()[-1] == "calls"
    names = {variable.path for variable in model.variables}
    return {row[0]: row[-1] for row in described.rows if row[0] in names}


def test_before_any_call_there_is_no_column(mirrored) -> None:
    with mirrored.scope():
        model = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
    described = mirrored.describe(model)
    assert "calls" not in str(described) and described.parallel is None


def test_layers_of_keras_are_split_by_type(mirrored, capfd) -> None:
    model = trained(mirrored, layers.Dense(16, "relu"))
    expected = "one program" if IS_ONE_PROGRAM else "split by type"
    assert set(calls_of(mirrored, model).values()) == {expected}
    described = mirrored.describe(model)
    # XLA does not say what share of a program it has divided.
    assert described.parallel == (None if IS_ONE_PROGRAM else 1)
    assert described.all_rows == ()
    share = "100 % of the multiplications by weights, so far"
    why = "not counted: XLA divides the program"
    assert f"in parallel  {why if IS_ONE_PROGRAM else share}\n" in str(described) + "\n"
    assert "in parallel" not in capfd.readouterr().err


@pytest.mark.one_backend("torch", "tensorflow")
@split_by_calls
def test_own_code_is_split_by_rows_and_as_declared(mirrored) -> None:
    model = trained(mirrored, Scaled())
    assert set(calls_of(mirrored, model).values()) == {"split by rows"}
    assert mirrored.describe(model).parallel == 1
    # Layers in a call that is not split have calls of their own.
    model = trained(mirrored, Sorted(), ks.row_wise(Scaled()))
    calls = sorted(calls_of(mirrored, model).values())
    assert calls == ["all rows"] * 2 + ["split as declared"] * 2
    share = 8 * 16 / (8 * 16 + 16 * 4)
    assert mirrored.describe(model).parallel == pytest.approx(share)


@pytest.mark.one_backend("torch", "tensorflow")
@split_by_calls
def test_the_share_is_that_of_the_multiplications(mirrored, capfd) -> None:
    block = keras.Sequential([layers.Dense(32), layers.Dense(16)])
    model = trained(mirrored, block, Sorted())
    described = mirrored.describe(model)
    split, alone = 8 * 32 + 32 * 16, 16 * 4
    assert described.parallel == pytest.approx(split / (split + alone))
    calls = sorted(calls_of(mirrored, model).values())
    assert calls == ["all rows"] * 2 + ["split by type"] * 4
    [why] = described.all_rows
    assert re.match(r"model 'sequential\w*' \(Sequential\), because .*'Sort'", why)
    # More than 90 %.
    assert "in parallel" not in capfd.readouterr().err


@pytest.mark.one_backend("torch", "tensorflow")
@split_by_calls
def test_fit_says_once_that_less_than_90_percent_ran_in_parallel(
    mirrored, capfd
) -> None:
    model = trained(mirrored, layers.Dense(16), Sorted())
    model.fit(X, Y, batch_size=5, verbose=2)
    errors = capfd.readouterr().err.splitlines()
    [line] = [line for line in errors if "in parallel" in line]
    assert "0 % of the multiplications by weights ran in parallel on 2" in line
    assert "model 'sequential" in line and "describe(model)" in line
    assert mirrored.describe(model).parallel == 0


def test_fit_says_nothing_without_output_or_a_second_replica(mirrored, capfd) -> None:
    trained(mirrored, layers.Dense(16), Sorted(), verbose=0)
    one = ks.OneDeviceStrategy("cpu:0")
    with one.scope():
        model = keras.Sequential([keras.Input((8,)), Sorted(), layers.Dense(4)])
        model.compile("sgd", "mse")
    model.fit(X, Y)
    assert "in parallel" not in capfd.readouterr().err
    assert "calls" not in str(one.describe(model))


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (lambda: layers.Dense(16), (8,), 8 * 16),
        (lambda: layers.Dense(16), (3, 8), 3 * 8 * 16),
        (lambda: layers.Conv2D(4, 3), (8, 8, 2), 6 * 6 * 3 * 3 * 2 * 4),
        (lambda: layers.DepthwiseConv2D(3), (8, 8, 2), 6 * 6 * 3 * 3 * 2),
        (lambda: layers.Embedding(1000, 16), (5,), 5 * 16),
        (
            lambda: layers.EinsumDense("abc,cde->abde", (5, 2, 4), bias_axes="de"),
            (5, 8),
            5 * 8 * 2 * 4,
        ),
        (lambda: layers.LayerNormalization(), (5, 8), 0),
    ],
)
def test_multiplications_of_a_row(layer, shape, expected) -> None:
    made = layer()
    dtype = "int32" if isinstance(made, layers.Embedding) else "float32"
    outputs = made(keras.ops.ones((2, *shape), dtype))
    assert multiplications(made, outputs) == expected
