"""Cases of added losses, assigned variables and gradients, and of control flow."""

from __future__ import annotations

from keras import ops

from keras_strategies.rows.row_placements import MEAN, SAME, SUM
from row_proofs import case_layers as own
from row_proofs.case_layers import AddLoss, Tracked
from row_proofs.row_case import (
    BATCH,
    FLOAT,
    function,
    loss,
    mixing,
    mixing_function,
    mixing_loss,
    positive,
    row_count,
    rows,
)

LOSSES = [
    loss("0 * sum", lambda x: 0.0 * ops.sum(x * x), SUM),
    loss("0 * mean", lambda x: 0.0 * ops.mean(x * x), MEAN),
    loss("sum / rows", lambda x: ops.sum(x * x) / row_count(x), MEAN),
    loss("sum / size", lambda x: ops.sum(x) / ops.cast(ops.size(x), FLOAT), MEAN),
    loss("sum of column means", lambda x: ops.sum(ops.mean(x, 0)), MEAN),
    loss("mean + 1", lambda x: 1 + ops.mean(x), MEAN),
    loss("sum and its half", lambda x: ops.sum(x) - 0.5 * ops.sum(x * x), SUM),
    loss(
        "KL divergence",
        lambda x: -0.5 * ops.mean(ops.sum(1 + x - x * x - ops.exp(x), axis=-1)),
        MEAN,
    ),
    loss("covariance sum", lambda x: ops.sum(ops.matmul(ops.transpose(x), x)), SUM),
    loss("count of positives", lambda x: ops.sum(positive(x)), SUM),
    loss("hinge", lambda x: ops.mean(ops.maximum(0.0, x - 1e6)), MEAN),
    loss("sum of a constant 0", lambda x: ops.sum(x) + 0.0, SUM),
    loss("half a sum in float16", lambda x: ops.cast(ops.sum(x), "float16"), SUM),
    loss(
        "crossentropy",
        lambda x: ops.mean(
            ops.sparse_categorical_crossentropy(ops.argmax(x, -1), x, from_logits=True)
        ),
        MEAN,
    ),
    rows("loss of weights", lambda: own.WeightLoss(), (6,), losses=(SAME,)),
    mixing_loss("0 * max", lambda x: 0.0 * ops.max(x)),
    mixing_loss("sqrt of a sum", lambda x: ops.sqrt(ops.sum(x * x))),
    mixing_loss("sqrt of a mean", lambda x: ops.sqrt(ops.mean(x * x))),
    mixing_loss(
        "masked mean", lambda x: ops.sum(positive(x) * x) / ops.sum(positive(x))
    ),
    mixing_loss("sum + 1", lambda x: 1 + ops.sum(x)),
    mixing_loss("sum + mean", lambda x: ops.sum(x) + ops.mean(x)),
    mixing_loss("sum + 0 * mean", lambda x: ops.sum(x) + 0.0 * ops.mean(x)),
    mixing_loss(
        "load balance",
        lambda x: (
            6
            * ops.sum(
                ops.mean(ops.softmax(x), 0)
                * ops.mean(ops.one_hot(ops.argmax(x, -1), 6), 0)
            )
        ),
    ),
    mixing_loss(
        "rounded sum", lambda x: ops.cast(ops.cast(ops.sum(x), "int32"), FLOAT)
    ),
    mixing_loss("clipped mean", lambda x: ops.clip(ops.mean(x), -1e6, 1e6)),
    mixing_loss("absolute sum", lambda x: ops.abs(ops.sum(x))),
    mixing_loss("sum beyond a limit", lambda x: ops.maximum(0.0, ops.sum(x) - 1e6)),
    mixing_loss("square of a mean", lambda x: ops.square(ops.mean(x))),
    mixing_loss("product of sums", lambda x: ops.prod(ops.sum(x, axis=0))),
    mixing_loss("variance", lambda x: ops.mean(ops.var(x, axis=0))),
    mixing_loss("sum * rows", lambda x: ops.sum(x) * row_count(x)),
    mixing_loss("mean of a slice", lambda x: ops.mean(x[:2])),
    mixing_loss("rows", lambda x: ops.sqrt(row_count(x)) + 0.0 * ops.sum(x)),
    mixing_loss(
        "covariance norm",
        lambda x: ops.sum(ops.square(ops.matmul(ops.transpose(x), x))),
    ),
    mixing_loss(
        "padded sum",
        lambda x: ops.sum(ops.pad(ops.sum(x, 0), ((0, 1),), constant_values=2.0)),
    ),
    mixing_loss("sum or a constant", lambda x: ops.where(True, ops.sum(x), 1.0) + 1.0),
    rows(
        "sum padded by 0",
        lambda: AddLoss(lambda x: ops.sum(ops.pad(ops.sum(x, 0), ((0, 1),)))),
        (6,),
        losses=(SUM,),
    ),
]


