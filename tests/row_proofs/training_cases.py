"""Cases of added losses, assigned variables and gradients, and of control flow."""

from __future__ import annotations

from keras import ops

from keras_strategies.rows.row_placements import MEAN, SAME, SUM
from row_proofs import case_layers as own
from row_proofs.case_layers import AddLoss, Tracked
from row_proofs.row_case import (
    BATCH,
    function,
    loss,
    mixing,
    mixing_loss,
    row_count,
    rows,
)

LOSSES = [
    loss("0 * sum", lambda x: 0.0 * ops.sum(x * x), SUM),
    loss("0 * mean", lambda x: 0.0 * ops.mean(x * x), MEAN),
    loss("sum / rows", lambda x: ops.sum(x * x) / row_count(x), MEAN),
    loss("mean + 1", lambda x: 1 + ops.mean(x), MEAN),
    loss("sum and its half", lambda x: ops.sum(x) - 0.5 * ops.sum(x * x), SUM),
    loss(
        "crossentropy",
        lambda x: ops.mean(
            ops.sparse_categorical_crossentropy(ops.argmax(x, -1), x, from_logits=True)
        ),
        MEAN,
    ),
    rows("loss of weights", lambda: own.WeightLoss(), losses=(SAME,)),
    mixing_loss("sum + 0 * mean", lambda x: ops.sum(x) + 0.0 * ops.mean(x)),
    mixing_loss(
        "padded sum",
        lambda x: ops.sum(ops.pad(ops.sum(x, 0), ((0, 1),), constant_values=2.0)),
    ),
    rows(
        "sum padded by 0",
        lambda: AddLoss(lambda x: ops.sum(ops.pad(ops.sum(x, 0), ((0, 1),)))),
        losses=(SUM,),
    ),
]


UPDATES = [
    rows("counter", lambda: Tracked(lambda v, x: v + 1), updates=(SAME,)),
    rows(
        "moving average of a mean",
        lambda: Tracked(lambda v, x: 0.9 * v + 0.1 * ops.mean(x)),
        updates=(MEAN,),
    ),
    mixing("rows counted", lambda: Tracked(lambda v, x: v + row_count(x))),
    mixing("rows kept", lambda: Tracked(lambda v, x: x, (BATCH, 6))),
]


GRADIENTS = [
    function(
        "gradient clipped by row",
        own.with_gradient(lambda g: g / (1.0 + ops.norm(g, axis=-1, keepdims=True))),
    ),
    mixing(
        "clipped gradient of a weight",
        lambda: own.Scaled(
            lambda w, x: x * own.with_gradient(lambda g: g / (1e6 + ops.norm(g)))(w)
        ),
    ),
    rows(
        "scaled gradient of a weight",
        lambda: own.Scaled(lambda w, x: x * own.with_gradient(lambda g: 3.0 * g)(w)),
    ),
    mixing(
        "constant gradient of a weight",
        lambda: own.Scaled(
            lambda w, x: x * own.with_gradient(lambda g: ops.ones_like(g))(w)
        ),
    ),
]


CONTROL_FLOW = [
    function(
        "loop over time",
        lambda x: ops.fori_loop(
            0, 5, lambda i, h: h * 0.5 + ops.take(x, i, axis=1), x[:, 0]
        ),
        (5, 3),
    )
]
