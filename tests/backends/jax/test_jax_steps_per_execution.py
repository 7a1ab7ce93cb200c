"""Several steps in one program on JAX: `compile(steps_per_execution=)`."""

from __future__ import annotations

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX backend", allow_module_level=True)

import jax
from backends.jax.jax_training import (
    STRATEGIES,
    assert_same,
    rows,
    small_model,
)

import keras_strategies as ks
from keras_strategies.engines.jax.fit.compiled_steps import CompiledStep

ks.set_virtual_cpu_devices(4)

BY_DAY = ("mirrored_2", "one_device")


@pytest.fixture
def programs(monkeypatch):
    """The numbers of steps of the programs that run."""
    found = []
    run = CompiledStep._run

    def recording(self, state, batch, count):
        found.append(count or 1)
        return run(self, state, batch, count)

    monkeypatch.setattr(CompiledStep, "_run", recording)
    return found


def model_of(name, steps):
    with STRATEGIES[name]().scope():
        model = small_model()
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=steps)
    return model


@pytest.mark.nightly(unless=["mirrored_2"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name not in BY_DAY))
        for name in STRATEGIES
        # Central storage runs its steps one by one.
        if "central" not in name
    ],
)
def test_batches_of_equal_shapes_are_one_program(name, programs):
    model = model_of(name, 3)
    x, y, _ = rows(27)
    # Seven batches, the last of three rows.
    for call in (model.fit, model.evaluate):
        programs.clear()
        call(x, y, batch_size=4, verbose=0)
        assert programs == [3, 3, 1]
    programs.clear()
    # The uneven batch is among the three.
    model.fit(x[:23], y[:23], batch_size=4, verbose=0, shuffle=False)
    assert programs == [3, 1, 1, 1]
    programs.clear()
    assert model.predict(x, batch_size=4, verbose=0).shape == (27, 1)
    assert programs == [3, 3, 1]


def test_steps_before_a_failing_batch_are_done():
    model = model_of("mirrored_2", 4)
    x, y, _ = rows(4)

    def batches():
        for _ in range(6):
            yield x, y
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        model.fit(batches(), verbose=0)
    assert int(model.optimizer.iterations) == 6
    assert all(np.isfinite(each).all() for each in model.get_weights())


def test_jax_arrays_are_stacked_on_the_devices(programs):
    x, y, _ = rows(12)
    batches = [
        (jax.numpy.asarray(x[i : i + 4]), jax.numpy.asarray(y[i : i + 4]))
        for i in (0, 4, 8)
    ]
    found = []
    for data in (batches, [(np.asarray(a), np.asarray(b)) for a, b in batches]):
        model = model_of("mirrored_2", 3)
        programs.clear()
        model.fit((batch for batch in data), verbose=0)
        assert programs == [3]
        found.append({"weights": model.get_weights()})
    assert_same(*found)
