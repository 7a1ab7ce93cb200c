"""Undo of unfinished steps on Torch: what was changed, and where weights are saved."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("for Torch", allow_module_level=True)

from keras_strategies.engines.torch.rollback import TorchRollback


def trained_model() -> Any:
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(*batch(0), verbose=0)
    return model


def batch(seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, 2)).astype("float32"), np.ones((8, 1), "float32")


def values(model: Any) -> list[Any]:
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


class Steps:
    """The steps of one model, with collectives at chosen places."""

    def __init__(self) -> None:
        self.before_exchange: list[Callable[[], None]] = []
        workers = SimpleNamespace(before_exchanges=self.before_exchange.append)
        self.driver = TorchRollback(None, workers)  # type: ignore[arg-type]
        self.model = trained_model()

    def take(self, *, exchanges_after: bool = False, fails: bool = False) -> bool:
        before = values(self.model)
        undo = self.driver.save_state(self.model, "train")
        self.before_exchange[0]()
        if not fails or exchanges_after:
            self.model.train_on_batch(*batch(1))
        else:
            # The step fails in the exchange of gradients.
            self.model(batch(1)[0], training=True)
        if exchanges_after:
            self.before_exchange[0]()
        if not fails:
            return True
        is_restored = undo()
        same = [
            np.array_equal(a, b)
            for a, b in zip(before, values(self.model), strict=True)
        ]
        assert all(same) == is_restored
        return is_restored


def test_batch_statistics_are_restored() -> None:
    steps = Steps()
    for _ in range(3):
        steps.take()
    assert steps.take(fails=True)


def test_weights_are_restored_where_an_exchange_follows_their_update() -> None:
    steps = Steps()
    assert steps.take(exchanges_after=True, fails=True), "the first step keeps all"
    assert steps.take(exchanges_after=True, fails=True), "and those that are like it"


def test_another_kind_of_step_needs_the_state_of_another_worker_once() -> None:
    steps = Steps()
    steps.take()
    assert not steps.take(exchanges_after=True, fails=True)
    assert steps.take(exchanges_after=True, fails=True)
