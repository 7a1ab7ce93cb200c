"""Hooks of torch's modules see the rows of all replicas."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_same
from keras import layers

import keras_strategies as ks
from row_proofs.proofs import trained

pytestmark = pytest.mark.one_backend("torch")

BACKEND = keras.backend.backend()
RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(44, 4)).astype("float32")
Y = RANDOM.normal(size=(44, 1)).astype("float32")


def trained_dense(strategy: Any, hook: Any = None) -> tuple[Any, list[str]]:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.004), "mse")
        return model

    def fit(model: keras.Model) -> Any:
        if hook is not None:
            hook(model)
        return model.fit(X, Y, batch_size=17, epochs=3, shuffle=False, verbose=0)

    return trained(make, fit, strategy)


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
            results, said = trained_dense(strategy, functools.partial(hook, seen))
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
                results, _ = trained_dense(strategy)
            finally:
                handle.remove()
            runs.append((results, seen.rows))
        (expected, rows), (found, found_rows) = runs
        assert found_rows == rows
        assert_same(expected, found, 2e-5, "2 replicas")
