"""Workers that are stopped, cut off or started again join the others under `fit`."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import pytest
from elastic import elastic_until_stopped
from elastic.endless_runs import WORKERS, Run, States
from harness.forker import Forker
from harness.hosts import Hosts, connected_hosts
from harness.processes import TIMEOUT, command, wait_until

pytestmark = pytest.mark.multiprocess

BACKEND = keras.backend.backend()


def by_day_on(*backends: str) -> list[pytest.MarkDecorator]:
    return [] if BACKEND in backends else [pytest.mark.nightly]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with connected_hosts(WORKERS) as made:
        yield made


@pytest.fixture
def run_on_hosts(forker: Forker, tmp_path: Path, hosts: Hosts) -> Iterator[Run]:
    with contextlib.closing(Run(forker, tmp_path, hosts)) as made:
        yield made


def assert_joins_again(
    run: Run, victim: int, lose: Callable[[], None], mend: Callable[[], None]
) -> None:
    """A worker that is lost, and joins when it is mended, changes nothing."""
    run.wait_until_together({0, 1, 2})
    lose()
    run.wait_until_together({0, 1, 2} - {victim})
    mend()
    run.wait_until_together({0, 1, 2})
    run.end()
    run.states.assert_like_one_device()
    assert f"worker {victim} was lost at step" in run.text()


@pytest.mark.one_backend("jax", "torch")
@pytest.mark.slow(seconds=11)
@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(0, marks=pytest.mark.nightly, id="chief"),
        # XLA is the only engine that no exception reaches in its collectives.
        pytest.param(1, marks=by_day_on("torch", "jax"), id="worker"),
    ],
)
def test_a_stopped_worker_joins_again(run, victim):
    send = functools.partial(os.kill, run.workers[victim].pid)
    stop, resume = (lambda: send(signal.SIGSTOP)), (lambda: send(signal.SIGCONT))
    assert_joins_again(run, victim, stop, resume)


@pytest.mark.one_backend("jax", "torch")
@pytest.mark.slow(seconds=11)
def test_a_worker_that_returns_before_the_next_step_has_the_state_of_the_others(run):
    """None of the three is behind, so nobody sends a state."""
    run.wait_until_together({0, 1, 2})
    folder = run.states.folder
    (folder / "0.formed").unlink()
    (folder / "hold").touch()
    os.kill(run.workers[0].pid, signal.SIGSTOP)
    held = [folder / f"{index}.held" for index in (1, 2)]
    wait_until(lambda: all(each.exists() for each in held), "the others form a group")
    os.kill(run.workers[0].pid, signal.SIGCONT)
    wait_until((folder / "0.formed").exists, "worker 0 asks to join")
    for old in folder.glob("*.state"):
        old.unlink()
    (folder / "hold").unlink()
    run.wait_until_together({0, 1, 2})
    run.end()
    run.states.assert_like_one_device()


@pytest.mark.slow(seconds=14)
@pytest.mark.parametrize("victim", [pytest.param(1, marks=by_day_on("torch"))])
def test_a_worker_with_its_cable_plugged_in_again_joins(run_on_hosts, hosts, victim):
    cut, plug = (lambda: hosts.cut(victim)), (lambda: hosts.plug(victim))
    assert_joins_again(run_on_hosts, victim, cut, plug)


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
