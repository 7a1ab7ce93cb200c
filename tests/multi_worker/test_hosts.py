"""Two workers lose the cable between their hosts, or are started again after a loss."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from harness.forker import Forked, Forker
from harness.hosts import Hosts, connected_hosts
from harness.processes import TIMEOUT as START_SECONDS
from harness.processes import assert_gone, wait_until, write_script
from harness.training import assert_workers
from multi_worker.clusters import one_device

pytestmark = pytest.mark.multiprocess

TIMEOUT = 3

TRAIN = """
import keras
import numpy as np
import keras_strategies as ks


def make(strategy):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def fit(model, epochs, callbacks=()):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(44, 4)).astype("float32")
    y = x[:, :1] - x[:, 1:2]
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=epochs, callbacks=callbacks, **options)
"""

SCRIPT = (
    TRAIN
    + """
import pathlib, sys, time

here, name = pathlib.Path(sys.argv[1]), sys.argv[2]
options = ks.CommunicationOptions(timeout_seconds=3)
strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)
model = make(strategy)
fit(model, 3)
np.savez(here / f"{name}.npz", *model.get_weights())


def say(epoch, logs):
    if epoch == 3:
        (here / f"{name}.ready").touch()


try:
    fit(model, 10**6, [keras.callbacks.LambdaCallback(on_epoch_end=say)])
except ks.errors.WorkerError as error:
    print("ERROR", time.time(), error, flush=True)
    raise
"""
)


def assert_trained(folder: Path, name: str, epochs: int) -> None:
    """The files of both workers have the weights of one device."""
    names: dict = {}
    exec(TRAIN, names)
    model = names["make"](one_device())
    names["fit"](model, epochs)
    found = []
    for index in range(2):
        with np.load(folder / f"{name}{index}.npz") as file:
            found.append(dict(enumerate(file.values())))
    assert_workers(dict(enumerate(map(np.asarray, model.get_weights()))), found)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with connected_hosts(2) as made:
        yield made
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    assert not [name for name in made.names if name in listed.stdout]


def start(forker: Forker, hosts: Hosts, index: int, folder: Path) -> Forked:
    script = folder / f"script{index}.py"
    script.write_text(f"{hosts.enter(index)}\n{SCRIPT}")
    addresses = [f"{address}:4711" for address in hosts.addresses]
    task = {"type": "worker", "index": index}
    return forker.start(
        folder / f"{index}.log",
        str(script),
        *(str(folder), str(index)),
        TF_CONFIG=json.dumps({"cluster": {"worker": addresses}, "task": task}),
    )


@pytest.mark.nightly
def test_workers_on_two_hosts_train_and_see_that_the_cable_is_cut(
    forker, hosts, tmp_path
):
    processes = [start(forker, hosts, index, tmp_path) for index in range(2)]

    def are_training() -> bool:
        for process in processes:
            assert process.ended() is None, process.text()
        return len(list(tmp_path.glob("*.ready"))) == 2

    try:
        wait_until(are_training, f"both train, for {START_SECONDS:g} s")
        cut = time.time()
        hosts.cut(0)
        for index, process in enumerate(processes):
            code, _ = process.wait(TIMEOUT + 10 - (time.time() - cut))
            text = process.text()
            assert code == 1, text
            # Raised; or printed by what ends a process that an engine holds in a call,
            # as XLA may where a connection is neither open nor closed.
            found = re.search(
                r"^(?:ERROR (\S+)|keras_strategies\.errors\.WorkerError:) (.*)",
                text,
                re.MULTILINE,
            )
            assert found is not None, text
            chief, other = (each.pid for each in processes)
            host, address = map(re.escape, hosts.addresses)
            # The first host has the lead. A host with its own end down may get an error
            # from its kernel.
            who = rf"Worker 1 \({address}, process {other}\)"
            lead = rf"{host}:4711, on the host of worker 0 \(process {chief}\)"
            expected = (
                rf"{who} was lost at step \d+ of fit: "
                ".*(no heartbeat for|its connection ended)",
                rf"{who} cannot go on at step \d+ of fit: the connection to the lead "
                rf"at {lead}, was lost: ",
            )[index]
            assert re.match(expected, found[2]), found[2]
            if found[1] is not None:
                assert float(found[1]) - cut < TIMEOUT + 3
    finally:
        for process in processes:
            process.kill()
    assert_gone([process.pid for process in processes])
    assert_trained(tmp_path, "", 3)


# Workers that are started again after a loss train on where their backup is.

EPOCHS = 4
RESTARTED = (
    TRAIN
    + """
victim = sys.argv[1]
attempt = len(list(here.glob(me + "-*.pid")))
(here / (me + ".pid")).rename(here / f"{me}-{attempt}.pid")


class Watch(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("attempt", attempt, "epoch", epoch, flush=True)

    def on_train_batch_begin(self, batch, logs=None):
        steps = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        if me == victim and attempt == 0 and steps == 15:
            os.kill(os.getpid(), signal.SIGKILL)


options = ks.CommunicationOptions(timeout_seconds=30)
model = make(ks.MultiWorkerMirroredStrategy(communication_options=options))
fit(model, 4, [keras.callbacks.BackupAndRestore(here / "backup"), Watch()])
np.savez(here / (me + ".npz"), *model.get_weights())
"""
)
EPOCHS_SEEN = [
    *(f"attempt 0 epoch {epoch}" for epoch in range(3)),
    # The third was under way.
    *(f"attempt 1 epoch {epoch}" for epoch in range(2, EPOCHS)),
]


@pytest.mark.one_backend
@pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX")
@pytest.mark.nightly(unless=["worker1"])
@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("victim", ["worker1", "worker0"])
def test_workers_that_are_started_again_end_with_the_same_weights(
    forker, tmp_path, victim
):
    script = write_script(tmp_path, RESTARTED)
    logs = [[tmp_path / f"{i}-{attempt}.log" for i in range(2)] for attempt in range(2)]
    for attempt in range(2):
        processes = forker.start_workers(logs[attempt], script, victim)
        codes = [process.wait(120)[0] for process in processes]
        assert all(codes) if attempt == 0 else not any(codes), processes[0].text()
    for worker in range(2):
        lines = "".join(log[worker].read_text() for log in logs).splitlines()
        assert [line for line in lines if line.startswith("attempt ")] == EPOCHS_SEEN
    assert_trained(tmp_path, "worker", EPOCHS)
    assert_gone([int(path.read_text()) for path in tmp_path.glob("*.pid")])
    # The backup is for a run that goes on; this one is done.
    assert not (tmp_path / "backup").exists()
