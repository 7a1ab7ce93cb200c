"""`fit` on JAX: what holds there beyond the suites that all backends share."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import textwrap
import threading

import jax
import keras
import numpy as np
import pytest
from backends.jax.jax_training import (
    STRATEGIES,
    assert_same,
    on_each_kind,
    rows,
    scope_of,
    small_model,
    trained,
)
from harness.forker import run_code
from keras import layers

import keras_strategies as ks
from keras_strategies.engines.jax.fit import central_storage_trainer, compiled_steps
from keras_strategies.engines.jax.function import compiled_program


def test_central_storage_whose_device_computes_is_exact():
    """The update donates what the mesh reads: one of its devices has the variables."""

    def fitted(strategy):
        x, y = rows(16)
        with scope_of(strategy):
            model = small_model(keras.optimizers.AdamW(0.01, weight_decay=0.1))
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return {"weights": model.get_weights(), "predict": [model.predict(x, 8, 0)]}

    strategy = ks.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0")
    assert_same(fitted(strategy), fitted(None), 1e-4)


class Uses(keras.Model):
    """A step of one's own, with an update that it goes on to use."""

    def __init__(self, use, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(1)
        self.use = use

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        given = (trainable, non_trainable, metrics, x, y, weights)
        options = {"training": True, "optimizer_variables": optimizer}
        (loss, _), gradients = gradient(*given, **options)
        apply = self.optimizer.stateless_apply
        if self.use == "before":
            trainable = [value * 0.5 for value in trainable]
        new, new_optimizer = apply(optimizer, gradients, trainable)
        logs = {"loss": loss}
        if self.use == "times":
            new = [value * 0.5 for value in new]
        if self.use == "call":
            output, _ = self.stateless_call(new, non_trainable, x)
            logs["output"] = jax.numpy.mean(output)
        if self.use == "twice":
            new, new_optimizer = apply(new_optimizer, gradients, new)
        if self.use == "slots":
            logs["slots"] = sum(jax.numpy.sum(value) for value in optimizer)
        return logs, (new, non_trainable, new_optimizer, metrics)


@pytest.mark.nightly(unless=["call-False"])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("use", ["before", "times", "call", "twice", "slots"])
def test_central_storage_runs_any_step(use, eager):
    x, y = rows(16)

    def fitted(strategy):
        with scope_of(strategy):
            keras.utils.set_random_seed(1)
            model = Uses(use)
            model.compile(keras.optimizers.SGD(0.1, 0.9), "mse", run_eagerly=eager)
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
        model.evaluate(x, y, batch_size=8, verbose=0)
        return {"weights": model.get_weights(), **history.history}

    assert_same(fitted(STRATEGIES["central"]()), fitted(None))


@pytest.mark.parametrize("name", ["mirrored_2", "central", "model_2x1"])
def test_trainable_changes_without_compile(name):
    """As in Keras: the optimizer has other variables, and `compile` makes a new one."""
    x, y = rows(8)
    messages = []
    for strategy in (None, STRATEGIES[name]()):
        with scope_of(strategy):
            model = small_model()
        model.fit(x, y, batch_size=8, verbose=0)
        model.layers[1].trainable = False
        frozen = model.layers[1].kernel.numpy()
        with pytest.raises(ValueError, match="optimizer was built with") as caught:
            model.fit(x, y, batch_size=8, verbose=0)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    with scope_of(strategy):
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(x, y, batch_size=8, verbose=0)
    np.testing.assert_array_equal(model.layers[1].kernel.numpy(), frozen)


@pytest.mark.nightly(unless=["mirrored_2", "one_device"])
@on_each_kind
def test_one_program_for_each_shape_of_a_batch(name):
    x, y = rows(22)
    with STRATEGIES[name]().scope():
        model = small_model()
    counts = model.get_layer("counting").counts

    def every_method():
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        in_fit = dict(counts)
        model.evaluate(x, y, batch_size=8, verbose=0)
        in_evaluate = dict(counts)
        model.predict(x, batch_size=8, verbose=0)
        model.train_on_batch(x[:8], y[:8])
        return in_fit, in_evaluate, dict(counts)

    in_fit, in_evaluate, first = every_method()
    assert in_fit[True] == 2
    assert in_evaluate[False] - in_fit[False] == 2
    assert first[False] - in_evaluate[False] == 2
    every_method()  # Small eager operations after the first `fit` are compiled here.
    with no_compilation():
        every_method()
    assert counts == first


@contextlib.contextmanager
def no_compilation():
    compiled = []

    def listener(event, *args, **kwargs):
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not compiled


def test_steps_before_a_failing_batch_are_done():
    with STRATEGIES["mirrored_2"]().scope():
        model = small_model(keras.optimizers.Adam(0.01), steps_per_execution=4)
    x, y = rows(4)

    def batches():
        for _ in range(6):
            yield x, y
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        model.fit(batches(), verbose=0)
    assert int(model.optimizer.iterations) == 6
    assert all(np.isfinite(each).all() for each in model.get_weights())


def assert_usable(model, weights):
    """The model has these weights, and trains, evaluates and predicts."""
    x, y = rows(22)
    for found, expected in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    model.fit(x, y, batch_size=8, verbose=0)
    model.evaluate(x, y, 8, verbose=0)
    model.predict(x, 8, verbose=0)


@on_each_kind
def test_bad_data_loses_no_weights(name):
    x, y = rows(22)
    _, model = trained(name)
    weights = model.get_weights()

    def broken():
        yield x[:8], y[:8]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk"):
        model.evaluate(broken(), verbose=0)
    assert_usable(model, weights)

    weights = model.get_weights()
    for call in (
        lambda: model.predict(x[:, :5], 8, verbose=0),
        lambda: model.fit(x[:, :5], y, 8, verbose=0),
        lambda: model.train_on_batch(x[:, :5], y),
    ):
        with pytest.raises(Exception):  # noqa: B017
            call()
    assert_usable(model, weights)


@pytest.mark.nightly(unless=["central"])
@pytest.mark.parametrize("name", ["mirrored_2", "central"])
def test_ctrl_c_in_a_step(name):
    random = np.random.default_rng(0)
    x = random.normal(size=(512, 256)).astype("float32")
    with STRATEGIES[name]().scope():
        model = keras.Sequential([keras.Input((256,)), layers.Dense(256)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.fit(x, x, batch_size=256, verbose=0)
    for i in range(20):
        ended = threading.Event()

        def press(delay=0.05 + 0.003 * i, ended=ended):
            # At some point of a step, which is most of the time in XLA. Again, since
            # Python drops an exception that it raises in a destructor.
            while not ended.wait(delay):
                _thread.interrupt_main()
                delay = 2.0

        thread = threading.Thread(target=press)
        with pytest.raises(KeyboardInterrupt):
            thread.start()
            try:
                model.fit(x, x, batch_size=256, epochs=10_000, verbose=0)
            finally:
                ended.set()
        thread.join()
        assert all(np.all(np.isfinite(weight)) for weight in model.get_weights())
    assert int(model.optimizer.iterations) > 20
    model.predict(x, batch_size=256, verbose=0)


@pytest.mark.parametrize("name", ["mirrored_2", "central"])
def test_ctrl_c_while_keras_empties_the_variables(name, monkeypatch):
    x, y = rows(8)
    _, model = trained(name)
    empties = type(model)._purge_model_variables

    def interrupted(self, **groups):
        empties(self, **groups)
        raise KeyboardInterrupt

    weights = model.get_weights()
    monkeypatch.setattr(type(model), "_purge_model_variables", interrupted)
    for method in (model.fit, model.evaluate):
        with pytest.raises(KeyboardInterrupt):
            method(x, y, verbose=0)
        for before, after in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_array_equal(before, after)


def interrupted_at(monkeypatch, owner, name, at):
    """Has a function raise KeyboardInterrupt before its n-th call, once."""
    original, calls = getattr(owner, name), itertools.count(1)

    def call(*args):
        if next(calls) == at:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(owner, name, call)


# The first record is that before the step.
@pytest.mark.parametrize(
    ("name", "module", "at"),
    [("mirrored_2", compiled_steps, 2), ("central", central_storage_trainer, 1)],
)
def test_ctrl_c_while_the_state_of_a_step_is_recorded(name, module, at, monkeypatch):
    x, y = rows(22)
    _, model = trained(name)
    with monkeypatch.context() as patch:
        interrupted_at(patch, module, "record_jax_state", at)
        with pytest.raises(KeyboardInterrupt):
            model.fit(x, y, batch_size=8, verbose=0)
    assert_usable(model, model.get_weights())


def test_ctrl_c_while_the_state_of_a_loop_is_recorded(monkeypatch):
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope() as strategy:
        sums = keras.Variable(np.zeros(3, "float32"))

    def add():
        sums.assign_add([1.0, 2.0, 3.0])

    step = ks.function(lambda: strategy.run(add))
    step()
    with monkeypatch.context() as patch:
        interrupted_at(patch, compiled_program.CompiledProgram, "_commit", 1)
        with pytest.raises(KeyboardInterrupt):
            step()
    step()
    np.testing.assert_array_equal(sums, [3.0, 6.0, 9.0])


def test_a_strategy_makes_the_devices_it_names(tmp_path):
    code = """
        import keras_strategies as ks
        from keras_strategies.engines import get_engine
        from jax._src import xla_bridge
        assert get_engine().cpu_device_count() == 1
        assert not xla_bridge.backends_are_initialized()
        print(ks.MirroredStrategy(["cpu:0", "cpu:2"]).num_replicas_in_sync)
    """
    printed = run_code(tmp_path, textwrap.dedent(code))
    assert printed.splitlines()[-1] == "2"
