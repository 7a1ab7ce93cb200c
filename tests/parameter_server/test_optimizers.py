"""Keras's optimizers on servers, against one device."""

from __future__ import annotations

import keras
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
    several,
)

pytestmark = [
    pytest.mark.one_backend,
    pytest.mark.one_backend,
    pytest.mark.multiprocess,
]


def data():
    """Ids that are different within a batch; each batch leaves rows untouched."""
    random = np.random.default_rng(0)
    batches = [random.permutation(ROWS)[: 3 * BATCH] for _ in range(STEPS)]
    x = np.concatenate(batches).reshape(-1, 3).astype("int32")
    return x, random.normal(size=(len(x), 1)).astype("float32")


# Slots by row, and slots that need complete variables, with updates of complete tables.
# `test_optimizer_updates` has the updates of all optimizers, without processes.
BY_DAY = ("adafactor_accumulating", "adamw")


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


@pytest.mark.parametrize("name", ["adafactor", "lamb", "muon"])
def test_what_needs_whole_variables_does_not_get_parts(synchronous, name) -> None:
    x, y = data()
    with synchronous.scope(), clusters.parts(synchronous, 2):
        model = build(OPTIMIZERS[name]())
    message = f"Optimizer {name.title()} computes with all rows of a variable at once"
    with pytest.raises(ks.errors.InvalidArgumentError, match=message):
        model.fit(x, y, batch_size=BATCH, verbose=0)
    # The cluster goes on.
    with synchronous.scope():
        model = build("adam")
    model.fit(x, y, batch_size=BATCH, verbose=0)


# Variables of an optimizer that are of no trained variable's shape


OPTIONS = {"batch_size": BATCH, "shuffle": False, "verbose": 0}


def test_files_keep_factored_moments(synchronous, tmp_path) -> None:
    x, y = data()
    alone = build(optimizers.Adafactor(0.05))
    with synchronous.scope(), clusters.parts(synchronous, 1):
        ours = build(optimizers.Adafactor(0.05))
    for name, model in (("alone", alone), ("ours", ours)):
        model.fit(x, y, epochs=2, **OPTIONS)
        model.save(tmp_path / f"{name}.keras")
    from_ours = keras.saving.load_model(tmp_path / "ours.keras")
    with synchronous.scope(), clusters.parts(synchronous, 1):
        from_alone = keras.saving.load_model(tmp_path / "alone.keras")
        back = keras.saving.load_model(tmp_path / "ours.keras")
    for model in (from_ours, from_alone, back):
        assert_equal(model, alone)
    for model in (alone, ours, from_ours, from_alone, back):
        model.fit(x, y, **OPTIONS)
    for model in (ours, from_ours, from_alone, back):
        assert_equal(model, alone)


def test_factored_moments_are_where_their_variable_is(synchronous) -> None:
    x, y = data()
    with synchronous.scope(), clusters.parts(synchronous, 1):
        model = build(optimizers.Adafactor(0.05))
    model.fit(x, y, **OPTIONS)
    describe = synchronous.registry.describe
    servers = {w.path: describe(w).shards[0].server for w in model.trainable_weights}
    assert set(servers.values()) == {0, 1}
    kept = [v for v in model.optimizer.variables if v.name in ("embeddings", "kernel")]
    assert [v.shape for v in kept] == [(30,), (4,), (12,), (6,), (6,), (1,)]
    trained = [w for w in model.trainable_weights if len(w.shape) == 2]
    for weight, own in zip(trained, (kept[:2], kept[2:4], kept[4:]), strict=True):
        for variable in own:
            [part] = describe(variable).shards
            assert part.server == servers[weight.path]
            assert (part.start, part.stop) == (0, variable.shape[0])
            assert np.all(clusters.values([variable])[0] > 0)
    lines = str(synchronous.describe(model)).splitlines()
    assert [line for line in lines if "adafactor" in line and "12" in line]


class Shared(optimizers.SGD):
    """Adds the gradients' sums of squares by column, for all variables together."""

    def build(self, variables):
        super().build(variables)
        self.columns = self.add_variable((1,), name="columns")

    def update_step(self, gradient, variable, learning_rate):
        squares = keras.ops.sum(keras.ops.square(gradient))
        self.assign_add(self.columns, keras.ops.reshape(squares, (1,)))
        super().update_step(gradient, variable, learning_rate)


def test_what_several_variables_share_is_refused(synchronous) -> None:
    x, y = data()
    with synchronous.scope():
        model = build(Shared(0.05))
    message = (
        r"Optimizer Shared has a variable of shape \(1,\), '\w+/columns', that was "
        r"not created by .*The updates of 5 variables use it, among them "
        r"'\w+/embedding/emb"
    )
    with pytest.raises(ks.errors.InvalidArgumentError, match=message):
        model.fit(x, y, **OPTIONS)


