"""A case trained on one device, there again slightly disturbed, and on two replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
from harness import data as datasets
from harness.data import Data
from harness.training import SGD_TOLERANCE

import keras_strategies as ks

#: Relative to the largest magnitude of each weight, with the seed 0.
DISTURBANCE = 1e-7
#: A difference of this many disturbances is rounding.
ROUNDING = 10.0
#: Above this a disturbed run says nothing about a strategy.
CHAOS = 1e-2
# Weights that are nearly zero are compared with gradients of the order of one.
_SMALLEST_SCALE = 1e-2


@dataclass(frozen=True)
class FieldCase:
    """One thing that people train.

    Some of the fields:
        build: makes the built and compiled model.
        data: makes the data from a number of rows.
        rows, batch, epochs: by default the last batch is uneven.
        tolerance: relative to the largest magnitude of each weight.
        refused_by: backends on which Keras 3.15 cannot train this on one device, and
            the error that it raises there.
    """

    name: str
    build: Callable[[], keras.Model]
    data: Callable[[int], Data]
    feed: datasets.Feed = datasets.arrays
    rows: int = 11
    batch: int = 4
    epochs: int = 2
    tolerance: float = SGD_TOLERANCE
    refused_by: dict[str, type[Exception]] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Differences of weights, relative to the largest magnitude of each.

    Some of the fields:
        moved: change of the weights by the training on one device.
        disturbed: difference to the disturbed run on one device.
        weights, loss: difference to the strategy.
    """

    tolerance: float
    moved: float
    disturbed: float
    disturbed_loss: float
    weights: float
    loss: float

    @property
    def verdict(self) -> str:
        if self.disturbed > CHAOS or self.moved < ROUNDING * self.limit:
            return "says nothing"
        if self.weights > self.limit or self.loss > self.loss_limit:
            return "DIFFERS"
        return "equal" if self.weights <= self.tolerance else "rounding"

    @property
    def limit(self) -> float:
        return max(self.tolerance, ROUNDING * self.disturbed)

    @property
    def loss_limit(self) -> float:
        return max(self.tolerance, ROUNDING * self.disturbed_loss)


@dataclass(frozen=True)
class Alone:
    """What one device gives, undisturbed and disturbed."""

    moved: float
    weights: dict[str, np.ndarray]
    loss: dict[str, np.ndarray]
    disturbed: float
    disturbed_loss: float


_alone: dict[str, Alone] = {}


def _train_alone(case: FieldCase) -> Alone:
    """The case on one device, trained twice."""
    keras.utils.set_random_seed(7)
    model = case.build()
    model.optimizer.build(model.trainable_variables)
    # All variables that training may change.
    state = [*model.variables, *model.optimizer.variables]
    before = [(v, array(v)) for v in state]
    initial = floats(weights(model))
    found, loss = fit(case, model)
    for variable, value in before:
        variable.assign(value)
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            # A recurrent layer's states are not among its variables.
            layer.reset_state()
    disturb(model)
    disturbed, disturbed_loss = fit(case, model)
    return Alone(
        moved=largest_difference(initial, floats(found)),
        weights=found,
        loss=loss,
        disturbed=largest_difference(found, disturbed),
        disturbed_loss=largest_difference(loss, disturbed_loss),
    )


def measure(case: FieldCase, make_strategy: Callable[[], Any]) -> Measured:
    """Compares a strategy with one device."""
    if case.name not in _alone:
        _alone[case.name] = _train_alone(case)
    expected = _alone[case.name]
    with warnings.catch_warnings():
        # Layers that are left unsplit are named.
        warnings.simplefilter("ignore")
        found, loss = _fit_under(make_strategy, case)
    return Measured(
        tolerance=case.tolerance,
        moved=expected.moved,
        disturbed=expected.disturbed,
        disturbed_loss=expected.disturbed_loss,
        weights=largest_difference(expected.weights, found),
        loss=largest_difference(expected.loss, loss),
    )


def _fit_under(make_strategy: Callable[[], Any] | None, case: FieldCase) -> Any:
    keras.utils.set_random_seed(7)
    if make_strategy is None:
        return fit(case, case.build())
    with make_strategy().scope():
        model = case.build()
    return fit(case, model)


def fit(case: FieldCase, model: keras.Model) -> tuple[dict[str, np.ndarray], Any]:
    """The weights after `fit`, by number and path, and the logged losses."""
    given = case.feed(case.data(case.rows), case.batch)
    given.pop("steps", None)
    history = model.fit(**given, epochs=case.epochs, shuffle=False, verbose=0)
    logs = {key: np.asarray(value) for key, value in history.history.items()}
    return weights(model), logs


def weights(model: keras.Model) -> dict[str, np.ndarray]:
    return {f"{i} {v.path}": array(v) for i, v in enumerate(model.weights)}


def floats(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Without counters and seeds."""
    return {k: v for k, v in arrays.items() if v.dtype.kind == "f"}


def array(variable: Any) -> np.ndarray:
    # A copy: on Torch NumPy would share the variable's memory.
    return np.array(keras.ops.convert_to_numpy(variable.value))


def disturb(model: keras.Model) -> None:
    random = np.random.default_rng(0)
    for variable in model.trainable_variables:
        value = array(variable).astype("float64")
        scale = DISTURBANCE * np.abs(value).max(initial=0.0)
        variable.assign(value + scale * random.standard_normal(value.shape))


def largest_difference(expected: dict[str, Any], found: dict[str, Any]) -> float:
    """The largest of the arrays' differences; infinite where one is not finite."""
    if len(expected) != len(found):
        raise AssertionError(f"expected {list(expected)}, found {list(found)}")
    gaps = [0.0]
    for a, b in zip(expected.values(), found.values(), strict=True):
        if a.size == 0:
            continue
        a, b = a.astype("float64"), b.astype("float64")
        gap = np.abs(a - b).max() / max(np.abs(a).max(), _SMALLEST_SCALE)
        gaps.append(float(gap) if np.isfinite(gap) else float("inf"))
    return max(gaps)


def mirrored() -> Any:
    """What a user writes; random numbers are those of one device without a strategy."""
    return ks.MirroredStrategy(["cpu:0", "cpu:1"], random_numbers="keras")


def assert_trains_as_one_device(
    case: FieldCase, make_strategy: Callable[[], Any] = mirrored
) -> None:
    refused_by = case.refused_by.get(keras.backend.backend())
    if refused_by is not None:
        # What Keras refuses on one device, it refuses under a strategy.
        for make in (None, make_strategy):
            with warnings.catch_warnings(), pytest.raises(refused_by):
                # A layer that is left unsplit is named before Keras refuses it.
                warnings.simplefilter("ignore")
                _fit_under(make, case)
        return
    measured = measure(case, make_strategy)
    assert measured.verdict in ("equal", "rounding"), f"{measured.verdict}: {measured}"
