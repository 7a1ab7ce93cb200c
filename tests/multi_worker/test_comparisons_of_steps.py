"""Steps do not await the comparison of their batches: answers come meanwhile.

On Torch while the step computes its outputs, before its first collective; on JAX, with
batches prepared ahead as on accelerators, while the step before runs.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

BACKEND = keras.backend.backend()
STEPS = 6

if BACKEND == "tensorflow":
    pytest.skip("a program may begin with a collective", allow_module_level=True)


class Comparisons(keras.callbacks.Callback):
    """Counts the comparisons of batches that a step awaits.

    While a step computes, this process waits for the answer of the last one, so that
    the count does not depend on times.
    """

    def __init__(self) -> None:
        from keras_strategies.lead.client import LeadClient

        super().__init__()
        #: Of each step: the comparisons that it reads, and those without an answer.
        self.read: list[list[int]] = []
        self._offered: list[tuple[Any, Any]] = []
        self._finished: set[Any] = set()
        self._client = LeadClient
        self._methods = LeadClient.offer, LeadClient.compared
        offer, compared = self._methods

        def noted(client: Any, what: str, *rest: Any) -> Any:
            found = offer(client, what, *rest)
            if what == "a batch":
                self._offered.append((client, found[:2]))
            return found

        def counted(client: Any, offered: Any, *rest: Any) -> Any:
            if (client, offered[:2]) in self._offered and self.read:
                self.read[-1][0] += 1
                self.read[-1][1] += offered[:2] not in client._results
            self._finished.add(offered[:2])
            return compared(client, offered, *rest)

        LeadClient.offer, LeadClient.compared = noted, counted

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.read.append([0, 0])

    def await_answers(self) -> None:
        from harness.processes import wait_until

        client, key = self._offered[-1]
        if key not in self._finished:
            wait_until(lambda: key in client._results, "the answer")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if BACKEND == "jax" and batch < STEPS - 1:
            self.await_answers()

    def on_train_end(self, logs: Any = None) -> None:
        self._client.offer, self._client.compared = self._methods


class Pairs(keras.utils.PyDataset):
    """Batches that every worker reads, and compares."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        x = np.random.default_rng(index).normal(size=(8, 3)).astype("float32")
        return x, x[:, :1]


def awaited(strategy: Any) -> list[list[int]]:
    """Of each step: comparisons that it reads, and those that it awaits."""
    from harness.batches_ahead import prepare_ahead

    import keras_strategies as ks

    counted = Comparisons()

    class Computes(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            if BACKEND == "torch" and counted.read:
                counted.await_answers()
            return x

    ks.row_wise(Computes)
    end = prepare_ahead(strategy) if BACKEND == "jax" else lambda: None
    try:
        with strategy.scope():
            layers = [keras.Input((3,)), Computes(), keras.layers.Dense(1)]
            model = keras.Sequential(layers)
            model.compile("sgd", "mse")
        model.fit(Pairs(), shuffle=False, verbose=0, callbacks=[counted])
    finally:
        end()
    return counted.read


def test_a_step_awaits_no_comparison(cluster: Any) -> None:
    for read in cluster(awaited):
        assert len(read) == STEPS
        # The first ones begin without one before; each step has one.
        assert sum(count for count, _ in read) >= STEPS - 1, read
        assert all(not late for _, late in read[2:]), read
