"""Losses and metrics on outputs that stay on their replicas equal those of one device.

Each of Keras's is in a table that says whether replicas compute it on their rows, or
why not. A loss is differentiated, and metrics are updated twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() == "jax":
    pytest.skip("JAX has no row parts", allow_module_level=True)

from row_parts.functions import (
    LOSSES,
    METRICS,
    SEQUENCES,
    TARGETS,
    WEIGHTS,
    Function,
    X,
    compared,
    loss_and_gradients,
    names_in,
)

from keras_strategies.runtime.data_parallel.data_parallel_call import DataParallelCall


def cases(functions: Sequence[Function]) -> list[Any]:
    """Pairs of a function and whether rows have weights."""
    return [
        pytest.param(function, has_weights, id=f"{function}-{'weights' * has_weights}")
        for function in functions
        for has_weights in (False, True)
    ]


REDUCTIONS = ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight", "none")


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """Why losses and metrics were not split, in their order; None where they were."""
    found: list[str | None] = []
    original = DataParallelCall.on_row_parts

    def noted(self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        outcome = original(self, layer, *args, **kwargs)
        if outcome[0]:
            found.append(None)
        else:
            proofs = self._row_proofs._layers[layer].found
            found.append(next(iter(proofs.values())).problem)
        return outcome

    monkeypatch.setattr(DataParallelCall, "on_row_parts", noted)
    yield found


def differentiated(make_losses: Any) -> Any:
    """A step that computes losses and their gradients."""

    def make() -> Any:
        losses = make_losses()

        def step(model: Any, x: Any, y: Any, weights: Any) -> dict[str, Any]:
            found = {}
            for name, loss in losses.items():
                total, gradients = loss_and_gradients(
                    model, lambda loss=loss: keras.ops.sum(loss(y, model(x), weights))
                )
                found[name] = total
                for i, gradient in enumerate(gradients):
                    found[f"{name}_{i}"] = keras.ops.sum(keras.ops.abs(gradient))
            return found

        return step

    return make


def check(function: Function, problems: list[str | None]) -> None:
    assert bool(problems) != function.calls_itself
    for problem in problems:
        if function.joined:
            assert problem is not None and function.joined in problem
        else:
            assert problem is None


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.nightly(
    unless=[
        *("Dice-", "Dice-weights", "MeanAbsoluteError-", "MeanAbsoluteError-weights"),
        *("MeanAbsolutePercentageError-weights", "Poisson-"),
    ]
)
@pytest.mark.parametrize(("function", "has_weights"), cases(LOSSES))
def test_losses(function: Function, has_weights: bool, problems: Any) -> None:
    weights = WEIGHTS if has_weights else None
    kind = getattr(keras.losses, function.name)

    def losses() -> dict[str, Any]:
        return {name: kind(reduction=name) for name in REDUCTIONS}

    targets = TARGETS[function.targets]
    compared(differentiated(losses), X, targets, weights, function.activation)
    check(function, problems)


def test_all_of_keras_are_in_the_tables() -> None:
    # CTC loss is tested below.
    losses = names_in(keras.losses, keras.losses.Loss) - {"CTC"}
    metrics = names_in(keras.metrics, keras.metrics.Metric) - {"MeanMetricWrapper"}
    assert losses == {function.name for function in LOSSES}
    assert metrics == {function.name for function in METRICS}


def compared_masked(reduction: str, weights: Any = None) -> None:
    kind = keras.losses.SparseCategoricalCrossentropy
    make = differentiated(lambda: {"loss": kind(reduction=reduction)})
    data = SEQUENCES, TARGETS["steps"], weights
    compared(make, *data, "softmax", is_masked=True)


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masked_losses(reduction: str, problems: Any) -> None:
    compared_masked(reduction)
    assert problems == [None]


def test_masked_losses_with_weights(problems: Any) -> None:
    """Keras on Torch multiplies the weights by the mask in place: rows are joined."""
    compared_masked(REDUCTIONS[0], np.repeat(WEIGHTS[:, None], 6, axis=1))
    in_place = "its code changes a tensor in place that may be an argument"
    is_torch = keras.backend.backend() == "torch"
    assert problems == [in_place if is_torch else None]


@pytest.mark.one_backend("torch", "tensorflow")
def test_ctc(problems: Any) -> None:
    targets = np.clip(TARGETS["steps"][:, :2], 1, 4)
    make = differentiated(lambda: {"loss": keras.losses.CTC()})
    compared(make, SEQUENCES, targets, count=2)
    assert problems == [None]


class Ratio(keras.losses.Loss):
    """A user's loss with a value for each row."""

    def __init__(self) -> None:
        super().__init__(name="ratio")
        self.scale = 1.0

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.scale * keras.ops.mean(
            keras.ops.abs(y_true - y_pred) / (1 + keras.ops.abs(y_true)), axis=-1
        )


