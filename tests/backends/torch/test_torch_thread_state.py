"""Torch's thread-local state of the caller is that of replicas, as on one device."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from typing import Any

import keras
import numpy as np
import pytest
import torch
from harness.data import classes
from harness.strategies import STRATEGIES
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

import keras_strategies as ks

# What is called unsplit has the caller's state.
pytestmark = pytest.mark.filterwarnings("error:.*cannot be split by rows")
WORD = contextvars.ContextVar("word", default="")


#: Of the newest layer: layers that change what they hold are not split.
NOTES: list[Any] = []


@ks.row_wise
class Noting(keras.layers.Layer):
    """A dense layer of torch's own functions that notes the state that it sees."""

    def __init__(self, note: Any = lambda: None) -> None:
        super().__init__()
        self.note = note
        NOTES.clear()

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 3), initializer="ones")

    def call(self, x: Any) -> Any:
        x = torch.matmul(x, self.kernel.value)
        if not isinstance(x, FakeTensor):  # The call that is only recorded.
            NOTES.append((threading.get_ident(), self.note()))
        return torch.tanh(x * x)


class Model(keras.Model):
    """A layer, trained by `step(model, x)`."""

    def __init__(self, layer: keras.layers.Layer, step: Any) -> None:
        super().__init__()
        self.layer, self.step = layer, step
        self.build((None, 6))

    def build(self, shape: Any) -> None:
        self.layer.build(shape)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.step(self, batch[0])}


def fitted(name: str, layer: keras.layers.Layer, step: Any) -> keras.Model:
    with STRATEGIES[name].make().scope():
        model = Model(layer, step)
        model.compile(keras.optimizers.SGD(0.1))
    rows = classes(7)
    model.fit(rows.x, rows.y, batch_size=7, shuffle=False, verbose=0)
    return model


def trained(name: str, layer: keras.layers.Layer, context: Any) -> list[Any]:
    """Weights and outputs after a step in a context, within a custom `train_step`."""
    outputs = []

    def step(model: keras.Model, x: Any) -> Any:
        model.zero_grad()
        with context():
            found = model(x * 0.01, training=True)
            loss = found.float().square().sum()
            loss.backward()
        outputs.append(found.detach())
        variables = model.trainable_weights
        gradients = [variable.value.grad for variable in variables]
        with torch.no_grad():
            model.optimizer.apply(gradients, variables)
        return loss

    model = fitted(name, layer, step)
    return [outputs[0].dtype, outputs[0].float(), *model.get_weights()]


def assert_as_one_device(context: Any, rtol: float = 1e-6) -> None:
    one = trained("one_device", Noting(), context)
    two = trained("mirrored_2", Noting(), context)
    assert one[0] == two[0]
    for expected, found in zip(one[1:], two[1:], strict=True):
        np.testing.assert_allclose(found, expected, rtol=rtol)


def noted(note: Any, context: Any) -> set[Any]:
    """What each of two replicas notes, beside their threads, which differ."""
    trained("mirrored_2", Noting(note), context)
    # The last two calls are those of the replicas; others probe the layer.
    assert len({thread for thread, _ in NOTES[-2:]}) == 2
    return {found for _, found in NOTES[-2:]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype) -> None:
    def context() -> Any:
        return torch.autocast("cpu", dtype=dtype)

    assert trained("one_device", Noting(), context)[0] == dtype
    # The sums of gradients of both replicas are rounded apart.
    assert_as_one_device(context, rtol=1e-2)


def test_hooks_of_saved_tensors() -> None:
    packed: dict[int, list[torch.Tensor]] = {}
    unpacked = []

    def pack(tensor: torch.Tensor) -> Any:
        packed.setdefault(threading.get_ident(), []).append(tensor)
        return tensor.double()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor.float()

    def context() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    trained("mirrored_2", Noting(), context)
    # Both replicas' threads, besides that of the loss.
    assert len(packed) == 3
    assert len(unpacked) == sum(map(len, packed.values()))
    assert_as_one_device(context)
    assert_as_one_device(torch.autograd.graph.save_on_cpu)


def test_inference_mode_and_no_grad() -> None:
    model_of = {}
    for name in ("one_device", "mirrored_2"):
        with STRATEGIES[name].make().scope():
            layer = Noting(torch.is_inference_mode_enabled)
            layer.build((None, 6))
            model_of[name] = keras.Sequential([keras.Input((6,)), layer])
            model_of[name].compile()
    x = classes(7).x
    with torch.inference_mode():
        found = [model.predict(x, verbose=0) for model in model_of.values()]
    np.testing.assert_allclose(*found, rtol=1e-6)
    assert [note for _, note in NOTES[-2:]] == [True, True]


class _Functions(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return (torch.sin if func is torch.tanh else func)(*args, **(kwargs or {}))


def test_modes_of_functions() -> None:
    assert_as_one_device(_Functions)


@contextlib.contextmanager
def with_set(set_value: Any, value: Any, before: Any) -> Any:
    set_value(value)
    try:
        yield
    finally:
        set_value(before)


#: What replicas note, the caller's context, and the note in it.
STATES = {
    "autocast dtype": (
        lambda: torch.get_autocast_dtype("cpu"),
        lambda: with_set(
            lambda dtype: torch.set_autocast_dtype("cpu", dtype),
            torch.float16,
            torch.get_autocast_dtype("cpu"),
        ),
        torch.float16,
    ),
    "default device": (
        lambda: torch.empty(1).device.type,
        lambda: torch.device("meta"),
        "meta",
    ),
    "denormal numbers": (
        lambda: bool(torch.tensor([1e-39]).mul(1.0) == 0),
        lambda: with_set(torch.set_flush_denormal, True, False),
        True,
    ),
    "context variable": (WORD.get, lambda: with_set(WORD.set, "here", ""), "here"),
}


@pytest.mark.parametrize("name", STATES)
def test_state_of_the_caller(name) -> None:
    note, context, expected = STATES[name]
    assert noted(note, context) == {expected}
    assert noted(note, contextlib.nullcontext) != {expected}


def test_a_layer_in_a_transform_is_not_split() -> None:
    derivatives: list[torch.Tensor] = []

    def step(model: Any, x: Any) -> float:
        forward = torch.func.jvp(lambda x: model.layer(x), (x,), (x * 0 + 1,))
        backward = torch.func.vjp(model.layer, x)[1](x[:, :3])
        derivatives.extend([forward[1], backward[0]])
        return 0.0

    fitted("mirrored_2", Noting(), step)
    x = torch.tensor(classes(7).x)
    outputs = x.sum(1, keepdim=True)
    slope = 2 * outputs * (1 - torch.tanh(outputs**2) ** 2)
    found = [each.detach().cpu() for each in derivatives]
    np.testing.assert_allclose(found[0], (6 * slope).expand(7, 3), rtol=1e-4, atol=1e-6)
    expected = (slope * x[:, :3].sum(1, keepdim=True)).expand(7, 6)
    np.testing.assert_allclose(found[1], expected, rtol=1e-4, atol=1e-6)


def test_run_in_a_transform_is_an_error(mirrored) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return mirrored.run(lambda: x * x).values[0].sum()

    with pytest.raises(ks.errors.ContextError, match=r"torch\.func"):
        torch.func.grad(loss)(torch.ones(3))
