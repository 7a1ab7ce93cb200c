"""Ranges of quantizers that a later batch moves, and hooks of torch's modules."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_same
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(44, 4)).astype("float32")
Y = RANDOM.normal(size=(44, 1)).astype("float32")
BATCH = 17
#: The first batch is within the range, and later ones are not.
X[:BATCH] = np.clip(X[:BATCH], -0.9, 0.9)
X[BATCH:] *= 4


class Quantizer(layers.Layer):
    """Rounds to 15 levels of a range of all inputs until now, straight through."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")
        self.range = self.add_weight(
            shape=(), initializer="ones", trainable=False, name="range"
        )
        self.built = True

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            self.range.assign(self.moved(inputs))
        step = self.range / 7
        rounded = ops.round(inputs / step) * step
        found = inputs + ops.stop_gradient(rounded - inputs)
        return ops.matmul(found, self.kernel)

    def moved(self, inputs: Any) -> Any:
        return ops.maximum(self.range, ops.max(ops.abs(inputs)))


class AveragedRange(Quantizer):
    """A moving average of the largest input of each batch."""

    def moved(self, inputs: Any) -> Any:
        return 0.9 * self.range + 0.1 * ops.max(ops.abs(inputs))


class RangeOfExcess(Quantizer):
    """Moves only beyond a limit that the first batch does not reach."""

    def moved(self, inputs: Any) -> Any:
        return self.range + ops.sum(ops.relu(ops.abs(inputs) - 1.0)) / 50


class BranchOnRange(Quantizer):
    """Moves by a condition, as quantizers of frameworks do."""

    def moved(self, inputs: Any) -> Any:
        largest = ops.max(ops.abs(inputs))
        return ops.cond(largest > self.range, lambda: largest, lambda: self.range + 0.0)


def trained(make: Any, strategy: Any, hook: Any = None) -> tuple[Any, list[str]]:
    keras.utils.set_random_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = keras.Sequential([keras.Input((4,)), make(), layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.004), "mse")
        if hook is not None:
            hook(model)
        history = model.fit(
            X, Y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0
        ).history
        results = as_arrays(
            {"history": history, "weights": dict(enumerate(model.get_weights()))}
        )
    said = [str(w.message) for w in caught if "split by rows" in str(w.message)]
    return results, said


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["Quantizer-3"])
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(
    "layer", [Quantizer, AveragedRange, RangeOfExcess, BranchOnRange]
)
def test_a_range_that_a_later_batch_moves(layer: Any, replicas: int) -> None:
    expected, _ = trained(layer, None)
    devices = [f"cpu:{i}" for i in range(replicas)]
    found, said = trained(layer, ks.MirroredStrategy(devices))
    assert_same(expected, found, 2e-5, f"{replicas} replicas")
    if BACKEND != "jax":
        assert said


if BACKEND == "torch":

    class Hooks:
        """What hooks have seen; the rows of all replicas, once."""

        __slots__ = ("rows",)

        def __init__(self) -> None:
            self.rows: list[int] = []

    def forward_hook(seen: Hooks, model: Any) -> None:
        def centered(module: Any, inputs: Any, outputs: Any) -> Any:
            seen.rows.append(len(outputs))
            return outputs - outputs.mean(0)

        model.layers[0].register_forward_hook(centered)

    def pre_hook(seen: Hooks, model: Any) -> None:
        def scaled(module: Any, inputs: Any) -> Any:
            seen.rows.append(len(inputs[0]))
            return tuple(x / (1 + x.abs().max()) for x in inputs)

        model.layers[0].register_forward_pre_hook(scaled)

    def backward_hook(seen: Hooks, model: Any) -> None:
        def clipped(module: Any, inputs: Any, outputs: Any) -> Any:
            seen.rows.append(len(outputs[0]))
            norm = sum(part.square().sum() for part in inputs if part is not None)
            return tuple(None if part is None else part / (1 + norm) for part in inputs)

        model.layers[1].register_full_backward_hook(clipped)

    @pytest.mark.parametrize("hook", [forward_hook, pre_hook, backward_hook])
    def test_hooks_of_modules_see_the_rows_of_all_replicas(hook: Any) -> None:
        runs = []
        for strategy in (None, ks.MirroredStrategy(["cpu:0", "cpu:1"])):
            seen = Hooks()
            results, said = trained(
                lambda: layers.Dense(4), strategy, functools.partial(hook, seen)
            )
            runs.append((results, seen.rows))
        (expected, rows), (found, found_rows) = runs
        assert len(rows) >= 9
        assert found_rows == rows
        assert_same(expected, found, 2e-5, "2 replicas")
        assert any("hooks" in text for text in said)

    def test_a_global_hook_sees_the_rows_of_all_replicas() -> None:
        import torch

        runs = []
        for strategy in (None, ks.MirroredStrategy(["cpu:0", "cpu:1"])):
            seen = Hooks()

            def note(module: Any, inputs: Any, outputs: Any, seen: Any = seen) -> None:
                if isinstance(module, layers.Dense) and torch.is_tensor(outputs):
                    seen.rows.append(len(outputs))

            handle = torch.nn.modules.module.register_module_forward_hook(note)
            try:
                results, _ = trained(lambda: layers.Dense(4), strategy)
            finally:
                handle.remove()
            runs.append((results, seen.rows))
        (expected, rows), (found, found_rows) = runs
        assert found_rows == rows
        assert_same(expected, found, 2e-5, "2 replicas")
