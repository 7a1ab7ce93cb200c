"""Torch: a loss is a sum over workers, which is on its way while a step goes on."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("steps of Torch", allow_module_level=True)

import torch
from harness.training import assert_same

import keras_strategies as ks

TWO = pytest.mark.parametrize(
    "cluster", ["two", "two_by_two"], indirect=True, scope="session"
)
ROWS, WIDTH, BATCH = 13, 3, 5
_random = np.random.default_rng(6)
X = _random.normal(size=(ROWS, WIDTH)).astype("float32")
Y = X.sum(1, keepdims=True)
WEIGHTS = np.linspace(0.5, 2.0, ROWS).astype("float32")


class Largest(keras.metrics.Mean):
    """What is not a sum of its updates, and has an attribute that counts them."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.updates = 0

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        self.updates += 1
        before = keras.ops.convert_to_tensor(self.total)
        super().update_state(values, sample_weight)
        self.total.assign(keras.ops.maximum(before, keras.ops.max(values)))


class Step(keras.Model):
    """A step that does something with the loss before its backward pass.

    Args:
        use: callable of the model and the loss; returns the loss that is differentiated
            and a structure of tensors and numbers.
    """

    def __init__(self, use: Callable[..., Any]) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(4, activation="tanh")
        self.out = keras.layers.Dense(1)
        self.use = use
        self.mean = keras.metrics.Mean(name="own")
        self.sum = keras.metrics.Sum(name="sum")
        self.largest = Largest()
        self.factor = torch.tensor(2.0)
        self.seen: list[Any] = []
        self.kept: list[Any] = []

    def call(self, x: Any) -> Any:
        return self.out(self.dense(x))

    def train_step(self, data: Any) -> Any:
        x, y, weights = data
        self.zero_grad()
        loss = self.compute_loss(x, y, self(x, training=True), weights)
        loss, found = self.use(self, loss)
        if loss is not None:
            loss.backward()
        self.seen.append(found)
        self.factor.add_(1.0)
        variables = self.trainable_variables
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in variables], variables)
        logs = {metric.name: metric.result() for metric in self.metrics}
        return {**logs, "updates": self.largest.updates}


def plain(model: Any, loss: Any) -> Any:
    return loss, [loss, loss.detach(), loss * 2, 1 - loss, -loss]


def in_metrics(model: Any, loss: Any) -> Any:
    model.mean.update_state(loss, sample_weight=3)
    model.mean.update_state(2 * loss)
    model.sum.update_state(loss)
    model.largest.update_state(loss)
    return loss, []


def in_metrics_that_are_read(model: Any, loss: Any) -> Any:
    first = model.mean.total.value
    model.mean.update_state(loss, 5)
    model.sum.update_state(loss)
    total = model.mean.total.value
    found = [
        first.clone(),
        model.mean.result(),
        model.mean.variables[0].numpy(),
        keras.ops.convert_to_numpy(total),
        float(model.sum.total),
        model.mean.total + 1,
        model.mean.get_config()["name"] == "own",
    ]
    model.mean.reset_state()
    model.sum.total.assign(model.sum.total * 0.5)
    model.mean.update_state(loss)
    return loss, found


def in_metrics_of_a_call(model: Any, loss: Any) -> Any:
    model.mean(loss)
    model.sum.update_state([loss, loss])
    model.largest.update_state(loss)
    return loss, []


def in_metrics_with_kept_values(model: Any, loss: Any) -> Any:
    before = [each.clone() for each in model.kept]
    value = model.mean.total.value
    model.kept = [value, value.detach()]
    model.mean.update_state(loss)
    model.sum.update_state(loss)
    return loss, [before, [each.clone() for each in model.kept]]


def of_factors(model: Any, loss: Any) -> Any:
    # The factor is changed before the product is needed.
    scaled = loss * model.factor
    half = scaled.to(torch.float64) / 2
    model.seen.append([scaled, half])
    return scaled, [half.dtype is torch.float64]


def of_functions(model: Any, loss: Any) -> Any:
    return torch.log1p(loss) + loss**2, [torch.exp(loss), torch.isfinite(loss).item()]


def of_stacks(model: Any, loss: Any) -> Any:
    every = torch.stack([loss, loss.detach(), 3 * loss])
    return every.sum(), [every.mean(), keras.ops.mean([loss, loss]), every[2]]


def of_changes(model: Any, loss: Any) -> Any:
    before = loss * 1
    alias = loss.detach()
    alias.mul_(3)
    after = loss * 1
    other = 2 * loss.detach()
    other += 1
    other.copy_(loss.detach() * 4)
    return before, [before, after, alias, other]


def of_numbers(model: Any, loss: Any) -> Any:
    plain = loss.detach()
    text = f"{plain:.3f}"
    return loss, [
        float(loss.detach()),
        plain.item(),
        plain.tolist(),
        plain.numpy(),
        np.asarray(plain),
        round(float(text), 3) == round(float(text), 3),
        bool(loss > 0),
        copy.deepcopy(plain),
        pickle.loads(pickle.dumps(plain)),
        plain.cpu(),
        (plain.dtype, plain.shape, plain.dim(), plain.numel())
        == (torch.float32, (), 0, 1),
    ]


def of_branches(model: Any, loss: Any) -> Any:
    return (loss if loss > 1 else 2 * loss), []


