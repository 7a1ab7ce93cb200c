"""`fit_into`: mesh, layouts, rematerialization and accumulation that fit."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks

only_jax = pytest.mark.skipif(
    keras.backend.backend() != "jax",
    reason="Torch needs a process for each device; plans of TensorFlow have no peak",
)
DEVICES = ["cpu:0", "cpu:1"]


def make_model(optimizer="adam"):
    model = keras.Sequential([keras.Input((64,))])
    for _ in range(4):
        model.add(layers.Dense(64, "gelu"))
    model.compile(optimizer, "mse")
    return model


@only_jax
def test_variables_stay_replicated_where_they_fit() -> None:
    shapes = ((4096, 64), (4096, 64))
    fit = ks.fit_into("1 GiB", make_model, shapes, DEVICES, min_shard_bytes=0)
    assert fit.choice.peak <= fit.memory
    assert fit.plan.peak == fit.choice.peak
    assert fit.choice.layout == "replicated"
    assert (fit.choice.rematerializes, fit.choice.accumulation_steps) == (False, 1)
    assert fit.batch_size == 4096
    lines = str(fit).splitlines()
    assert lines[0] == "Training in 1.0 GiB per device"
    assert sum(line.endswith("chosen") for line in lines) == 1


@only_jax
def test_a_model_that_fits_trains_like_one_device() -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(2048, 64)).astype("float32") for _ in range(2))
    keras.utils.set_random_seed(3)
    with ks.OneDeviceStrategy("cpu:0").scope():
        expected = make_model("sgd")
    expected.fit(x, y, batch_size=1024, shuffle=False, verbose=0)

    def make():
        return make_model("sgd")

    shapes = ((1024, 64), (1024, 64))
    peak = min(each.peak for each in ks.fit_into("1 GiB", make, shapes, DEVICES).tried)
    fit = ks.fit_into(peak - 1, make, shapes, DEVICES)
    assert (fit.choice.accumulation_steps, fit.choice.rematerializes) != (1, False)
    keras.utils.set_random_seed(3)
    model = fit.make_model(make)
    model.fit(x, y, batch_size=fit.batch_size, shuffle=False, verbose=0)
    for one, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@only_jax
def test_what_fits_nowhere() -> None:
    def make():
        return make_model(keras.optimizers.SGD(gradient_accumulation_steps=2))

    shapes = ((256, 64), (256, 64))
    text = r"fits into 9.8 KiB .* on 2 devices. The least"
    with pytest.raises(ValueError, match=text):
        ks.fit_into(10_000, make_model, shapes, DEVICES)
    peak = min(e.peak for e in ks.fit_into("1 GiB", make, shapes, DEVICES).tried)
    with pytest.raises(ValueError, match="chooses the steps of accumulation itself"):
        ks.fit_into(peak - 1, make, shapes, DEVICES)


def test_arguments_that_cannot_be() -> None:
    for memory in ("much", "0 GiB", "16 apples", -1, True, 1.5):
        with pytest.raises(ValueError, match="`memory` must be the bytes of a device"):
            ks.fit_into(memory, make_model, ((8, 64), (8, 64)))
    with pytest.raises(ValueError, match="`batch_shapes` must be a structure"):
        ks.fit_into("1 GiB", make_model, ())


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="plans have a peak")
def test_plans_without_a_peak() -> None:
    made = []

    def make():
        made.append(1)
        return make_model()

    text = "needs the peak memory of a step.* KERAS_BACKEND=jax or torch"
    with pytest.raises(ValueError, match=text):
        ks.fit_into("1 GiB", make, ((64, 64), (64, 64)), DEVICES)
    # Replicated, fsdp and auto: no more are tried.
    assert len(made) == 3
    with pytest.raises(ValueError, match=r"has 1 rows, .*Use at least 2 rows"):
        ks.fit_into("1 GiB", make, ((1, 64), (1, 64)), DEVICES, min_shard_bytes=0)
