"""Tensors of a call that a step reads from elsewhere than from the call's outputs.

Each model keeps its hidden tensor somewhere, and the loss of the step has a term with
its mean over the rows of the batch.
"""

from __future__ import annotations

import contextvars
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_same
from keras import layers, ops

import keras_strategies as ks
from row_proofs.proofs import SPLITS, trained

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(27, 4)).astype("float32")
Y = RANDOM.normal(size=(27, 1)).astype("float32")

pytestmark = pytest.mark.skipif(
    BACKEND not in SPLITS, reason="JAX lets no tensor leave a traced call"
)


@dataclass
class Outputs:
    last: Any
    hidden: Any


class Base(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(4), layers.Dense(1)
        self.first.build((None, 4))
        self.last.build((None, 4))
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))

    def loss_of(self, y: Any, outputs: Any, hidden: Any) -> Any:
        mean = ops.mean(hidden, axis=0)
        return ops.mean(ops.square(y - outputs)) + ops.mean(ops.square(mean))

    def compute_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {metric.name: metric.result() for metric in self.metrics}


def keeping(
    put: Callable[[Any, Any], None], get: Callable[[Any], Any]
) -> Callable[[], keras.Model]:
    class Keeping(Base):
        def call(self, inputs: Any) -> Any:
            hidden = self.first(inputs)
            put(self, hidden)
            return self.last(hidden)

        def compute_loss(self, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = self(x)
            return self.loss_of(y, outputs, get(self))

    return Keeping


def returning(
    put: Callable[[Any, Any], Any], get: Callable[[Any], tuple[Any, Any]]
) -> Callable[[], keras.Model]:
    class Returning(Base):
        def call(self, inputs: Any) -> Any:
            hidden = self.first(inputs)
            return put(self.last(hidden), hidden)

        def compute_loss(
            self, x: Any, y: Any, y_pred: Any, *args: Any, **_: Any
        ) -> Any:
            return self.loss_of(y, *get(y_pred))

    return Returning


class GivenObject(Base):
    """Keeps the tensor in an object that its call gets."""

    def call(self, inputs: Any, kept: Any = None) -> Any:
        hidden = self.first(inputs)
        if kept is not None:
            kept.hidden = hidden
        return self.last(hidden)

    def compute_loss(self, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        kept = types.SimpleNamespace()
        outputs = self(x, kept=kept)
        return self.loss_of(y, outputs, kept.hidden)


class GivenFunction(Base):
    """Calls a function that its call gets, which keeps the tensor in a list."""

    def call(self, inputs: Any, keep: Any = None) -> Any:
        hidden = self.first(inputs)
        if keep is not None:
            keep(hidden)
        return self.last(hidden)

    def compute_loss(self, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        kept: list[Any] = []
        outputs = self(x, keep=lambda hidden: kept.append(hidden))
        return self.loss_of(y, outputs, kept[0])


class FactorInAttribute(Base):
    """Multiplies with a tensor of the step, which is in an attribute in one call."""

    factor = None

    def call(self, inputs: Any) -> Any:
        hidden = self.first(inputs)
        if self.factor is not None:
            hidden = hidden * self.factor
        return self.last(hidden)

    def compute_loss(self, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        self.factor = ops.abs(y)
        outputs = self(x)
        self.factor = None
        return ops.mean(ops.square(y - outputs))


CONTEXT = contextvars.ContextVar("CONTEXT")
LAYER = layers.Identity()


MODELS: dict[str, Callable[[], keras.Model]] = {
    "context variable": keeping(
        lambda model, hidden: CONTEXT.set(hidden), lambda model: CONTEXT.get()
    ),
    "other layer": keeping(
        lambda model, hidden: setattr(LAYER, "hidden", hidden),
        lambda model: LAYER.hidden,
    ),
    # No state that a proof knows of.
    "dataclass": returning(Outputs, lambda found: (found.last, found.hidden)),
    "function": returning(
        lambda last, hidden: {"last": last, "mean": lambda: ops.mean(hidden, 0)},
        lambda found: (found["last"], found["mean"]()),
    ),
    "object that is given": GivenObject,
    "function that is given": GivenFunction,
    "factor in an attribute": FactorInAttribute,
}


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_one_device(name: str) -> None:
    def make() -> keras.Model:
        model = MODELS[name]()
        model.compile(keras.optimizers.SGD(0.02), "mse")
        return model

    def fit(model: keras.Model) -> Any:
        return model.fit(X, Y, 11, epochs=2, shuffle=False, verbose=0)

    expected, _ = trained(make, fit)
    found, said = trained(make, fit, ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    assert_same(expected, found, 2e-5, name)
    assert said