class Damped(optimizers.Optimizer):
    """Scales a matrix by its columns' history; `unused` is read by nobody."""

    def build(self, variables):
        super().build(variables)
        self.unused = self.add_variable((3,), initializer="ones", name="unused")
        self.history = [
            self.add_variable(v.shape[-1:], initializer="ones", name="history")
            for v in variables
        ]

    def update_step(self, gradient, variable, learning_rate):
        history = self.history[self._get_variable_index(variable)]
        axes = list(range(len(variable.shape) - 1))
        squares = keras.ops.sum(keras.ops.square(gradient), axes)
        self.assign_add(history, squares)
        scaled = gradient / keras.ops.sqrt(history)
        self.assign_sub(variable, learning_rate * scaled)


def test_an_optimizer_of_ones_own_keeps_what_it_likes(synchronous) -> None:
    x, y = data()
    with synchronous.scope(), clusters.parts(synchronous, 1):
        ours = build(Damped(0.3))
    theirs = build(Damped(0.3))
    for model in (ours, theirs):
        model.fit(x, y, epochs=3, **OPTIONS)
    assert_equal(ours, theirs)


# Several optimizers


def test_several_optimizers_each_have_their_variables(synchronous, tmp_path) -> None:
    x, y = data()
    with synchronous.scope(), clusters.parts(synchronous, 1):
        ours = build(several())
    theirs = build(several())
    for model in (ours, theirs):
        model.fit(x, y, epochs=2, **OPTIONS)
    assert_equal(ours, theirs)
    inner = ours.optimizer.optimizers
    assert [len(o._trainable_variables) for o in inner] == [1, 2, 2]
    for optimizer in (ours.optimizer, *inner):
        assert int(keras.ops.convert_to_numpy(optimizer.iterations)) == 2 * STEPS
    ours.save(tmp_path / "ours.keras")
    theirs.save(tmp_path / "theirs.keras")
    from_ours = keras.saving.load_model(tmp_path / "ours.keras")
    with synchronous.scope(), clusters.parts(synchronous, 1):
        from_theirs = keras.saving.load_model(tmp_path / "theirs.keras")
    for model in (theirs, from_ours, from_theirs):
        model.fit(x, y, **OPTIONS)
    assert_equal(from_ours, theirs)
    assert_equal(from_theirs, theirs)
    # The table may be in parts, for Adam; what Adafactor has may not.
    with synchronous.scope():
        in_parts = build(several())
    with pytest.raises(
        ks.errors.InvalidArgumentError, match="/hidden/kernel', which is sharded"
    ):
        in_parts.fit(x, y, **OPTIONS)


def test_several_optimizers_get_gradients_of_a_scaled_loss(synchronous) -> None:
    x, y = data()
    with synchronous.scope(), clusters.parts(synchronous, 1):
        ours = build(optimizers.LossScaleOptimizer(several(), initial_scale=64.0))
    theirs = build(several())
    for model in (ours, theirs):
        model.fit(x, y, epochs=2, **OPTIONS)
    # Built within another one, Adafactor does not list its placeholders.
    mine, expected = (
        [*model.variables, *(v for v in optimizer.variables if len(v.shape))]
        for model, optimizer in (
            (ours, ours.optimizer.inner_optimizer),
            (theirs, theirs.optimizer),
        )
    )
    for one, other in zip(
        clusters.values(mine), clusters.values(expected), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def chosen_one_by_one(variable):
    return optimizers.Adam(0.05) if "kernel" in variable.path else optimizers.SGD(0.1)


def test_an_optimizer_for_each_variable(synchronous) -> None:
    x, y = data()
    with synchronous.scope(), clusters.parts(synchronous, 1):
        ours = build(optimizers.MultiOptimizer(chosen_one_by_one))
    theirs = build(optimizers.MultiOptimizer(chosen_one_by_one))
    for model in (ours, theirs):
        model.fit(x, y, epochs=2, **OPTIONS)
    assert len(ours.optimizer.optimizers) == 5
    assert_equal(ours, theirs)


# Touched rows, and no bound on staleness: one worker, one step after the other


WITHOUT_BOUND = {
    "adafactor": lambda: optimizers.Adafactor(0.05),
    "lamb": lambda: optimizers.Lamb(0.05),
    # The table too is taken for a matrix.
    "muon": lambda: optimizers.Muon(0.05, exclude_embeddings=False),
}


@pytest.fixture(scope="module")
def alone():
    """One worker that never asks for values ahead, so that no update is missed."""
    with clusters.start(workers=1, ps=2, pull_ahead=False) as strategy:
        yield strategy


@pytest.mark.nightly(unless=["lamb"])
@pytest.mark.parametrize("name", WITHOUT_BOUND)
def test_touched_rows_are_updated_with_the_whole_table(alone, name) -> None:
    x, y = data()
    with alone.scope():
        ours = build(WITHOUT_BOUND[name]())
    theirs = build(WITHOUT_BOUND[name]())
    before = clusters.values(theirs.weights)[0]
    for model in (ours, theirs):
        model.fit(x[:BATCH], y[:BATCH], **OPTIONS)
    assert_equal(ours, theirs)
    [worker] = alone.cluster.scheduler.workers.values()
    for model in (ours, theirs):
        model.fit(x, y, epochs=3, **OPTIONS)
    assert_equal(ours, theirs)
    assert worker.most_staleness == 0
    assert np.any(clusters.values(ours.weights)[0] != before)
