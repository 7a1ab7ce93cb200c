"""A case trained on one device, there again slightly disturbed, and on two replicas."""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness import data as datasets
from harness.data import Data
from harness.training import SGD_TOLERANCE

import keras_strategies as ks
from keras_strategies.rows.row_proofs import RowProofs

ROOT = Path(__file__).resolve().parents[2]
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
        small: bool, whether the case belongs to the part that is not nightly.
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
    small: bool = False
    refused_by: dict[str, type[Exception]] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Differences of weights, relative to the largest magnitude of each.

    Some of the fields:
        moved: change of the weights by the training on one device.
        disturbed: difference to the disturbed run on one device.
        weights, loss: difference to two replicas; None if these raised.
        unsplit: number of warnings that a call was not split.
        calls, split: layers that are called, and those of them that are split by rows;
            zero where the backend proves nothing.
        unnamed: layers that are not split, if there is no warning.
        seconds_alone, seconds: of the first run on one device and on two replicas.
    """

    name: str
    backend: str
    options: str
    tolerance: float
    moved: float
    disturbed: float
    disturbed_loss: float
    weights: float | None
    loss: float | None
    unsplit: int
    calls: int
    split: int
    unnamed: tuple[str, ...]
    seconds_alone: float
    seconds: float
    error: str = ""

    @property
    def verdict(self) -> str:
        if self.weights is None or self.loss is None:
            return self.error
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
    seconds: float


_alone: dict[str, Alone] = {}


def _train_alone(case: FieldCase) -> Alone:
    """The case on one device, trained twice."""
    start = time.perf_counter()
    keras.utils.set_random_seed(7)
    model = case.build()
    model.optimizer.build(model.trainable_variables)
    # All variables that training may change.
    state = [*model.variables, *model.optimizer.variables]
    before = [(v, array(v)) for v in state]
    initial = floats(weights(model))
    found, loss = fit(case, model)
    seconds = time.perf_counter() - start
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
        seconds=seconds,
    )


def measure(
    case: FieldCase, make_strategy: Callable[[], Any], options: str
) -> tuple[Measured, Exception | None]:
    """Compares a strategy with one device; what it raised comes second."""
    if case.name not in _alone:
        _alone[case.name] = _train_alone(case)
    expected = _alone[case.name]
    found: Any = None
    error: Exception | None = None
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as said, recorded_proofs() as proved:
        warnings.simplefilter("always")
        try:
            found = _fit_under(make_strategy, case)
        except Exception as raised:  # The table shows it and the test raises it.
            error = raised
    measured = Measured(
        name=case.name,
        backend=keras.backend.backend(),
        options=options,
        tolerance=case.tolerance,
        moved=expected.moved,
        disturbed=expected.disturbed,
        disturbed_loss=expected.disturbed_loss,
        weights=None if error else largest_difference(expected.weights, found[0]),
        loss=None if error else largest_difference(expected.loss, found[1]),
        unsplit=sum("split by rows" in str(warning.message) for warning in said),
        calls=len(proved),
        split=sum(proved.values()),
        unnamed=tuple(
            name
            for name, is_split in proved.items()
            if not is_split and not any("split by rows" in str(w.message) for w in said)
        ),
        seconds_alone=expected.seconds,
        seconds=time.perf_counter() - start,
        error=f"{type(error).__name__}: {_first_line(error)}" if error else "",
    )
    return measured, error


@contextlib.contextmanager
def recorded_proofs() -> Iterator[dict[str, bool]]:
    """Whether all calls of layers are split by rows, by the names of the layers."""
    found: dict[str, bool] = {}
    original = RowProofs.of

    def of(self: Any, call: Any, *args: Any) -> Any:
        proof, is_new = original(self, call, *args)
        if isinstance(call.layer, keras.layers.Layer):
            name = call.layer.name
            found[name] = found.get(name, True) and proof.problem is None
        return proof, is_new

    RowProofs.of = of  # type: ignore[method-assign]
    try:
        yield found
    finally:
        RowProofs.of = original  # type: ignore[method-assign]


def _fit_under(make_strategy: Callable[[], Any] | None, case: FieldCase) -> Any:
    keras.utils.set_random_seed(7)
    if make_strategy is None:
        return fit(case, case.build())
    with make_strategy().scope():
        model = case.build()
    return fit(case, model)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:160]


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


# --- The table ----------------------------------------------------------------


def results_folder() -> Path:
    return Path(os.environ.get("KS_FIELD_RESULTS") or ROOT / ".test-logs" / "field")


def record(measured: Measured) -> None:
    """Appends a line to the backend's results."""
    folder = results_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{measured.backend}.jsonl").open("a") as file:
        line = {**asdict(measured), "verdict": measured.verdict}
        file.write(json.dumps(line) + "\n")


def parameters(cases: list[FieldCase]) -> list[Any]:
    """Cases for `pytest`; all but the small ones are nightly."""
    marks = {True: [], False: [pytest.mark.nightly]}
    return [pytest.param(c, id=c.name, marks=marks[c.small]) for c in cases]


def assert_trains_as_one_device(case: FieldCase) -> None:
    refused_by = case.refused_by.get(keras.backend.backend())
    if refused_by is not None:
        # What Keras refuses on one device, it refuses under a strategy.
        for make in (None, mirrored):
            with warnings.catch_warnings(), pytest.raises(refused_by):
                # A layer that is left unsplit is named before Keras refuses it.
                warnings.simplefilter("ignore")
                _fit_under(make, case)
        return
    measured, error = measure(case, mirrored, "")
    record(measured)
    if error is not None:
        raise error
    assert measured.verdict in ("equal", "rounding"), f"{measured.verdict}: {measured}"