UPDATES = [
    rows("counter", lambda: Tracked(lambda v, x: v + 1), (6,), updates=(SAME,)),
    rows(
        "moving average of a mean",
        lambda: Tracked(lambda v, x: 0.9 * v + 0.1 * ops.mean(x)),
        (6,),
        updates=(MEAN,),
    ),
    rows(
        "mean kept",
        lambda: Tracked(lambda v, x: ops.mean(x, axis=0), (6,)),
        (6,),
        updates=(MEAN,),
    ),
    mixing(
        "running max", lambda: Tracked(lambda v, x: ops.maximum(v, ops.max(x))), (6,)
    ),
    mixing("sum kept", lambda: Tracked(lambda v, x: v + ops.sum(x)), (6,)),
    mixing("rows counted", lambda: Tracked(lambda v, x: v + row_count(x)), (6,)),
    mixing(
        "events counted",
        lambda: Tracked(lambda v, x: v + ops.sum(ops.cast(x > 1e6, FLOAT))),
        (6,),
    ),
    mixing("last row kept", lambda: Tracked(lambda v, x: x[-1], (6,)), (6,)),
    mixing("norm kept", lambda: Tracked(lambda v, x: ops.norm(x)), (6,)),
    mixing(
        "variance kept",
        lambda: Tracked(lambda v, x: 0.9 * v + 0.1 * ops.var(x, axis=0), (6,)),
        (6,),
    ),
    mixing("rows kept", lambda: Tracked(lambda v, x: x, (BATCH, 6)), (6,)),
]


GRADIENTS = [
    function(
        "gradient clipped by row",
        own.with_gradient(lambda g: g / (1.0 + ops.norm(g, axis=-1, keepdims=True))),
        (6,),
    ),
    function("reversed gradient", own.with_gradient(lambda g: -0.5 * g), (6,)),
    mixing_function(
        "gradient clipped by its norm",
        own.with_gradient(lambda g: g / ops.maximum(ops.norm(g), 1e6)),
        (6,),
    ),
    mixing_function(
        "gradient of the mean", own.with_gradient(lambda g: g - ops.mean(g, 0)), (6,)
    ),
    mixing_function(
        "gradient divided by rows", own.with_gradient(lambda g: g / row_count(g)), (6,)
    ),
    mixing_loss(
        "gradient of a loss clipped",
        lambda x: ops.sum(
            own.with_gradient(lambda g: ops.clip(g, -1, 1) + ops.mean(g))(x)
        ),
    ),
    rows(
        "weight times its rows",
        lambda: own.Scaled(lambda w, x: x * w + ops.sum(w)),
        (6,),
    ),
    mixing(
        "clipped gradient of a weight",
        lambda: own.Scaled(
            lambda w, x: x * own.with_gradient(lambda g: g / (1e6 + ops.norm(g)))(w)
        ),
        (6,),
    ),
    rows(
        "scaled gradient of a weight",
        lambda: own.Scaled(lambda w, x: x * own.with_gradient(lambda g: 3.0 * g)(w)),
        (6,),
    ),
    mixing(
        "constant gradient of a weight",
        lambda: own.Scaled(
            lambda w, x: x * own.with_gradient(lambda g: ops.ones_like(g))(w)
        ),
        (6,),
    ),
]


CONTROL_FLOW = [
    function(
        "loop over time",
        lambda x: ops.fori_loop(
            0, 5, lambda i, h: h * 0.5 + ops.take(x, i, axis=1), x[:, 0]
        ),
        (5, 3),
    ),
    function(
        "fixed iterations",
        lambda x: ops.fori_loop(0, 3, lambda i, h: ops.tanh(h) + x, x),
        (6,),
    ),
    function("vectorized map", lambda x: ops.vectorized_map(lambda r: r * 2, x), (6,)),
    function(
        "scan over time",
        lambda x: ops.transpose(
            ops.scan(
                lambda c, z: (c + z, c + z), ops.zeros_like(x[:, 0]), ops.transpose(x)
            )[1]
        ),
        (6,),
    ),
    mixing_function(
        "branch on a statistic",
        lambda x: ops.cond(ops.mean(x) > -1e6, lambda: x, lambda: 2 * x),
        (6,),
    ),
    mixing_function(
        "loop until the norm is small",
        lambda x: ops.while_loop(
            lambda h: ops.norm(h) > 1e6, lambda h: (h * 0.5,), (x,)
        )[0],
        (6,),
    ),
    mixing_function(
        "loop over rows",
        lambda x: ops.fori_loop(
            0, ops.shape(x)[0], lambda i, h: h + ops.cast(i, FLOAT), x
        ),
        (6,),
    ),
    mixing_function(
        "value read by Python", lambda x: x * float(ops.convert_to_numpy(x)[0, 0]), (6,)
    ),
    mixing_function(
        "branch of Python on a value", lambda x: x if ops.sum(x) > -1e6 else -x, (6,)
    ),
]
