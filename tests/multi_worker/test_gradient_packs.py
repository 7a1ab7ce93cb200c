"""Torch workers: gradients are moved to the messages that send them."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)

WIDTH = 8


def train(strategy: Any, policy: str) -> dict[str, Any]:
    """A step with several messages, with the memory of the gradients at its end."""
    from keras_strategies.engines.torch.data_parallel import worker_sums

    found: list[dict[str, Any]] = []

    class Watched(worker_sums.WorkerSums):
        def gradients(self, columns: Any) -> Any:
            if self._packs:
                found.append(self._facts(columns))
            return super().gradients(columns)

        def _facts(self, columns: Any) -> dict[str, Any]:
            computed = [each for part in columns for each in part]
            packs = [pack.flat for pack in self._packs]
            flags = packs[-1].itemsize * len(self._order)
            memory = {pack.untyped_storage().data_ptr() for pack in packs}
            return {
                "inside": [
                    all(each.untyped_storage().data_ptr() in memory for each in part)
                    for part in columns
                ],
                "early": [
                    any(i in pack.members for pack in self._packs[:-1])
                    for i, _ in enumerate(columns)
                ],
                "computed": len(computed),
                "gradients": sum(each.nbytes for each in computed),
                "packs": sum(pack.nbytes for pack in packs) - flags,
            }

    from keras_strategies.engines.torch.data_parallel import call_on_threads

    call_on_threads.WorkerSums, original = Watched, call_on_threads.WorkerSums
    workers = strategy.workers
    options = workers.options
    workers.options = dataclasses.replace(options, bytes_per_pack=256)
    try:
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((WIDTH, WIDTH, 1)),
                    keras.layers.Conv2D(3, 3, dtype=policy),
                    keras.layers.Flatten(dtype=policy),
                    keras.layers.Dense(WIDTH, "relu", dtype=policy),
                    keras.layers.Dense(1, dtype=policy),
                ]
            )
            model.compile("sgd", "mse")
        x = np.random.default_rng(1).normal(size=(7, WIDTH, WIDTH, 1))
        model.fit(x.astype("float32"), np.ones((7, 1)), verbose=0)
    finally:
        call_on_threads.WorkerSums = original
        workers.options = options
    [step] = found
    return step


@pytest.mark.parametrize("cluster", ["two"], indirect=True)
def test_gradients_of_one_replica_are_views_of_their_messages(cluster) -> None:
    for found in cluster(train, "float32"):
        # Those of the last message are moved to it at once, when all have arrived.
        assert found["inside"] == found["early"]
        assert found["computed"] == 6 and 3 <= sum(found["early"]) < 6
        assert found["packs"] == found["gradients"]


@pytest.mark.parametrize("cluster", ["two"], indirect=True)
def test_gradients_of_half_precision_are_sent_in_float32(cluster) -> None:
    for found in cluster(train, "float16"):
        assert found["computed"] == 6 and not any(found["inside"])
        assert found["packs"] == 2 * found["gradients"]


@pytest.mark.parametrize("cluster", ["two_by_two"], indirect=True)
def test_gradients_of_several_replicas_are_summed_into_messages(cluster) -> None:
    for found in cluster(train, "float32"):
        assert found["computed"] == 12 and not any(found["inside"])
        assert 2 * found["packs"] == found["gradients"]
