"""Checkpoints of loops of one's own, without `compile`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_arrays
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend("jax")

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :1] - 2 * X[:, 1:2]


class Loop:
    """A loop with everything that has state: seeds, statistics, slots, a metric."""

    def __init__(self, strategy: Any, seed: int = 1, units: int = 8):
        keras.utils.set_random_seed(seed)
        self.strategy = strategy
        with strategy.scope():
            hidden = [
                layers.Dense(units, "tanh"),
                layers.BatchNormalization(momentum=0.8),
            ]
            last = [layers.Dropout(0.3), layers.Dense(1)]
            self.model = keras.Sequential([keras.Input((4,)), *hidden, *last])
            self.optimizer = keras.optimizers.Adam(0.02)
            self.metric = keras.metrics.Mean()
            self.step = keras.Variable(0, dtype="int32", trainable=False)
        self._take = ks.function(self._step)

    @property
    def checkpoint(self) -> ks.Checkpoint:
        logs = {"loss": self.metric, "step": self.step}
        return ks.Checkpoint(model=self.model, optimizer=self.optimizer, logs=logs)

    def _replica_step(self, x: Any, y: Any) -> None:
        def loss_fn() -> Any:
            outputs = self.model(x, training=True)
            return ops.sum((outputs - y) ** 2) / len(X)

        variables = self.model.trainable_variables
        loss, gradients = ks.value_and_grad(loss_fn, variables)()
        self.optimizer.apply(gradients, variables)
        self.metric.update_state(loss)

    def _step(self, batch: Any) -> None:
        self.strategy.run(self._replica_step, args=batch)

    def train(self, steps: int) -> None:
        data = self.strategy.experimental_distribute_dataset([(X, Y)])
        (batch,) = list(data)
        for _ in range(steps):
            self._take(batch)
            self.step.assign_add(1)

    def state(self) -> list[Any]:
        owners = (self.model, self.optimizer, self.metric)
        variables = [v for owner in owners for v in owner.variables]
        return [ops.convert_to_numpy(v) for v in (*variables, self.step)]


def test_an_interrupted_loop_goes_on_as_if_undisturbed(mirrored, tmp_path):
    loop = Loop(mirrored)
    loop.train(2)
    path = loop.checkpoint.save(tmp_path / "new" / "loop.ckpt")
    saved = loop.state()
    loop.train(2)
    resumed = Loop(mirrored, seed=2)
    resumed.checkpoint.restore(path)
    assert_arrays(resumed.state(), saved)
    resumed.train(2)
    assert_arrays(resumed.state(), loop.state(), 1e-6, 1e-7)
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["loop.ckpt"]


def test_any_strategy_restores_it(mirrored, tmp_path):
    """Low precision too."""
    saved = Loop(mirrored)
    saved.train(2)
    with mirrored.scope():
        half = keras.Variable([1.5, 0.1], dtype="bfloat16")
    path = saved.checkpoint.save(tmp_path / "loop.ckpt")
    both = ks.Checkpoint(model=saved.model, half=half)
    others = both.save(tmp_path / "half.ckpt")
    expected = ops.convert_to_numpy(ops.cast(half, "float32"))
    four = ks.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    for strategy in (ks.get_strategy(), four):
        loop = Loop(strategy, seed=2)
        loop.checkpoint.restore(path)
        assert_arrays(loop.state(), saved.state(), 1e-6, 1e-7)
        half.assign([0.0, 0.0])
        ks.Checkpoint(half=half).restore(others)
        found = ops.convert_to_numpy(ops.cast(half, "float32"))
        np.testing.assert_array_equal(found, expected)


def test_the_manager_keeps_the_last_ones(mirrored, tmp_path):
    loop = Loop(mirrored)
    manager = ks.CheckpointManager(loop.checkpoint, tmp_path / "all", max_to_keep=2)
    assert manager.restore_or_initialize() is None
    paths = [manager.save() for _ in range(3)]
    assert manager.checkpoints == paths[1:]
    assert manager.latest_checkpoint == paths[2]
    assert manager.save(12).endswith("ckpt-12.ckpt")
    again = ks.CheckpointManager(loop.checkpoint, tmp_path / "all")
    assert again.save().endswith("ckpt-13.ckpt")


def test_what_does_not_fit_is_said_before_anything_changes(mirrored, tmp_path):
    loop = Loop(mirrored)
    loop.train(1)
    path = loop.checkpoint.save(tmp_path / "loop.ckpt")
    other = Loop(mirrored, seed=2, units=3)
    before = other.model.get_weights()
    with pytest.raises(ValueError, match=r"shape \(4, 3\).*of shape \(4, 8\)"):
        other.checkpoint.restore(path)
    assert_arrays(other.model.get_weights(), before)
    with pytest.raises(ValueError, match="no object 'other'"):
        ks.Checkpoint(other=loop.model).restore(path)
    with pytest.raises(ValueError, match=r"1 variables.*of it.*before `restore`"):
        ks.Checkpoint(model=loop.step).restore(path)
    with pytest.raises(ValueError, match="does not exist"):
        loop.checkpoint.restore(tmp_path / "none.ckpt")


def test_bad_arguments(mirrored, tmp_path):
    checkpoint = ks.Checkpoint(step=keras.Variable(0, trainable=False))
    step = r"'step' of a checkpoint.*keras\.Variable\(0"
    for call, text in (
        (lambda: ks.Checkpoint(step=3), step),
        (lambda: ks.Checkpoint(step="model"), step),
        (lambda: ks.Checkpoint(step=None), step),
        (lambda: ks.Checkpoint(), "by name"),
        (
            lambda: ks.CheckpointManager(checkpoint, "x", max_to_keep=0),
            "`max_to_keep` must be a number",
        ),
        (lambda: ks.CheckpointManager("model", "x"), "`checkpoint` must be a"),
        (lambda: mirrored.run(lambda: checkpoint.save(tmp_path / "a")), "inside `run`"),
    ):
        with pytest.raises((ValueError, ks.errors.ContextError), match=text):
            call()
