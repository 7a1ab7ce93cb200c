"""Cases of operations: what goes through rows, and what needs the batch."""

from __future__ import annotations

import keras
import numpy as np
from keras import ops

from keras_strategies.rows.row_placements import MEAN, ROWS, SAME, SUM
from row_proofs import case_layers as own
from row_proofs.row_case import (
    BATCH,
    FLOAT,
    function,
    ids,
    mixing,
    mixing_function,
    multiple,
    row_count,
    rows,
    whole,
)

TABLE = np.random.default_rng(1).normal(size=(BATCH, 6)).astype(FLOAT)
ROW_OPERATIONS = [
    function(
        "two rows for each", lambda x: ops.reshape(x, (-1, 3)), outputs=multiple(2)
    ),
    function("repeated rows", lambda x: ops.repeat(x, 3, axis=0), outputs=multiple(3)),
    function(
        "transposed there and back",
        lambda x: ops.transpose(ops.cumsum(ops.transpose(x), axis=0)),
    ),
    function("x * rows / rows", lambda x: x * row_count(x) / row_count(x)),
    function("stack and take", lambda x: ops.stack([x, x * x], axis=0)[1]),
    function(
        "two outputs", lambda x: (x + 1, {"b": ops.sum(x, -1)}), outputs=(ROWS, ROWS)
    ),
    function(
        "output without rows", lambda x: (x, ops.ones((3,)) * 2), outputs=(ROWS, SAME)
    ),
    function("output of a sum", lambda x: (x, ops.sum(x)), outputs=(ROWS, SUM)),
    function("output of a mean", lambda x: (x, ops.mean(x)), outputs=(ROWS, MEAN)),
    function("output of a column mean", lambda x: ops.mean(x, 0), outputs=(MEAN,)),
    function("Python output", lambda x: (x, 3.0), outputs=(ROWS, None)),
    function("argument without rows", lambda x, t: x * t, (6,), whole(6)),
    function(
        "argument as a table", lambda i, t: ops.take(t, i, axis=0), ids(3), whole(9, 4)
    ),
    # The zeros of its gradient are filled for all rows, and constants for parts.
    function("clip of many columns", lambda x: ops.clip(x, -1, 1), (200,)),
    rows("codebook", lambda: own.Codebook(), losses=(MEAN, MEAN)),
    rows("sampling", lambda: own.Sampled(lambda x: ops.shape(x)), draws=True),
    rows("one draw for all rows", lambda: own.Sampled(lambda x: (1, 6))),
]


MIXING_OPERATIONS = [
    mixing_function("cumsum along rows", lambda x: ops.cumsum(x, axis=0)),
    mixing("capacity", lambda: own.Capacity(100)),
    function(
        "zeros with rows summed",
        lambda x: x + ops.sum(ops.ones((ops.shape(x)[0], 6))) * 0.0,
    ),
    mixing("weight with rows", lambda: own.ZeroTable(BATCH)),
    mixing_function(
        "argument without rows but as many", lambda x, t: x + t, (6,), whole(BATCH, 6)
    ),
    mixing_function("constant times rows", lambda x: ops.matmul(TABLE.T, x)),
    mixing_function("x / rows", lambda x: x / row_count(x)),
    mixing_function("rows as an output", lambda x: (x, x.shape[0])),
    mixing_function(
        "x / at most 64 rows",
        lambda x: x / ops.cast(ops.minimum(ops.shape(x)[0], 64), FLOAT),
    ),
    mixing_function(
        "matmul with an argument of rows",
        lambda x, t: ops.matmul(x, ops.transpose(t)),
        (6,),
        (6,),
    ),
]
if keras.backend.backend() != "tensorflow":  # It takes no arrays as indices.
    MIXING_OPERATIONS.append(
        mixing_function(
            "an entry by the number of its row",
            lambda x: x[np.arange(x.shape[0]), np.arange(x.shape[0])],
            (200,),
        )
    )