def of_gradients(model: Any, loss: Any) -> Any:
    loss.backward(torch.tensor(0.5), retain_graph=True)
    values = [v.value for v in model.trainable_variables]
    return loss, list(torch.autograd.grad(loss, values, retain_graph=True))


def of_none(model: Any, loss: Any) -> Any:
    (loss + torch.zeros(3)).sum().backward()
    return None, []


USES = (
    plain,
    in_metrics,
    in_metrics_that_are_read,
    in_metrics_of_a_call,
    in_metrics_with_kept_values,
    of_factors,
    of_functions,
    of_stacks,
    of_changes,
    of_numbers,
    of_branches,
    of_gradients,
    of_none,
)


def numbers(model: Any, history: Any, seen: Any = ()) -> dict[str, Any]:
    return {
        "history": {k: np.asarray(v) for k, v in history.history.items()},
        "weights": {i: np.asarray(w) for i, w in enumerate(model.get_weights())},
        "seen": {
            i: keras.ops.convert_to_numpy(each)
            for i, each in enumerate(keras.tree.flatten(seen))
        },
    }


def used(strategy: Any, use: Callable[..., Any]) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = Step(use)
        model.compile(keras.optimizers.SGD(0.02), "mse")
        model.build((None, WIDTH))
    history = model.fit(
        X, Y, BATCH, epochs=2, sample_weight=WEIGHTS, shuffle=False, verbose=0
    )
    return numbers(model, history, model.seen)


@TWO
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_uses_of_a_loss_have_the_numbers_of_one_device(cluster: Any, use: Any) -> None:
    expected = used(ks.OneDeviceStrategy("cpu:0"), use)
    for index, found in enumerate(cluster(used, use)):
        assert_same(expected, found, 1e-5, f"worker {index}")


class Added(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(keras.ops.sum(keras.ops.square(x)))
        return x


def make_model(kind: str) -> tuple[Any, dict[str, Any]]:
    """A model, and the arguments of its `compile`."""
    arguments: dict[str, Any] = {"loss": "mse", "optimizer": keras.optimizers.SGD(0.02)}
    layers = keras.layers
    x = layers.Input((WIDTH,))
    y: Any = layers.Dense(4, "tanh", kernel_regularizer="l2")(x)
    if kind == "added losses":
        y = Added()(y)
    outputs: Any = layers.Dense(1, name="first")(y)
    if kind == "two outputs":
        outputs = [outputs, layers.Dense(1, name="second")(y)]
        arguments["loss"], arguments["loss_weights"] = ["mse", "mae"], [0.3, 2.0]
        arguments["weighted_metrics"] = [["mae"], ["mse"]]
    if kind == "loss scale":
        arguments["optimizer"] = keras.optimizers.LossScaleOptimizer(
            arguments["optimizer"], initial_scale=8.0, dynamic_growth_steps=2
        )
    if kind == "accumulation":
        arguments["optimizer"] = keras.optimizers.SGD(
            0.02, gradient_accumulation_steps=2
        )
    if kind == "several steps":
        arguments["steps_per_execution"] = 2
    return keras.Model(x, outputs), arguments


@contextlib.contextmanager
def events_of(model: Any) -> Iterator[list[str]]:
    """The beginnings of steps and backward passes, and the waits, in their order."""
    from keras_strategies.engines.torch.worker_collectives import TorchCommunicator

    events: list[str] = []
    step, wait = model.train_step, TorchCommunicator._wait
    backward = torch.autograd.backward

    def stepping(data: Any) -> Any:
        events.append("step")
        return step(data)

    def waiting(self: Any, device: Any, begin: Any) -> None:
        events.append("wait")
        wait(self, device, begin)

    def differentiating(*args: Any, **kwargs: Any) -> None:
        events.append("backward")
        backward(*args, **kwargs)

    model.train_step = stepping
    TorchCommunicator._wait = waiting  # type: ignore[method-assign]
    torch.autograd.backward = differentiating
    try:
        yield events
    finally:
        TorchCommunicator._wait = wait  # type: ignore[method-assign]
        torch.autograd.backward = backward


def fitted(strategy: Any, kind: str) -> tuple[dict[str, Any], list[str]]:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model, arguments = make_model(kind)
        model.compile(**arguments)
    outputs = len(model.outputs)
    targets: Any = [Y, -Y] if outputs == 2 else Y
    weights: Any = [WEIGHTS] * 2 if outputs == 2 else WEIGHTS
    options = {"sample_weight": weights, "verbose": 0}
    with events_of(model) as events:
        history = model.fit(X, targets, BATCH, epochs=2, shuffle=False, **options)
    evaluated = model.evaluate(X, targets, BATCH, **options)
    return numbers(model, history, evaluated), events


@TWO
@pytest.mark.parametrize(
    "kind",
    [
        "one output",
        "two outputs",
        "added losses",
        "loss scale",
        "accumulation",
        "several steps",
    ],
)
def test_no_step_of_keras_waits_before_its_backward_pass(
    cluster: Any, kind: str
) -> None:
    expected, _ = fitted(ks.OneDeviceStrategy("cpu:0"), kind)
    for index, (found, events) in enumerate(cluster(fitted, kind)):
        assert_same(expected, found, 1e-5, f"worker {index}")
        steps = " ".join(events).split("step")[1:]
        assert len(steps) == 2 * 3
        # The first call finds the metrics that have later values.
        for step in steps[2 if kind == "several steps" else 1 :]:
            before, _, after = step.partition("backward")
            assert "wait" in after
            assert "wait" not in before
