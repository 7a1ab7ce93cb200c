"""What needs all rows of outputs is logged, and is in the description of its model."""

from __future__ import annotations

from typing import Any

import keras
import pytest

if keras.backend.backend() == "jax":
    pytest.skip("JAX has no row parts", allow_module_level=True)

from row_parts.functions import TARGETS, Rows, X

import keras_strategies as ks


def made(strategy: Any, loss: Any) -> Any:
    with strategy.scope():
        model = Rows("linear")
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def test_a_line_of_a_step_is_in_the_description(caplog: Any) -> None:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    model, other = made(strategy, "mse"), made(strategy, "mse")
    # The last of 6 and 5 rows; TensorFlow traces a program for any number.
    model.function = lambda model, x, y, weights: {"max": keras.ops.max(model(x))}
    with caplog.at_level("INFO", "keras_strategies.row_parts"):
        model.evaluate(X, TARGETS["real"], batch_size=6, verbose=0)
    other.fit(X, TARGETS["real"], batch_size=6, verbose=0)
    rows = 5 if keras.backend.backend() == "torch" else None
    [line] = strategy.describe(model).joins
    assert line.startswith(f"{__file__}:") and line.endswith(f" (shape ({rows}, 5))")
    assert f"on one device of each worker for {line}." in str(strategy.describe(model))
    assert strategy.describe(other).joins == ()
    messages = [record.getMessage() for record in caplog.records]
    assert len([text for text in messages if f"{__file__}:" in text]) == 1
