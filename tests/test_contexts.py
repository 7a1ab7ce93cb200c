"""What is current where."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import keras
import numpy as np
import pytest
from harness.processes import TIMEOUT, launch, write_script

import keras_strategies as ks

pytestmark = pytest.mark.one_backend


def test_outside_every_scope_the_default_replica_is_current() -> None:
    assert not ks.has_strategy()
    assert isinstance(ks.get_strategy(), ks.DefaultStrategy)
    assert ks.get_strategy() is ks.get_strategy()
    assert not ks.in_cross_replica_context()
    replica = ks.get_replica_context()
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (0, 1)


def test_a_scope_is_cross_replica_and_ends(strategy) -> None:
    with strategy.scope() as current:
        assert current is strategy
        assert ks.has_strategy()
        assert ks.get_strategy() is strategy
        assert ks.get_replica_context() is None
        assert ks.in_cross_replica_context()
    assert not ks.has_strategy()


def test_a_scope_nests_in_itself_and_ends_with_an_exception(mirrored) -> None:
    with pytest.raises(KeyError), mirrored.scope(), mirrored.scope():
        with mirrored.scope():
            assert ks.get_strategy() is mirrored
        assert ks.get_strategy() is mirrored
        raise KeyError("anything")
    assert not ks.has_strategy()


@pytest.mark.parametrize("other", ["one", "default"])
def test_another_strategy_inside_a_scope_is_an_error(mirrored, other) -> None:
    inner = ks.get_strategy() if other == "default" else ks.OneDeviceStrategy("cpu:0")
    with mirrored.scope():
        with pytest.raises(RuntimeError, match="Mixing different"):
            inner.scope().__enter__()
        assert ks.get_strategy() is mirrored
        if other == "one":
            with pytest.raises(RuntimeError, match="Mixing different"):
                inner.run(lambda: None)


def test_the_scope_belongs_to_its_thread(mirrored) -> None:
    seen = []
    with mirrored.scope():
        thread = threading.Thread(target=lambda: seen.append(ks.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_set_strategy_acts_as_a_scope_until_another_one_or_none(mirrored) -> None:
    try:
        for strategy in (mirrored, ks.OneDeviceStrategy("cpu:0")):
            ks.experimental_set_strategy(strategy)
            assert ks.get_strategy() is strategy
            assert ks.in_cross_replica_context()
    finally:
        ks.experimental_set_strategy(None)
    assert not ks.has_strategy()


def test_set_strategy_inside_a_scope_is_an_error(mirrored) -> None:
    with mirrored.scope(), pytest.raises(RuntimeError, match="inside the scope"):
        ks.experimental_set_strategy(mirrored)
    assert not ks.has_strategy()


@pytest.mark.one_backend("jax")
@pytest.mark.slow(seconds=7)
def test_scopes_that_are_open_at_exit_are_closed() -> None:
    script = (
        "import keras_strategies as ks; ks.set_virtual_cpu_devices(2)\n"
        "strategy = ks.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "ks.experimental_set_strategy(strategy)\n"
        "held = strategy.scope()\n"
        "held.__enter__()\n"
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    assert ended.returncode == 0, ended.stderr
    assert not re.search("Exception ignored|Error", ended.stderr), ended.stderr


def built_model() -> keras.Model:
    layers = [keras.Input((2,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse", metrics=["mae"])
    return model


def trained(model: keras.Model, weights: list[np.ndarray]) -> list[np.ndarray]:
    rows = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
    model.set_weights(weights)
    options = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    model.fit(rows[:, :2], rows[:, 2:], **options)
    return list(model.get_weights())


WEIGHTS = [
    np.linspace(-1, 1, 6).reshape(2, 3).astype("float32"),
    np.zeros(3, "float32"),
    np.linspace(-2, 1, 3).reshape(3, 1).astype("float32"),
    np.ones(1, "float32"),
]


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["one_device", "mirrored_2", "mirrored_4"])
def test_a_scope_outlasts_clear_session(strategy) -> None:
    expected = trained(built_model(), WEIGHTS)
    with strategy.scope():
        keras.utils.clear_session()
        model = built_model()
    for found, value in zip(trained(model, WEIGHTS), expected, strict=True):
        np.testing.assert_allclose(found, value, atol=1e-6)
    assert keras.distribution.distribution() is None


@pytest.mark.one_backend("jax")
def test_a_set_strategy_outlasts_clear_session(mirrored) -> None:
    expected = trained(built_model(), WEIGHTS)
    ks.experimental_set_strategy(mirrored)
    try:
        # A trial of a tuner after another one.
        for _ in range(2):
            keras.utils.clear_session()
            found = trained(built_model(), WEIGHTS)
            np.testing.assert_allclose(found[0], expected[0], atol=1e-6)
    finally:
        ks.experimental_set_strategy(None)
    assert keras.distribution.distribution() is None


@pytest.mark.one_backend
@pytest.mark.slow(seconds=10)
def test_no_hook_is_installed_before_a_scope_is_opened(tmp_path: Path) -> None:
    body = (
        "import keras_strategies as ks\n"
        "from keras_strategies.keras_compat.patching import is_installed\n"
        "ks.get_strategy(), ks.get_replica_context()\n"
        "found = [is_installed('strategies')]\n"
        "strategy = ks.OneDeviceStrategy('cpu:0')\n"
        "found.append(is_installed('strategies'))\n"
        "with strategy.scope():\n"
        "    print(*found, is_installed('strategies'))\n"
    )
    found = launch("--workers", "1", write_script(tmp_path, body))
    assert found.stdout.split()[-3:] == ["False", "False", "True"], found


def test_a_strategy_in_a_with_statement_is_not_its_scope():
    """The form of `ParameterServerStrategy`, whose cluster ends with it."""
    with ks.OneDeviceStrategy("cpu:0") as strategy:
        assert not ks.has_strategy()
        with strategy.scope():
            assert ks.get_strategy() is strategy
