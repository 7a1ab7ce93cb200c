"""2,000 steps while processes are killed at random: each step counts once.

A kill falls on a step, a snapshot, the creation of a variable or the growth of a table.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.experimental import partitioners
from keras_strategies.parameter_server.variables import variable_registry
from keras_strategies.parameter_server.variables.initial_values import (
    shard_initializers,
)
from parameter_server import clusters

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.nightly,
    pytest.mark.slow(seconds=120),
]

SERVERS, WORKERS = 2, 2
ROUNDS, STEPS, KILLS = 8, 250, 3
#: Rows of the first table and of the last one, which each round grows a bit.
CAPACITY, GROWTH = 4 * STEPS + 40, 40


@dataclass
class ServerKill:
    """A kill of a server.

    Args:
        index: int, of the server.
        at: float, when.
        safe_until: float, before this time its last snapshot begun.
    """

    index: int
    at: float
    safe_until: float


class Killer:
    """Kills processes at random, and notes what they may lose.

    Args:
        strategy: with snapshots in `folder`.
        folder: `Path`.
        kinds: kinds of its victims.
        seed: int.
    """

    def __init__(self, strategy, folder: Path, kinds: tuple[str, ...], seed: int):
        self._strategy, self._folder, self._kinds = strategy, folder, kinds
        self.random = random.Random(seed)
        self.kills: list[ServerKill] = []
        self.counts = dict.fromkeys(kinds, 0)
        #: Kills of servers that were writing a snapshot.
        self.in_snapshots = 0
        self._threads: list[threading.Thread] = []

    def soon(self, seconds: float) -> None:
        """Kills a process at a moment of the next seconds."""
        kind = self.random.choice(self._kinds)
        index = self.random.randrange(SERVERS if kind == "ps" else WORKERS)
        wait = self.random.uniform(0, seconds)
        in_snapshot = kind == "ps" and self.random.random() < 0.5
        self._start(self._kill, kind, index, wait, in_snapshot)

    def _start(self, function, *arguments) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments))
        self._threads[-1].start()

    def _kill(self, kind: str, index: int, wait: float, in_snapshot: bool) -> None:
        time.sleep(wait)
        until = time.monotonic() + 1
        while in_snapshot and not self._is_writing(index) and time.monotonic() < until:
            time.sleep(0.0005)
        # A snapshot begins when the one before it has been written.
        safe = sorted(
            path.stat().st_mtime for path in self._folder.glob(f"ps-{index}.*.snapshot")
        )
        at = time.time()
        # One may have died before.
        with contextlib.suppress(ProcessLookupError):
            clusters.kill(self._strategy, kind, index)
            self.counts[kind] += 1
            if kind == "ps":
                self.in_snapshots += self._is_writing(index)
                self.kills.append(ServerKill(index, at, [0.0, 0.0, *safe][-2]))

    def _is_writing(self, index: int) -> bool:
        """Whether a server writes a snapshot, or wrote it when it was killed."""
        return any(self._folder.glob(f".part-*/ps-{index}.*"))

    def wait(self) -> None:
        """Waits until all are back."""
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        clusters.wait_until_whole(self._strategy)


def build():
    """A table of how often each row was trained on, negative."""
    table = ks.layers.GrowingEmbedding(CAPACITY, 1, initializer="zeros")
    layers = [keras.layers.Flatten()]
    model = keras.Sequential([keras.Input((4,), dtype="int32"), table, *layers])
    # The gradient of each row is one.
    model.compile(keras.optimizers.SGD(1.0), lambda y, found: keras.ops.sum(found))
    return model, table


def pairs_of(capacity: int, generator) -> np.ndarray:
    """Rows of each step: two of each server, `(STEPS, SERVERS, 2)`, each once."""
    half = capacity // 4
    chosen = [
        i * half + generator.permutation(np.arange(1, half))[:STEPS]
        for i in range(SERVERS)
    ]
    first = 2 * np.stack(chosen, axis=1)
    return np.stack([first, first + 1], axis=2)


def counts_of(table) -> np.ndarray:
    return -np.asarray(keras.ops.convert_to_numpy(table.embeddings))[:, 0]


class Watch(keras.callbacks.Callback):
    """Times at which steps ended; kills after some of them."""

    def __init__(self, killer: Killer):
        super().__init__()
        self.killer, self.ended = killer, []
        self.at = killer.random.sample(range(STEPS), KILLS)

    def on_train_batch_end(self, batch, logs=None):
        self.ended.append(time.time())
        if batch in self.at:
            self.killer.soon(0.1)


def train(model, table, killer, generator) -> int:
    """Trains, and compares the counts of all rows; how many updates were lost."""
    pairs, read = pairs_of(table.capacity, generator), []

    def batches():
        for rows in pairs:
            read.append(time.time())
            yield rows.reshape(1, 4), np.zeros((1, 1), "float32")

    before, watch = counts_of(table), Watch(killer)
    killer.kills.clear()
    model.fit(batches(), steps_per_epoch=STEPS, verbose=0, callbacks=[watch])
    killer.wait()
    made = counts_of(table) - before
    # An update is applied as a whole or not at all, and never twice.
    assert set(made) <= {0.0, 1.0}
    np.testing.assert_array_equal(made[::2], made[1::2])
    assert made.sum() == made[pairs].sum()
    missing = np.argwhere(made[pairs[:, :, 0]] == 0)
    for step, server in missing:
        # It was under way, or had ended when no snapshot was sure to have it.
        assert any(
            kill.index == server
            and read[step] < kill.at
            and watch.ended[step] >= kill.safe_until
            for kill in killer.kills
        ), f"step {step} is lost on server {server}: {killer.kills}"
    return len(missing)


def create(strategy, killer, seed: int) -> None:
    """Creates a variable that its servers compute."""
    normal, shape = keras.initializers.RandomNormal(seed=seed), (20_000, 8)
    killer.soon(0.05)
    with strategy.scope():
        variable = keras.Variable(normal, shape, dtype="float32")
    killer.wait()
    expected = shard_initializers(normal, shape, "float32")(0, shape[0])()
    found = keras.ops.convert_to_numpy(variable)
    np.testing.assert_array_equal(found, expected)


def grow(strategy, model, table, killer) -> None:
    """Makes the table larger; no count that was saved is lost."""
    for server in range(SERVERS):
        strategy.cluster.servers.request(server, "snapshot")
    before = counts_of(table)
    killer.soon(0.2)
    table.grow(table.capacity + GROWTH, model)
    killer.wait()
    found = counts_of(table)
    np.testing.assert_array_equal(found[: len(before)], before)
    assert not found[len(before) :].any()


@pytest.mark.parametrize(
    "kinds", [("worker",), ("ps", "worker")], ids=["workers", "all"]
)
def test_steps_count_once_while_processes_are_killed(
    tmp_path, monkeypatch, kinds
) -> None:
    monkeypatch.setattr(variable_registry, "_LOCAL_BYTES", 1000)
    seed = int(os.environ.get("KS_KILLS_SEED", 0))
    generator = np.random.default_rng(seed)
    with clusters.start(
        workers=WORKERS,
        ps=SERVERS,
        variable_partitioner=partitioners.FixedShardsPartitioner(SERVERS),
        snapshot_seconds=0.1,
        snapshot_folder=str(tmp_path),
    ) as strategy:
        killer = Killer(strategy, tmp_path, kinds, seed)
        with strategy.scope():
            model, table = build()
        lost = 0
        for number in range(ROUNDS):
            create(strategy, killer, number)
            grow(strategy, model, table, killer)
            lost += train(model, table, killer, generator)
        print(
            f"{killer.counts} killed, {killer.in_snapshots} of them while a snapshot "
            f"was written, {lost} updates lost"
        )
        clusters.assert_nothing_broke(strategy)
    assert all(count > ROUNDS for count in killer.counts.values())
    assert lost < ROUNDS * STEPS * SERVERS / 2
    assert killer.in_snapshots if "ps" in kinds else not lost
