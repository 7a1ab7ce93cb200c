"""Torch: the batches of `fit` are on an accelerator before their step."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest
from harness.processes import wait_until

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)

import torch

from keras_strategies.engines.torch import cuda_batches
from keras_strategies.engines.torch.cuda_batches import (
    CudaPrefetcher,
    HostReader,
    PinningPrefetcher,
    batch_prefetcher,
)

X = np.random.default_rng(0).normal(size=(11, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
WEIGHTS = np.linspace(0.5, 2, 11).astype("float32")


def model_of(strategy):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    return model


def noting(events):
    """A mover that moves nowhere."""

    def move(batch):
        rows = len(keras.tree.flatten(batch)[0])
        events.append(f"move {rows}")

        def arrive():
            events.append(f"use {rows}")
            return batch

        return arrive

    return move


def test_fit_evaluate_and_predict_move_their_batches_one_ahead():
    plain, ahead = ks.OneDeviceStrategy("cpu:0"), ks.OneDeviceStrategy("cpu:0")
    assert isinstance(plain.drivers.fit.placer, HostReader)
    events: list[str] = []
    ahead.drivers.fit.placer = CudaPrefetcher(noting(events))
    results = []
    for strategy in (plain, ahead):
        model = model_of(strategy)
        step = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs=None: events.append("step")
        )
        history = model.fit(
            X,
            Y,
            sample_weight=WEIGHTS,
            batch_size=4,
            epochs=2,
            shuffle=False,
            verbose=0,
            callbacks=[step] if strategy is ahead else [],
        ).history
        results.append(
            (
                history,
                model.evaluate(X, Y, batch_size=4, verbose=0),
                model.predict(X, batch_size=4, verbose=0).tolist(),
            )
        )
    assert results[0] == results[1]
    epoch = [
        *("move 4", "use 4", "step"),
        *("move 4", "move 3", "use 4", "step"),
        *("use 3", "step"),
    ]
    # Keras builds metrics from a first batch, and begins again.
    building = ["move 4", "use 4"]
    without_steps = [event for event in epoch if event != "step"]
    assert events == building + epoch * 2 + without_steps * 2


@pytest.fixture
def pins(monkeypatch):
    """The numbers of rows of tensors that were pinned; a CPU pins nothing."""
    found: list[int] = []

    def pin(tensor):
        found.append(len(tensor))
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return found


def test_batches_of_several_gpus_are_pinned_one_ahead(pins, monkeypatch):
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(cuda_batches, "CudaMover", lambda device: noting([]))
    assert isinstance(batch_prefetcher(cpu, False), HostReader)
    assert isinstance(batch_prefetcher(gpu, True), CudaPrefetcher)
    several = batch_prefetcher(gpu, False)
    assert isinstance(several, PinningPrefetcher)
    batches = [
        {"x": torch.full((rows, 2), rows), "nothing": None, "name": "text"}
        for rows in (4, 3, 2)
    ]
    found = several.batches(batches)
    for pinned in ([4], [4, 3, 2], [4, 3, 2]):
        batch = next(found)
        wait_until(lambda pinned=pinned: pins == pinned, "the next batch is pinned")
        assert batch["nothing"] is None and batch["name"] == "text"
        assert torch.equal(batch["x"], torch.full_like(batch["x"], len(batch["x"])))
    assert next(found, None) is None


def test_the_rows_of_a_replica_are_pinned_for_a_gpu_only(pins, monkeypatch):
    monkeypatch.setattr(cuda_batches, "moved", lambda tensor, device: tensor)
    rows = torch.zeros(5, 2)
    assert cuda_batches.device_rows(rows, torch.device("cpu")) is rows
    assert not pins
    assert cuda_batches.device_rows(rows, torch.device("cuda", 1)) is not rows
    assert pins == [5]


@pytest.mark.gpu
def test_fit_on_a_gpu_gets_its_batches_there():
    places = set()

    class Noting(keras.layers.Layer):
        def call(self, x):
            places.add(str(x.device))
            return x

    results = []
    for place in (False, True):
        strategy = ks.OneDeviceStrategy("gpu:0")
        assert isinstance(strategy.drivers.fit.placer, CudaPrefetcher)
        if not place:
            strategy.drivers.fit.placer = None
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([Noting(), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(X, Y, batch_size=4, epochs=3, shuffle=False, verbose=0)
        results.append(model.get_weights())
    # A proof runs the layer on tensors without values.
    assert places - {"meta"} == {"cuda:0"}
    for plain, ahead in zip(*results, strict=True):
        np.testing.assert_allclose(plain, ahead, rtol=1e-6)


@pytest.mark.parametrize("is_endless", [True, False])
def test_draws_after_a_generator_are_those_of_keras(is_endless):
    """To begin a pass draws from Torch's generator, from which dropout draws."""

    def batches():
        while True:
            for start in range(0, 11, 4):
                yield X[start : start + 4], Y[start : start + 4]
            if not is_endless:
                return

    def trained(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            )
            model.compile("sgd", "mse", metrics=["mae"])
        steps = 3 if is_endless else None
        epochs = 2 if is_endless else 1
        model.fit(batches(), steps_per_epoch=steps, epochs=epochs, verbose=0)
        return model.get_weights()

    expected = trained(contextlib.nullcontext())
    for devices in (["cpu:0"], ["cpu:0", "cpu:1"]):
        strategy = ks.MirroredStrategy(devices, random_numbers="keras")
        for one, other in zip(expected, trained(strategy.scope()), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)
