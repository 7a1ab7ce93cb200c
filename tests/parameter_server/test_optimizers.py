"""Keras's optimizers on servers, against one device.

Updates of all optimizers are those of servers in this process, which get the gradients
that one device gets. Steps of a cluster compute gradients for two of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import pytest
from keras import optimizers

import keras_strategies as ks
from parameter_server import clusters, servers_in_process

BATCH, ROWS = 8, 30


class ScheduleFree(optimizers.ScheduleFreeAdamW):
    """Keras's on one device, with the momentum that it had before the update.

    On Torch and TensorFlow `momentum.value` is what `assign_sub` writes into, so that
    Keras 3.15 takes the new momentum twice there; on JAX, and on servers, it does not.
    """

    def update_step(self, gradient, variable, learning_rate):
        momentum = self._momentums[self._get_variable_index(variable)]
        before = keras.ops.copy(momentum.value)
        super().update_step(gradient, variable, learning_rate)
        if keras.backend.backend() != "jax":
            step = keras.ops.cast(self.iterations + 1, variable.dtype)
            moved = keras.ops.subtract(momentum, before)
            self.assign_add(variable, (1 - 1 / step) * (1 - self.beta_1) * moved)


OPTIMIZERS = {
    "adadelta": lambda: optimizers.Adadelta(1.0),
    "accumulating": lambda: optimizers.Adam(
        0.05, gradient_accumulation_steps=2, use_ema=True, ema_overwrite_frequency=3
    ),
    "adamax": lambda: optimizers.Adamax(0.05),
    "adamw": lambda: optimizers.AdamW(0.05, amsgrad=True),
    "ftrl": lambda: optimizers.Ftrl(0.5, l1_regularization_strength=0.01),
    "lamb": lambda: optimizers.Lamb(0.05),
    "lion": lambda: optimizers.Lion(0.01),
    "muon": lambda: optimizers.Muon(0.05),
    # It has a variable of its own that every update changes.
    "nadam": lambda: optimizers.Nadam(0.05, gradient_accumulation_steps=2),
    "rmsprop": lambda: optimizers.RMSprop(0.05, momentum=0.5, centered=True),
    "schedule_free": lambda: optimizers.ScheduleFreeAdamW(0.05, warmup_steps=3),
    "sgd": lambda: optimizers.SGD(0.1, momentum=0.5, nesterov=True),
}
# Optimizers that update a table as on one device also with lazy rows.
COMPLETE_WITH_LAZY_ROWS = {
    "accumulation": lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
    "average": lambda: optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4
    ),
    "lamb": lambda: optimizers.Lamb(0.05),
    "muon": lambda: optimizers.Muon(0.05, exclude_embeddings=False),
}
# What one device is given instead.
REFERENCES = {"schedule_free": lambda: ScheduleFree(0.05, warmup_steps=3)}


def build(optimizer):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(ROWS, 4, name="embedding"),
            layers.Flatten(),
            layers.Dense(6, "tanh", name="hidden"),
            layers.Dense(1),
        ]
    )
    model.compile(optimizer, "mse")
    return model


def assert_equal(ours, theirs) -> None:
    """Weights, slots, steps and learning rates are the same."""
    for found, expected in zip(ours.variables, theirs.variables, strict=True):
        np.testing.assert_allclose(
            *clusters.values([found, expected]), rtol=2e-4, atol=2e-5
        )
    assert len(ours.optimizer.variables) == len(theirs.optimizer.variables)
    for found, expected in zip(
        ours.optimizer.variables, theirs.optimizer.variables, strict=True
    ):
        np.testing.assert_allclose(
            *clusters.values([found, expected]), rtol=1e-3, atol=1e-4
        )


# Updates of servers in this process.


@pytest.fixture
def in_process():
    """Two servers in this process, in place of processes for the time of a test."""
    with servers_in_process.start(servers=2) as strategy:
        yield strategy


@pytest.fixture
def lazy():
    with servers_in_process.start(servers=2, lazy_rows=True) as strategy:
        yield strategy


def steps() -> Iterator[tuple[np.ndarray, list[np.ndarray]]]:
    """The rows of the table in each step, not all of them, and gradients."""
    random = np.random.default_rng(3)
    for _ in range(6):
        ids = np.sort(random.permutation(ROWS)[: 3 * BATCH])
        shapes = [(len(ids), 4), (12, 6), (6,), (6, 1), (1,)]
        yield ids, [random.normal(size=shape).astype("float32") for shape in shapes]


def train(strategy, ours, theirs) -> None:
    worker = servers_in_process.GradientPusher(strategy, ours)
    # Before the first update: ScheduleFreeAdamW's momentum begins with the weights.
    theirs.optimizer.build(theirs.trainable_variables)
    for ids, gradients in steps():
        worker.push(ids, gradients)
        table = np.zeros((ROWS, 4), "float32")
        table[ids] = gradients[0]
        tensors = map(keras.ops.convert_to_tensor, (table, *gradients[1:]))
        theirs.optimizer.apply(list(tensors), theirs.trainable_variables)


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["lion", "nadam", "rmsprop"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_one_device(in_process, name) -> None:
    with in_process.scope(), clusters.parts(in_process, 1):
        ours = build(OPTIMIZERS[name]())
    theirs = build(REFERENCES.get(name, OPTIMIZERS[name])())
    before = clusters.values(theirs.weights)
    train(in_process, ours, theirs)
    assert_equal(ours, theirs)
    for old, new in zip(before, clusters.values(ours.weights), strict=True):
        assert not np.array_equal(old, new)


@pytest.mark.one_backend
@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize("name", COMPLETE_WITH_LAZY_ROWS)
def test_lazy_rows_do_not_change_what_needs_the_table(lazy, name) -> None:
    make = COMPLETE_WITH_LAZY_ROWS[name]
    with lazy.scope(), clusters.parts(lazy, 1):
        ours = build(make())
    theirs = build(make())
    train(lazy, ours, theirs)
    assert_equal(ours, theirs)


@pytest.mark.one_backend("jax")
@pytest.mark.parametrize("clipping", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_gradients_of_shards_are_clipped_together(in_process, clipping) -> None:
    def optimizer():
        return optimizers.SGD(0.1, momentum=0.5, **{clipping: 0.5})

    with in_process.scope(), clusters.parts(in_process, 2):
        ours = build(optimizer())
    assert len(in_process.registry.describe(ours.weights[0]).shards) == 2
    theirs = build(optimizer())
    train(in_process, ours, theirs)
    assert_equal(ours, theirs)


# Steps of a cluster.


def data():
    """Ids that are different within a batch; each batch leaves rows untouched."""
    random = np.random.default_rng(0)
    batches = [random.permutation(ROWS)[: 3 * BATCH] for _ in range(4)]
    x = np.concatenate(batches).reshape(-1, 3).astype("int32")
    return x, random.normal(size=(len(x), 1)).astype("float32")


# Slots by row, and updates of complete tables.
@pytest.mark.one_backend
@pytest.mark.multiprocess
@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("name", ["accumulating", "adamw"])
def test_an_optimizer_does_what_it_does_on_one_device(synchronous, name) -> None:
    x, y = data()
    with synchronous.scope(), clusters.parts(synchronous, 1):
        ours = build(OPTIMIZERS[name]())
    theirs = build(OPTIMIZERS[name]())
    for model in (ours, theirs):
        model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    assert_equal(ours, theirs)


#: Optimizers that are refused, and why; variables are in two parts.
REFUSED = {
    **{
        name: (
            OPTIMIZERS[name],
            f"Optimizer {name.title()} may compute with all rows of a variable",
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


@pytest.mark.one_backend
@pytest.mark.multiprocess
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
