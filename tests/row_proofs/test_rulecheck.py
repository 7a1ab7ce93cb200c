"""`ks.rulecheck` names where the rows are, or the line at which they are lost."""

from __future__ import annotations

import inspect
import random
from typing import Any

import keras
import numpy as np
import pytest
import scipy.stats
from keras import layers, ops

import keras_strategies as ks
from row_proofs.proofs import Apply

pytestmark = pytest.mark.one_backend
NORMAL = scipy.stats.norm()
NORMAL.random_state = np.random.RandomState(2)


class Block(layers.Layer):
    def __init__(self) -> None:
        super().__init__(name="block")
        self.dense, self.dropout = layers.Dense(3), layers.Dropout(0.5)
        self.seen = self.add_weight(shape=(), name="seen", trainable=False)

    def call(self, x: Any, training: bool = False) -> Any:
        y = self.dense(x)
        self.add_loss(ops.mean(y**2))
        if training:
            self.seen.assign(ops.mean(y))
        each = ops.repeat(y, 3, axis=0)
        return self.dropout(y), ops.sum(y), each, ops.ones((2,))


def flipped(x: Any) -> Any:
    return x - ops.flip(x, axis=0)


def softmax_of_rows(x: Any) -> Any:
    return ops.softmax(x, axis=0)


ROWS, MEAN, SAME = "rows along axis 0", "a mean over rows", "the same for all rows"
EXPECTED = ks.RowReport(
    "Layer 'block' (Block)",
    outputs=(ROWS, "a sum over rows", f"{ROWS}, 3 entries for each row", SAME),
    losses=(MEAN,),
    updates=(("block/seen", MEAN),),
    draws=(ROWS,),
)


@pytest.mark.parametrize(
    "argument",
    [(None, 8), (6, 8), np.ones((7, 8), "float32"), keras.KerasTensor((None, 8))],
    ids=["any", "shape", "array", "symbolic"],
)
def test_results_of_a_layer(argument: Any) -> None:
    report = ks.rulecheck(Block(), argument, training=True)
    assert report == EXPECTED and report.is_row_wise
    assert str(report).splitlines() == [
        "Layer 'block' (Block) can be split by rows.",
        "  output 0: rows along axis 0",
        "  output 1: a sum over rows",
        "  output 2: rows along axis 0, 3 entries for each row",
        "  output 3: the same for all rows",
        "  loss 0: a mean over rows",
        "  draw 0: rows along axis 0",
        "  variable 'block/seen': a mean over rows",
    ]


def test_layer_is_as_before() -> None:
    layer = Block()
    x = ops.ones((4, 8))
    layer(x)
    before = [ops.convert_to_numpy(v) for v in layer.variables]
    ks.rulecheck(layer, x, training=True)
    for old, new in zip(before, layer.variables, strict=True):
        np.testing.assert_array_equal(old, ops.convert_to_numpy(new))


@pytest.mark.parametrize("where", ["layer", "model"])
def test_operation_at_fault(where: str) -> None:
    layer = Apply(flipped, name="center")
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layer])
    report = ks.rulecheck(layer if where == "layer" else model, (None, 8))
    line = inspect.getsourcelines(flipped)[1] + 1
    assert not report.is_row_wise and report.problem is not None
    assert f"test_rulecheck.py:{line}" in report.problem
    assert "'Flip' (in layer 'center' (Apply)" in report.problem
    assert "cannot be split by rows: " in str(report)
    assert "or example to the loss" in str(report) and "`ks.row_wise`" in str(report)


def test_sums_that_replicas_exchange_in_fit() -> None:
    report = ks.rulecheck(Apply(lambda x: x - ops.mean(x, axis=0)), (None, 8))
    assert report.problem is not None and "'Subtract'" in report.problem
    assert "Replicas exchange its sums over rows" in report.advice


def test_function_and_losses() -> None:
    report = ks.rulecheck(softmax_of_rows, (None, 4))
    line = inspect.getsourcelines(softmax_of_rows)[1] + 1
    assert f"'Softmax' (test_rulecheck.py:{line}) goes along the rows" in str(report)
    assert "Function 'softmax_of_rows'" in str(report)
    assert ks.rulecheck(ops.relu, (None, 4)).outputs == (ROWS,)
    for loss in (keras.losses.MeanSquaredError(), keras.losses.KLDivergence()):
        assert ks.rulecheck(loss, (None, 4), (None, 4)).outputs == (MEAN,)
    assert not ks.rulecheck(keras.losses.Dice(), (None, 4), (None, 4)).is_row_wise


def test_values_are_not_read() -> None:
    report = ks.rulecheck(lambda x: x if float(ops.sum(x)) > 0 else -x, (None, 4))
    assert "reads the value of a tensor" in str(report)


@pytest.mark.parametrize("draw", [random.random, np.random.rand, NORMAL.rvs])
def test_draws_that_are_not_of_keras(draw: Any) -> None:
    """Nothing is drawn: the generators are those of another thread, too."""
    before = random.getstate(), str(np.random.get_state())
    report = ks.rulecheck(lambda x: x if draw() < 0.5 else -x, (None, 4))
    assert "may draw random numbers" in str(report)
    assert (random.getstate(), str(np.random.get_state())) == before


def test_shared_arguments() -> None:
    # The first number is that of the rows.
    assert not ks.rulecheck(ops.matmul, (None, 4), (4, 3)).is_row_wise
    assert ks.rulecheck(ops.matmul, (6, 4), (4, 3)).outputs == (ROWS,)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ((3, (None, 4)), TypeError, "takes a layer, .* found 3"),
        ((layers.Dense, (None, 4)), TypeError, "Make an instance of a class"),
        ((keras.metrics.Mean, (None, 4)), TypeError, "of a metric"),
        ((ops.relu,), ValueError, "found no tensor with an axis"),
        ((ops.relu, (1, 4)), ValueError, r"found 1 in shape \(1, 4\)"),
        ((layers.Dense(3), (None,)), ValueError, "cannot be built from the arguments"),
    ],
)
def test_bad_input(arguments: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        ks.rulecheck(*arguments)
