"""Workers that are stopped, cut off or started again join the others under `fit`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
from elastic import elastic_until_stopped
from elastic.elastic_until_stopped import fit, make_model
from harness.forker import Forked, Forker
from harness.hosts import Hosts, NotPermittedError, connected_hosts
from harness.processes import TIMEOUT, assert_gone, command, wait_until

import keras_strategies as ks
from keras_strategies.cluster.resolvers.local_processes import free_addresses

pytestmark = pytest.mark.multiprocess

BACKEND = keras.backend.backend()


def by_day_on(*backends: str) -> list[pytest.MarkDecorator]:
    return [] if BACKEND in backends else [pytest.mark.nightly]


WORKERS = 3


class States:
    """What the workers have written into a folder."""

    def __init__(self, folder: Path, workers: int = WORKERS):
        self.folder = folder
        self.workers = workers

    def of(self, index: int) -> tuple[int, int, int]:
        """Generation, number of workers, and steps of a worker."""
        path = self.folder / f"{index}.state"
        generation, count, steps = (
            json.loads(path.read_text()) if path.exists() else (-1, 0, 0)
        )
        return generation, count, steps

    def are_together(self, workers: set[int]) -> bool:
        """Whether these workers, and no others, have taken steps together."""
        found = [self.of(index) for index in sorted(workers)]
        return {each[:2] for each in found} == {(found[0][0], len(workers))}

    def assert_like_one_device(self) -> None:
        """Fails if weights or histories differ from those of one device."""
        histories = [
            json.loads((self.folder / f"{index}.json").read_text())
            for index in range(self.workers)
        ]
        epochs = len(histories[0]["loss"])
        with ks.OneDeviceStrategy("cpu:0").scope():
            model = make_model()
        expected = fit(model, epochs)
        for index, history in enumerate(histories):
            assert history.keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_allclose(history[name], values, 1e-4, 1e-5)
            with np.load(self.folder / f"{index}.npz") as file:
                pairs = zip(file.values(), model.get_weights(), strict=True)
                for found, other in pairs:
                    np.testing.assert_allclose(found, other, 1e-4, 1e-5)


class Run:
    """The processes of a training."""

    def __init__(self, forker: Forker, folder: Path, hosts: Hosts | None):
        self.states = States(folder)
        addresses = free_addresses(WORKERS)
        if hosts is not None:
            addresses = [f"{address}:4711" for address in hosts.addresses]
        self.workers: list[Forked] = []
        for index in range(WORKERS):
            script = folder / f"script{index}.py"
            enter = hosts.enter(index) if hosts is not None else ""
            code = Path(elastic_until_stopped.__file__).read_text()
            first = "from __future__ import annotations"
            script.write_text(code.replace(first, f"{first}\n{enter}"))
            task = {"type": "worker", "index": index}
            self.workers.append(
                forker.start(
                    folder / f"{index}.log",
                    str(script),
                    str(folder),
                    TF_CONFIG=json.dumps(
                        {"cluster": {"worker": addresses}, "task": task}
                    ),
                    OMP_NUM_THREADS="1",
                )
            )

    def wait_until_together(self, workers: set[int]) -> None:
        def together() -> bool:
            for worker in self.workers:
                assert worker.ended() is None, self.text()
            return self.states.are_together(workers)

        try:
            wait_until(together, f"{workers} train together")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from error

    def end(self) -> None:
        (self.states.folder / "stop").touch()
        for worker in self.workers:
            code, _ = worker.wait(TIMEOUT)
            assert code == 0, self.text()

    def text(self) -> str:
        return "\n".join(f"{each.log.name}: {each.text()}" for each in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        assert_gone([worker.pid for worker in self.workers])


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    try:
        with connected_hosts(WORKERS) as made:
            yield made
    except NotPermittedError as error:
        pytest.skip(f"no network namespaces here: {error}")


@pytest.fixture
def run(forker: Forker, tmp_path: Path) -> Iterator[Run]:
    made = Run(forker, tmp_path, None)
    yield made
    made.close()


@pytest.fixture
def run_on_hosts(forker: Forker, tmp_path: Path, hosts: Hosts) -> Iterator[Run]:
    made = Run(forker, tmp_path, hosts)
    yield made
    made.close()


@pytest.mark.by_day
@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(0, marks=pytest.mark.nightly, id="chief"),
        # XLA is the only engine that no exception reaches in its collectives.
        pytest.param(1, marks=by_day_on("torch", "jax"), id="worker"),
    ],
)
def test_a_stopped_worker_joins_again(run, victim):
    run.wait_until_together({0, 1, 2})
    os.kill(run.workers[victim].pid, signal.SIGSTOP)
    run.wait_until_together({0, 1, 2} - {victim})
    os.kill(run.workers[victim].pid, signal.SIGCONT)
    run.wait_until_together({0, 1, 2})
    run.end()
    run.states.assert_like_one_device()
    assert f"worker {victim} was lost at step" in run.text()


@pytest.mark.parametrize("victim", [pytest.param(1, marks=by_day_on("torch"))])
def test_a_worker_with_its_cable_plugged_in_again_joins(run_on_hosts, hosts, victim):
    run = run_on_hosts
    run.wait_until_together({0, 1, 2})
    hosts.cut(victim)
    run.wait_until_together({0, 1, 2} - {victim})
    hosts.plug(victim)
    run.wait_until_together({0, 1, 2})
    run.end()
    run.states.assert_like_one_device()
    assert f"worker {victim} was lost at step" in run.text()


@pytest.mark.nightly
def test_without_the_machine_of_the_lead_the_others_end(run_on_hosts, hosts):
    run = run_on_hosts
    run.wait_until_together({0, 1, 2})
    hosts.cut(0)
    for worker in run.workers[1:]:
        code, _ = worker.wait(TIMEOUT)
        assert code == 1, run.text()
        assert "has lost the lead at" in worker.text()
        assert "ks.callbacks.Resume" in worker.text()


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1], ids=["chief", "worker"])
def test_the_launcher_starts_a_lost_worker_again(tmp_path, victim):
    states = States(tmp_path, workers=2)
    script = elastic_until_stopped.__file__
    with subprocess.Popen(
        command("launch", "--elastic", "1:2", script, str(tmp_path), str(victim)),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            wait_until((tmp_path / "killed").exists, "a worker kills itself")
            wait_until(lambda: states.are_together({1 - victim}), "the other goes on")
            wait_until(lambda: states.are_together({0, 1}), "it is back")
            (tmp_path / "stop").touch()
            output, errors = process.communicate(timeout=TIMEOUT)
        finally:
            process.terminate()
    assert process.returncode == 0, output + errors
    assert f"worker {victim} was ended by SIGKILL; starting it again" in errors
    states.assert_like_one_device()
