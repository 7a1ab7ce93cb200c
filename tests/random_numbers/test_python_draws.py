"""Numbers that a layer draws from Python, or counts, are those of one device."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest
from harness.strategies import STRATEGIES

ROWS = 11


class Scaled(keras.layers.Layer):
    """Draws in each call, which a program does when it is traced."""

    def call(self, inputs: Any) -> Any:
        return inputs * random.uniform(0.5, 2.0) + np.random.uniform()


class Counted(keras.layers.Layer):
    """Counts its calls, and computes with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        return inputs * (1 + 0.1 * (self.calls % 3))


def trained(
    name: str | None, by: str, metrics: list[str], losses: int = 1, kind: Any = Scaled
) -> Any:
    keras.utils.set_random_seed(7)
    random.seed(8)

    def model_of() -> keras.Model:
        x = keras.Input((3,))
        scaled = kind()(x)
        outputs = [keras.layers.Dense(1)(scaled) for _ in range(losses)]
        model = keras.Model(x, outputs if losses > 1 else outputs[0])
        model.compile(keras.optimizers.SGD(0.05), ["mse"] * losses, metrics=metrics)
        return model

    if name is None:
        model = model_of()
    else:
        with STRATEGIES[name].make().scope():
            model = model_of()
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    y = [x.sum(1, keepdims=True)] * losses
    y = y if losses > 1 else y[0]
    if by == "fit":
        model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0)
        model.evaluate(x, y, batch_size=5, verbose=0)
    else:
        for _ in range(3):
            model.train_on_batch(x, y)
    counted = getattr(model.layers[1], "calls", None)
    weights = [weight.tolist() for weight in model.get_weights()]
    return weights, (random.random(), counted)


@pytest.mark.one_backend("torch")
@pytest.mark.filterwarnings("ignore:Layer .* cannot be split")
@pytest.mark.parametrize(
    ("by", "metrics", "losses"),
    [
        ("fit", [], 1),
        ("fit", ["mae"], 1),
        ("fit", [], 2),
        ("train_on_batch", ["mae"], 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [Scaled, Counted])
def test_numbers_of_python_are_those_of_one_device(
    by: str, metrics: list[str], losses: int, kind: Any
) -> None:
    expected, after = trained(None, by, metrics, losses, kind)
    found, now = trained("mirrored_2", by, metrics, losses, kind)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
    assert now == after
