"""Keras's optimizers on servers, against one device."""

from __future__ import annotations

import numpy as np
import pytest
from keras import optimizers

import keras_strategies as ks
from parameter_server import clusters
from parameter_server.optimizer_cases import (
    BATCH,
    OPTIMIZERS,
    REFERENCES,
    ROWS,
    STEPS,
    assert_equal,
    build,
)

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]


def data():
    """Ids that are different within a batch; each batch leaves rows untouched."""
    random = np.random.default_rng(0)
    batches = [random.permutation(ROWS)[: 3 * BATCH] for _ in range(STEPS)]
    x = np.concatenate(batches).reshape(-1, 3).astype("int32")
    return x, random.normal(size=(len(x), 1)).astype("float32")


# Slots by row, and updates of complete tables.
# `test_optimizer_updates` has the updates of all optimizers, without processes.
BY_DAY = ("accumulating", "adamw")


@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize(
    "name",
    [
        name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly)
        for name in OPTIMIZERS
    ],
)
def test_an_optimizer_does_what_it_does_on_one_device(synchronous, name) -> None:
    x, y = data()
    with synchronous.scope(), clusters.parts(synchronous, 1):
        ours = build(OPTIMIZERS[name]())
    theirs = build(REFERENCES.get(name, OPTIMIZERS[name])())
    # In a graph of TensorFlow, ScheduleFreeAdamW's momentum would begin with zeros.
    theirs.optimizer.build(theirs.trainable_variables)
    for model in (ours, theirs):
        model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    assert_equal(ours, theirs)


#: Optimizers that are refused, and why; variables are in two parts.
REFUSED = {
    **{
        name: (
            OPTIMIZERS[name],
            f"Optimizer {name.title()} computes with all rows of a variable at once",
        )
        for name in ("lamb", "muon")
    },
    "adafactor": (
        lambda: optimizers.Adafactor(0.05),
        r"Adafactor has a variable of shape \(30,\), .*was not created by",
    ),
    "multi": (
        lambda: optimizers.MultiOptimizer(lambda variable: optimizers.SGD(0.1)),
        "MultiOptimizer consists of several",
    ),
    "scaled": (
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)),
        'LossScaleOptimizer changes its loss scale .*"mixed_bfloat16"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_servers_do_not_apply_is_refused(synchronous, name) -> None:
    x, y = data()
    make, message = REFUSED[name]
    with synchronous.scope():
        model = build(make())
    with pytest.raises(ks.errors.InvalidArgumentError, match=message):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    # The cluster goes on.
    with synchronous.scope():
        model = build("adam")
    model.fit(x, y, batch_size=BATCH, verbose=0)
