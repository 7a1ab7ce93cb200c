"""Random programs: none that mixes rows is proved, and all others are.

A program is a chain of functions that keep the shape, some of which mix rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from row_proofs.case_layers import with_gradient
from row_proofs.proofs import needs_split, proof_of
from row_proofs.row_case import SIZES
from row_proofs.split_numbers import assert_parts_equal

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

MATRIX = np.random.default_rng(2).normal(size=(6, 6)).astype("float32")

Function = Callable[[Any], Any]

BY_ROWS: list[Function] = [
    lambda x: ops.relu(x) + 0.1 * x,
    lambda x: x - ops.mean(x, -1, keepdims=True),
    lambda x: ops.cumsum(x, 1),
    lambda x: ops.sort(x, 1),
    lambda x: ops.matmul(x, MATRIX),
    lambda x: ops.reshape(ops.tanh(ops.reshape(x, (-1, 3))), (-1, 6)),
    lambda x: ops.transpose(ops.cumsum(ops.transpose(x), 0)),
    lambda x: ops.pad(x, ((0, 0), (1, 0)))[:, 1:],
    lambda x: ops.take_along_axis(x, ops.argsort(x, axis=1), axis=1),
    lambda x: ops.take(ops.convert_to_tensor(MATRIX), ops.argmax(x, 1), axis=0) * x,
    lambda x: ops.einsum("bi,bj->bij", x, x)[:, 0],
    lambda x: ops.concatenate([x[:, :3], x[:, 3:] * 2], 1),
    lambda x: ops.stack([x, x * x], 0)[1],
    lambda x: x / ops.norm(x, axis=1, keepdims=True),
    lambda x: with_gradient(lambda g: g / (1 + ops.norm(g, axis=1, keepdims=True)))(x),
]
MIXING: list[Function] = [
    lambda x: x - ops.mean(x),
    lambda x: ops.cumsum(x, 0),
    lambda x: ops.flip(x, 0),
    lambda x: x + x[:1],
    lambda x: x * float(x.shape[0]),
    lambda x: ops.reshape(ops.transpose(x), (-1, 6)),
    lambda x: x + ops.tanh(ops.sum(x)) * 0.0,
    lambda x: ops.matmul(ops.softmax(ops.matmul(x, ops.transpose(x))), x),
    lambda x: ops.sort(x, 0),
    lambda x: x + ops.cast(ops.arange(x.shape[0])[:, None], "float32"),
    lambda x: x / ops.cast(ops.max(ops.argmax(x, 1)) + 7, "float32"),
    lambda x: ops.roll(ops.reshape(x, (-1, 1)), 1, 0) * ops.ones((1, 6)),
    lambda x: with_gradient(lambda g: g / ops.maximum(ops.norm(g), 1e6))(x),
]
LOSSES: list[tuple[Function, bool]] = [
    (lambda x: ops.sum(x), True),
    (lambda x: ops.mean(ops.square(x)), True),
    (lambda x: ops.sum(ops.mean(x, 0)), True),
    (lambda x: ops.mean(ops.sum(x, 1)) + 2, True),
    (lambda x: ops.sum(x) / ops.cast(ops.size(x), "float32"), True),
    (lambda x: ops.sum(ops.square(ops.sum(x, 0))), False),
    (lambda x: 0.0 * ops.max(x), False),
    (lambda x: ops.sqrt(ops.mean(x * x)), False),
]


class Program(layers.Layer):
    def __init__(self, functions: list[Function], loss: Function | None):
        super().__init__()
        self.functions, self.loss = functions, loss

    def build(self, shape: Any) -> None:
        self.matrix = self.add_weight(shape=(6, 6), initializer="random_normal")

    def call(self, inputs: Any) -> Any:
        for function in self.functions:
            inputs = function(inputs)
        outputs = ops.matmul(inputs, self.matrix)
        if self.loss is not None:
            self.add_loss(self.loss(outputs))
        return outputs


def program(seed: int) -> tuple[Program, bool]:
    """A program, and whether it can be split by rows."""
    own = random.Random(seed)
    functions = own.choices(BY_ROWS, k=own.randint(1, 4))
    mixes = own.random() < 0.4
    if mixes:
        functions.insert(own.randint(0, len(functions)), own.choice(MIXING))
    loss = own.choice(LOSSES) if own.random() < 0.5 else (None, True)
    return Program(functions, loss[0]), not mixes and loss[1]


@needs_split
@pytest.mark.parametrize("sizes", [SIZES, (7, 1)], ids=str)
@pytest.mark.parametrize("seed", range(16))
def test_random_programs(seed: int, sizes: tuple[int, int]) -> None:
    keras.utils.set_random_seed(seed)
    layer, is_by_rows = program(seed)
    values = [np.random.default_rng(seed).normal(size=(8, 6)).astype("float32") + 0.2]
    layer(ops.convert_to_tensor(values[0]))
    proof = proof_of(layer, values, [True], sizes)
    if not is_by_rows:
        assert proof.problem is not None
        return
    assert proof.problem is None
    assert_parts_equal(layer, values, proof, sizes=sizes)
