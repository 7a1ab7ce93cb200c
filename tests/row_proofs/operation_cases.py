"""Cases of operations: what goes through rows, and what needs the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from keras import ops

from keras_strategies.rows.row_placements import MEAN, ROWS, SAME, SUM
from row_proofs import case_layers as own
from row_proofs.row_case import (
    BATCH,
    FLOAT,
    Apply,
    function,
    ids,
    mixing,
    mixing_function,
    multiple,
    row_count,
    rows,
    whole,
)


def _table(*shape: int) -> Any:
    return np.random.default_rng(1).normal(size=shape).astype(FLOAT)


def _columns(x: Any, row: int = 0) -> tuple[Any, Any, Any]:
    """Arguments of `slice_update`, which has no gradient on TensorFlow."""
    given = ops.stop_gradient(x)
    return given, (row, 1), 2.0 * given[row:, :3]


def _ctc_loss(labels: Any, logits: Any) -> Any:
    ones = ops.ones_like(labels[:, 0])
    return ops.ctc_loss(labels + 1, logits, 2 * ones, 8 * ones)


TABLE, EYE, BIG = _table(BATCH, 6), _table(6, 4), _table(128, 6)
ROW_OPERATIONS = [
    function(
        "two rows for each",
        lambda x: ops.reshape(x, (-1, 3)),
        (6,),
        outputs=multiple(2),
    ),
    function(
        "repeated rows", lambda x: ops.repeat(x, 3, axis=0), (6,), outputs=multiple(3)
    ),
    function(
        "transposed there and back",
        lambda x: ops.transpose(ops.cumsum(ops.transpose(x), axis=0)),
        (6,),
    ),
    function("x * rows / rows", lambda x: x * row_count(x) / row_count(x), (6,)),
    function("stack and take", lambda x: ops.stack([x, x * x], axis=0)[1], (6,)),
    function(
        "two outputs",
        lambda x: (x + 1, {"b": ops.sum(x, -1)}),
        (6,),
        outputs=(ROWS, ROWS),
    ),
    function(
        "output without rows",
        lambda x: (x, ops.ones((3,)) * 2),
        (6,),
        outputs=(ROWS, SAME),
    ),
    function("output of a sum", lambda x: (x, ops.sum(x)), (6,), outputs=(ROWS, SUM)),
    function(
        "output of a mean", lambda x: (x, ops.mean(x)), (6,), outputs=(ROWS, MEAN)
    ),
    function(
        "output of a column mean", lambda x: ops.mean(x, 0), (6,), outputs=(MEAN,)
    ),
    function("Python output", lambda x: (x, 3.0), (6,), outputs=(ROWS, None)),
    function("argument without rows", lambda x, t: x * t, (6,), whole(6)),
    function(
        "argument as a table", lambda i, t: ops.take(t, i, axis=0), ids(3), whole(9, 4)
    ),
    # The zeros of its gradient are filled for all rows, and constants for parts.
    function("clip of many columns", lambda x: ops.clip(x, -1, 1), (200,)),
    rows("codebook", lambda: own.Codebook(), (6,), losses=(MEAN, MEAN)),
    rows(
        "sampling",
        lambda: own.Sampled(lambda x: ops.shape(x)),
        (6,),
        draws=True,
    ),
    rows("one draw for all rows", lambda: own.Sampled(lambda x: (1, 6)), (6,)),
]


MIXING_OPERATIONS = [
    mixing_function("cumsum along rows", lambda x: ops.cumsum(x, axis=0), (6,)),
    mixing("capacity", lambda: own.Capacity(100), (6,)),
    mixing(
        "an entry by the number of its row",
        lambda: Apply(lambda x: x[np.arange(x.shape[0]), np.arange(x.shape[0])]),
        (200,),
        only="torch",  # TensorFlow takes no arrays as indices.
    ),
    function(
        "zeros with rows summed",
        lambda x: x + ops.sum(ops.ones((ops.shape(x)[0], 6))) * 0.0,
        (6,),
    ),
    mixing("weight with rows", lambda: own.ZeroTable(BATCH), (6,)),
    mixing_function(
        "argument without rows but as many", lambda x, t: x + t, (6,), whole(BATCH, 6)
    ),
    mixing_function("constant times rows", lambda x: ops.matmul(TABLE.T, x), (6,)),
    mixing_function("x / rows", lambda x: x / row_count(x), (6,)),
    mixing_function("rows as an output", lambda x: (x, x.shape[0]), (6,)),
    mixing_function(
        "x / at most 64 rows",
        lambda x: x / ops.cast(ops.minimum(ops.shape(x)[0], 64), FLOAT),
        (6,),
    ),
    mixing_function(
        "matmul with an argument of rows",
        lambda x, t: ops.matmul(x, ops.transpose(t)),
        (6,),
        (6,),
    ),
]
