"""Hooks of torch's modules see the rows of all replicas."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from row_proofs.proofs import assert_exact

pytestmark = pytest.mark.one_backend("torch")

RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(44, 4)).astype("float32")
Y = RANDOM.normal(size=(44, 1)).astype("float32")


def centered(seen: list[int], module: Any, inputs: Any, outputs: Any) -> Any:
    seen.append(len(outputs))
    return outputs - outputs.mean(0)


def scaled(seen: list[int], module: Any, inputs: Any) -> Any:
    seen.append(len(inputs[0]))
    return tuple(x / (1 + x.abs().max()) for x in inputs)


def clipped(seen: list[int], module: Any, inputs: Any, outputs: Any) -> Any:
    seen.append(len(outputs[0]))
    norm = sum(part.square().sum() for part in inputs if part is not None)
    return tuple(None if part is None else part / (1 + norm) for part in inputs)


def noted(seen: list[int], module: Any, inputs: Any, outputs: Any) -> Any:
    """Sees all modules of the process."""
    if isinstance(module, layers.Dense) and keras.ops.is_tensor(outputs):
        seen.append(len(outputs))


#: How each hook is registered: the layer, or None for all, and the method.
HOOKS = {
    centered: (0, "register_forward_hook"),
    scaled: (0, "register_forward_pre_hook"),
    clipped: (1, "register_full_backward_hook"),
    noted: (None, "register_module_forward_hook"),
}


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="hooks of Torch")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_of_modules_see_the_rows_of_all_replicas(hook: Any) -> None:
    import torch

    # What hooks have seen; the rows of all replicas, once.
    seen: list[list[int]] = []

    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.004), "mse")
        return model

    def fit(model: keras.Model) -> Any:
        seen.append([])
        layer, method = HOOKS[hook]
        of = torch.nn.modules.module if layer is None else model.layers[layer]
        handle = getattr(of, method)(functools.partial(hook, seen[-1]))
        try:
            return model.fit(X, Y, batch_size=17, epochs=3, shuffle=False, verbose=0)
        finally:
            handle.remove()

    said = assert_exact(make, fit)
    assert seen[0] == seen[1] and len(seen[0]) >= 9
    assert hook is noted or any("hooks" in text for text in said)
