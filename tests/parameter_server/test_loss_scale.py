"""Dynamic loss scales, which the dtype policy `mixed_float16` needs."""

from __future__ import annotations

import contextlib
import itertools
import math

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from keras_strategies.parameter_server.wire.step_messages import (
    ScaleReport,
    StepRequest,
)
from parameter_server import clusters

pytestmark = pytest.mark.one_backend

SCALE, COUNTER = (0, 0), (1, 0)
OPTIONS = {"batch_size": 8, "shuffle": False, "verbose": 0}
#: Sums in half precision depend on their order.
TOLERANCE = 2**-8


@contextlib.contextmanager
def half_precision():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def scaled(inner, scale: float, growth: int = 3):
    return keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=scale, dynamic_growth_steps=growth
    )


def state(optimizer) -> tuple[float, int, int]:
    """The scale, the steps since it changed, and the updates that were made."""
    scale, counter, made = (
        keras.ops.convert_to_numpy(value)
        for value in (
            optimizer.dynamic_scale,
            optimizer.step_counter,
            optimizer.iterations,
        )
    )
    return float(scale), int(counter), int(made)


class Scales(keras.callbacks.Callback):
    """Keeps the optimizer's state after every step."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(state(self.model.optimizer))


def assert_alike(found, expected, tolerance: float = TOLERANCE) -> None:
    for ours, theirs in zip(
        clusters.values(found.variables),
        clusters.values(expected.variables),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    pairs = zip(found.optimizer.variables, expected.optimizer.variables, strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(
            *clusters.values([ours, theirs]), rtol=tolerance, atol=tolerance
        )


# Where the scale is kept


@pytest.fixture
def server(tmp_path) -> ParameterServer:
    made = ParameterServer(0, str(tmp_path))
    made.handle(("begin", "me"))
    parts = [(SCALE, np.array(64.0, "float32")), (COUNTER, np.array(1, "int32"))]
    made.handle(("create", parts))
    return made


def report(server, closure, used, is_finite, growth=3):
    """Tells a server of a step; the scale and the counter then."""
    found = ScaleReport(SCALE, COUNTER, growth, np.float32(used), is_finite)
    step = StepRequest(update=(closure, 0), scales=(found,))
    server.handle(("step", step, "me"))
    values = [server.handle(("read", (key, 0, 1))) for key in (SCALE, COUNTER)]
    return float(values[0]), int(values[1])


def test_the_scale_follows_the_rule_of_keras(server) -> None:
    assert report(server, 0, 64, True) == (64, 2)
    assert report(server, 1, 64, True) == (128, 0)
    assert report(server, 2, 128, True) == (128, 1)
    assert report(server, 3, 128, False) == (64, 0)
    assert report(server, 4, 64, False) == (32, 0)
    assert report(server, 5, 32, True, growth=1) == (64, 0)


def test_a_scale_that_is_too_large_for_many_is_halved_once(server) -> None:
    for closure in range(4):
        assert report(server, closure, 64, False) == (32, 0)
    # What was finite at the scale before counts neither for nor against this one.
    assert report(server, 5, 64, True) == (32, 0)
    assert report(server, 6, 32, True) == (32, 1)
    assert report(server, 7, 64, False) == (32, 1)


def test_what_is_reported_again_counts_once(server, tmp_path) -> None:
    assert report(server, 0, 64, True) == (64, 2)
    assert report(server, 0, 64, True) == (64, 2)
    server.handle(("snapshot", None))
    again = ParameterServer(0, str(tmp_path))
    again.handle(("begin", "me"))
    assert report(again, 0, 64, False) == (64, 2)
    assert report(again, 1, 64, True) == (128, 0)


# Training

INNER = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5),
    "clipped_together": lambda: keras.optimizers.SGD(0.05, global_clipnorm=0.5),
    "accumulated": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
}


@pytest.fixture(scope="module", params=[1, 2], ids=["one server", "two servers"])
def in_order(request):
    """One step after the other."""
    if request.param == 2:
        yield request.getfixturevalue("synchronous")
        return
    with clusters.start(workers=1, ps=1, max_staleness=0) as strategy:
        yield strategy


@pytest.mark.nightly(unless=["one server-accumulated"])
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", INNER)
def test_without_staleness_it_equals_one_device(in_order, name) -> None:
    x, y = clusters.clicks()

    def fit(scope):
        scales = Scales()
        with half_precision(), scope:
            model = clusters.two_inputs(scaled(INNER[name](), 2.0**22))
            history = model.fit(x, y, epochs=2, callbacks=[scales], **OPTIONS).history
        return model, history, scales.found

    expected, expected_history, expected_scales = fit(contextlib.nullcontext())
    model, history, scales = fit(in_order.scope())

    assert scales == expected_scales
    changes = {b / a for (a, _, _), (b, _, _) in itertools.pairwise(scales)}
    assert changes == {0.5, 1, 2}
    assert_alike(model, expected)
    for log, numbers in expected_history.items():
        np.testing.assert_allclose(history[log], numbers, rtol=TOLERANCE, err_msg=log)


@pytest.mark.multiprocess
def test_the_policy_brings_a_scale_unless_it_is_not_to(synchronous) -> None:
    x, y = clusters.clicks(32)
    for options in ({}, {"auto_scale_loss": False}):

        def fit(scope, options=options):
            with half_precision(), scope:
                model = clusters.two_inputs("sgd")
                model.compile(keras.optimizers.SGD(0.05), "mse", **options)
                model.fit(x, y, **OPTIONS)
            return model

        expected, found = fit(contextlib.nullcontext()), fit(synchronous.scope())
        scales = isinstance(found.optimizer, keras.optimizers.LossScaleOptimizer)
        assert scales == (not options)
        assert_alike(found, expected)


@pytest.mark.multiprocess
def test_asynchronous_training_learns_at_the_scale_that_fits(asynchronous) -> None:
    x, y = clusters.clicks(192)
    with half_precision(), asynchronous.scope():
        model = clusters.two_inputs(scaled(keras.optimizers.Adam(0.02), 2.0**22, 50))
    history = model.fit(x, y, epochs=3, batch_size=8, verbose=0).history
    scale, _, made = state(model.optimizer)
    assert np.isfinite(history["loss"]).all()
    assert history["loss"][-1] < 0.7 * history["loss"][0]
    assert 2.0**8 <= scale < 2.0**22
    # At each scale that was too large, a worker skips the step that it was in, and the
    # next one, with values that it had by then.
    assert 72 - 4 * (math.log2(2.0**22 / scale) + 1) <= made < 72


# Files


@pytest.mark.multiprocess
def test_files_keep_the_scale(synchronous, tmp_path) -> None:
    x, y = clusters.clicks(48)
    with half_precision(), synchronous.scope():
        model = clusters.two_inputs(scaled(keras.optimizers.Adam(0.01), 2.0**22, 4))
    model.fit(x, y, **OPTIONS)
    kept = state(model.optimizer)
    assert kept[0] != 2.0**22
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")

    alone = keras.saving.load_model(tmp_path / "model.keras")
    assert state(alone.optimizer) == kept
    names = [v.path.split("/")[-1] for v in alone.optimizer.variables[:4]]
    assert [v.path.split("/")[-1] for v in model.optimizer.variables[:4]] == names
    assert {"dynamic_scale", "step_counter"} < set(names)
    with half_precision(), synchronous.scope():
        again = clusters.two_inputs(scaled(keras.optimizers.Adam(0.01), 2.0**22, 4))
        again.optimizer.build(again.trainable_variables)
        again.load_weights(tmp_path / "model.weights.h5")
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (alone, again, loaded, model):
        assert state(each.optimizer) == kept
        each.fit(x, y, **OPTIONS)
    for each in (again, loaded, model):
        assert_alike(each, alone)


# Scheduled functions


@pytest.fixture
def line(asynchronous):
    """A number, and an optimizer that takes 0.25 from it in each step."""
    with asynchronous.scope():
        number = keras.Variable(0.0, name="number", dtype="float32")
        optimizer = scaled(keras.optimizers.SGD(0.25), 2.0**16, growth=1000)
        optimizer.build([number])
    return number, optimizer


def overflowing(optimizer):
    """A gradient of 1, scaled; beyond a scale of 1024 it is more than there is."""
    gradient = optimizer.scale_loss(keras.ops.convert_to_tensor(1.0, dtype="float32"))
    return keras.ops.where(gradient > 1024, math.inf, gradient)


@pytest.mark.multiprocess
@pytest.mark.parametrize("where", ["inside", "outside", "between"])
def test_steps_that_overflow_in_several_workers_halve_once(
    asynchronous, line, where
) -> None:
    number, optimizer = line
    coordinator = ks.ClusterCoordinator(asynchronous)

    def inside():
        optimizer.apply([overflowing(optimizer)], [number])

    def step():
        if where == "inside":
            asynchronous.run(inside)
        elif where == "outside":
            inside()
        else:
            gradient = asynchronous.run(lambda: overflowing(optimizer))
            optimizer.apply([gradient], [number])

    for _ in range(60):
        coordinator.schedule(step)
    coordinator.join(clusters.SECONDS)
    scale, counter, made = state(optimizer)
    assert scale == 1024
    # At each of six scales, every worker may have overflowed.
    workers = len(asynchronous.cluster.scheduler.workers)
    assert 60 - 6 * workers <= made <= 60 - 6
    assert counter == made
    np.testing.assert_allclose(clusters.values([number])[0], -0.25 * made)


@pytest.mark.multiprocess
def test_an_optimizer_that_was_not_built_is_built_with_what_wraps_it(
    synchronous,
) -> None:
    with synchronous.scope():
        table = keras.Variable(np.zeros((6, 2)), name="table", dtype="float32")
        optimizer = scaled(keras.optimizers.SGD(1.0), 8.0, growth=2)

    def replica_step(ids, factor):
        def loss_fn(ids, factor):
            rows = keras.ops.take(table, ids, axis=0)
            return optimizer.scale_loss(keras.ops.sum(rows) * factor)

        _, gradients = ks.value_and_grad(loss_fn, [table])(ids, factor)
        optimizer.apply(gradients, [table])

    def step(factor):
        ids = np.array([1, 4, 4], "int32")
        synchronous.run(replica_step, args=(ids, np.float32(factor)))

    coordinator = ks.ClusterCoordinator(synchronous)
    found = []
    for factor in (1.0, 2.0, math.inf, 0.5):
        coordinator.schedule(step, args=(factor,)).fetch(clusters.SECONDS)
        found.append(state(optimizer))
    assert found == [(8, 1, 1), (16, 0, 2), (8, 0, 2), (8, 1, 3)]
    expected = np.zeros((6, 2))
    expected[1], expected[4] = -3.5, -7
    np.testing.assert_allclose(table.numpy(), expected)