class InBatchNegatives(keras.losses.Loss):
    """A value for each row that depends on the others."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        similar = keras.ops.matmul(y_pred, keras.ops.transpose(y_true))
        labels = keras.ops.arange(keras.ops.shape(y_pred)[0])
        return keras.losses.sparse_categorical_crossentropy(
            labels, similar, from_logits=True
        )


def scalar(y_true: Any, y_pred: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y_true - y_pred)) + 0.1 * keras.ops.sum(
        keras.ops.abs(y_pred)
    ) / keras.ops.cast(keras.ops.shape(y_pred)[0], "float32")


def normalized(y_true: Any, y_pred: Any) -> Any:
    errors = keras.ops.sum(keras.ops.square(y_true - y_pred))
    return errors / keras.ops.sum(keras.ops.square(y_true))


def of_function(fn: Any) -> Any:
    loss = keras.losses.Loss(name=fn.__name__)
    loss.call = fn
    return loss


@pytest.mark.one_backend("torch", "tensorflow")
def test_losses_of_users(problems: Any) -> None:
    def losses() -> dict[str, Any]:
        return {
            "ratio": Ratio(),
            "scalar": of_function(scalar),
            "negatives": InBatchNegatives(),
            "normalized": of_function(normalized),
        }

    compared(differentiated(losses), X, TARGETS["real"])
    assert [problem is None for problem in problems] == [True, True, False, False]


def updated(function: Function) -> Any:
    def make() -> Any:
        metric = getattr(keras.metrics, function.name)(**function.arguments)

        def step(model: Any, x: Any, y: Any, weights: Any) -> dict[str, Any]:
            metric.reset_state()
            given = () if function.name in ("Mean", "Sum") else (y,)
            for _ in range(3):
                metric.update_state(*given, model(x), sample_weight=weights)
            found = {"result": keras.ops.sum(metric.result())}
            for i, variable in enumerate(metric.variables):
                found[str(i)] = keras.ops.sum(variable)
            return found

        return step

    return make


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize(("function", "has_weights"), cases(METRICS))
def test_metrics(function: Function, has_weights: bool, problems: Any) -> None:
    # That one takes a weight for each entry, and Keras one for each row.
    weights = WEIGHTS if has_weights and function.name != "BinaryIoU" else None
    targets = TARGETS[function.targets]
    compared(updated(function), X, targets, weights, function.activation)
    check(function, problems)


def test_metrics_of_functions_and_users(problems: Any) -> None:
    """Functions are proved; a metric with code of its own gets all rows."""

    class Largest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_weight(initializer="zeros", name="value")

        def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any) -> None:
            error = keras.ops.max(keras.ops.abs(y_true - y_pred))
            self.value.assign(keras.ops.maximum(self.value, error))

        def result(self) -> Any:
            return self.value

    def make() -> Any:
        metrics = [
            keras.metrics.MeanMetricWrapper(scalar, name="scalar"),
            keras.metrics.MeanMetricWrapper(normalized, name="normalized"),
            Largest(),
        ]

        def step(model: Any, x: Any, y: Any, weights: Any) -> dict[str, Any]:
            for metric in metrics:
                metric.update_state(y, model(x), sample_weight=weights)
                metric.update_state(y, model(2 * x), sample_weight=weights)
            return {metric.name: metric.result() for metric in metrics}

        return step

    compared(make, X, TARGETS["real"])
    assert [problem is None for problem in problems] == [True, True, False, False]
