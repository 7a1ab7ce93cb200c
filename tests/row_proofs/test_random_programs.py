"""Random programs: none that mixes rows is proved, and all others are.

A program is a chain of functions that keep the shape, some of which mix rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import keras
import pytest
from keras import ops

from row_proofs import proofs
from row_proofs.case_layers import SIZES, Own, with_gradient
from row_proofs.split_numbers import assert_parts_equal

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

Function = Callable[[Any], Any]
MATRIX = proofs.normal(6, 6, seed=2)
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
    with_gradient(lambda x, g: g / (1 + ops.norm(g, axis=1, keepdims=True))),
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
    with_gradient(lambda x, g: g / ops.maximum(ops.norm(g), 1e6)),
]
#: With whether they can be split.
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


def program(seed: int) -> tuple[Own, bool]:
    """A program, and whether it can be split by rows."""
    own = random.Random(seed)
    functions = own.choices(BY_ROWS, k=own.randint(1, 4))
    mixes = own.random() < 0.4
    if mixes:
        functions.insert(own.randint(0, len(functions)), own.choice(MIXING))
    loss, is_split = own.choice(LOSSES) if own.random() < 0.5 else (None, True)

    def run(layer: Own, x: Any) -> Any:
        for function in functions:
            x = function(x)
        outputs = ops.matmul(x, layer.matrix)
        if loss is not None:
            layer.add_loss(loss(outputs))
        return outputs

    matrix = {"shape": (6, 6), "initializer": "random_normal"}
    return Own(run, matrix=matrix), not mixes and is_split


@proofs.needs_split
@pytest.mark.parametrize("sizes", [SIZES, (7, 1)], ids=str)
@pytest.mark.parametrize("seed", range(16))
def test_random_programs(seed: int, sizes: tuple[int, int]) -> None:
    keras.utils.set_random_seed(seed)
    layer, is_by_rows = program(seed)
    values = [proofs.normal(8, 6, seed=seed) + 0.2]
    layer(ops.convert_to_tensor(values[0]))
    proof = proofs.proof_of(layer, values, sizes=sizes)
    assert (proof.problem is None) == is_by_rows
    if is_by_rows:
        assert_parts_equal(layer, values, proof, sizes=sizes)
