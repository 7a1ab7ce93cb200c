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
from keras import layers, ops

from row_proofs.case_layers import OwnModel
from row_proofs.proofs import assert_exact, needs_split

RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(27, 4)).astype("float32")
Y = RANDOM.normal(size=(27, 1)).astype("float32")

pytestmark = needs_split  # JAX lets no tensor leave a traced call.


@dataclass
class Outputs:
    last: Any
    hidden: Any


class Kept(OwnModel):
    """Returns what `put` makes of the last and the hidden tensor.

    Args:
        put: callable(model, last, hidden, given).
        get: callable(model, what `put` returned, given): the two tensors.
        given: what makes an argument of the call.
    """

    def __init__(self, put: Any, get: Any, given: Any = lambda: None):
        super().__init__()
        self.put, self.get, self.given = put, get, given

    def call(self, inputs: Any, given: Any = None) -> Any:
        hidden = self.inner(inputs)
        last = self.head(hidden)
        found = self.put(self, last, hidden, given)
        return last if found is None else found

    def compute_loss(self, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        given = self.given()
        last, hidden = self.get(self, self(x, given=given), given)
        mean = ops.mean(hidden, axis=0)
        return ops.mean(ops.square(y - last)) + ops.mean(ops.square(mean))

    def compute_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {metric.name: metric.result() for metric in self.metrics}


class FactorInAttribute(OwnModel):
    """Multiplies with a tensor of the step, which is in an attribute in one call."""

    factor = None

    def call(self, inputs: Any) -> Any:
        hidden = self.inner(inputs)
        return self.head(hidden if self.factor is None else hidden * self.factor)

    def compute_loss(self, x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        self.factor = ops.abs(y)
        outputs = self(x)
        self.factor = None
        return ops.mean(ops.square(y - outputs))

    compute_metrics = Kept.compute_metrics


CONTEXT = contextvars.ContextVar("CONTEXT")
LAYER = layers.Identity()


MODELS: dict[str, Callable[[], keras.Model]] = {
    "context variable": lambda: Kept(
        lambda model, last, hidden, _: CONTEXT.set(hidden) and None,
        lambda model, found, _: (found, CONTEXT.get()),
    ),
    "other layer": lambda: Kept(
        lambda model, last, hidden, _: setattr(LAYER, "hidden", hidden),
        lambda model, found, _: (found, LAYER.hidden),
    ),
    # No state that a proof knows of.
    "dataclass": lambda: Kept(
        lambda model, last, hidden, _: Outputs(last, hidden),
        lambda model, found, _: (found.last, found.hidden),
    ),
    "function": lambda: Kept(
        lambda model, last, hidden, _: {"last": last, "mean": lambda: hidden},
        lambda model, found, _: (found["last"], found["mean"]()),
    ),
    "object that is given": lambda: Kept(
        lambda model, last, hidden, kept: kept and setattr(kept, "hidden", hidden),
        lambda model, found, kept: (found, kept.hidden),
        lambda: types.SimpleNamespace(hidden=None),
    ),
    "function that is given": lambda: Kept(
        lambda model, last, hidden, keep: keep and keep(hidden),
        lambda model, found, keep: (found, keep.__self__[0]),
        lambda: [].append,
    ),
    "factor in an attribute": FactorInAttribute,
}


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_one_device(name: str) -> None:
    def make() -> keras.Model:
        model = MODELS[name]()
        model.compile(keras.optimizers.SGD(0.02), "mse")
        return model

    assert assert_exact(
        make, lambda model: model.fit(X, Y, 11, epochs=2, shuffle=False, verbose=0)
    )
