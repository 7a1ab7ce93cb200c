"""Steps do not await the comparison of their batches: answers come meanwhile.

On Torch while the step computes its outputs, before its first collective; on JAX and
TensorFlow, which read a batch ahead, while the step before runs.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from multi_worker.clusters import dense

BACKEND = keras.backend.backend()
STEPS = 6


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
        self._offered: list[Any] = []
        self._client = LeadClient
        self._methods = LeadClient.offer, LeadClient.compared
        offer, compared = self._methods

        def noted(client: Any, what: str, *rest: Any) -> Any:
            found = offer(client, what, *rest)
            if what == "a batch":
                self._offered.append(found)
            return found

        def counted(client: Any, offered: Any, *rest: Any) -> Any:
            if offered in self._offered and self.read:
                self.read[-1][0] += 1
                self.read[-1][1] += not offered.answer
            return compared(client, offered, *rest)

        LeadClient.offer, LeadClient.compared = noted, counted

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.read.append([0, 0])

    def await_answers(self) -> None:
        from harness.processes import wait_until

        wait_until(lambda: self._offered[-1].answer, "the answer")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if BACKEND != "torch":
            self.await_answers()

    def on_train_end(self, logs: Any = None) -> None:
        self._client.offer, self._client.compared = self._methods


def batch(index: int) -> Any:
    x = np.random.default_rng(index).normal(size=(8, 3)).astype("float32")
    return x, x[:, :1]


class Pairs(keras.utils.PyDataset):
    """Batches that every worker reads, and compares."""

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> Any:
        return batch(index)


def pairs_of_rows() -> Any:
    """Batches of which every worker reads its own rows."""
    import keras_strategies as ks

    class Rows(ks.RowDataset):
        def __len__(self) -> int:
            return STEPS

        def num_rows(self, index: int) -> int:
            return 8

        def get_rows(self, index: int, start: int, stop: int) -> Any:
            x, y = batch(index)
            return x[start:stop], y[start:stop]

    return Rows()


def loader() -> Any:
    """A loader of which every worker reads its own rows, in an order that it draws."""
    from torch.utils.data import DataLoader

    rows = [
        tuple(row) for each in range(STEPS) for row in zip(*batch(each), strict=True)
    ]
    return DataLoader(rows, batch_size=8, shuffle=True)


SOURCES = {"every row": Pairs, "own rows": pairs_of_rows, "loader": loader}


def awaited(strategy: Any, source: str) -> list[list[int]]:
    import keras_strategies as ks

    counted = Comparisons()

    class Computes(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            if BACKEND == "torch" and counted.read:
                counted.await_answers()
            return x

    ks.row_wise(Computes)
    model = dense(strategy, 3, lambda: [Computes(), keras.layers.Dense(1)])
    data = SOURCES[source]()
    model.fit(data, shuffle=False, verbose=0, callbacks=[counted])
    return counted.read


@pytest.mark.parametrize("source", SOURCES)
def test_a_step_awaits_no_comparison(cluster: Any, source: str) -> None:
    for read in cluster(awaited, source):
        assert len(read) == STEPS
        # Those of the first ones are not read ahead; each step has one.
        assert sum(count for count, _ in read) >= STEPS - 1, read
        assert all(not late for _, late in read[2:]), read
