"""`ks.verify` on elastic workers that are killed in training, and that are not."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import keras
import pytest
from harness.forker import Forker
from verification import elastic_script

from keras_strategies.cluster.resolvers.local_processes import free_addresses

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def forker():
    with Forker() as made:
        yield made


def reports(forker: Forker, folder: Path, case: str, kill_after: int) -> Any:
    """What the workers have written; the last one may have been killed."""
    addresses = free_addresses(2)
    started = []
    for index in range(2):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": addresses}, "task": task}
        arguments = (str(folder), case, str(kill_after))
        environment = {"TF_CONFIG": json.dumps(config), "OMP_NUM_THREADS": "1"}
        log = folder / f"{index}.log"
        script = elastic_script.__file__
        started.append(forker.start(log, script, *arguments, **environment))
    codes = [process.wait(200)[0] for process in started]
    last = [0] if not kill_after else [-signal.SIGKILL, 128 + signal.SIGKILL]
    assert codes[0] == 0 and codes[1] in last, started[0].text() + started[1].text()
    return [json.loads(each.read_text()) for each in sorted(folder.glob("*.json"))]


@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize("kill_after", [2, pytest.param(0, marks=pytest.mark.nightly)])
def test_no_alarm(forker, tmp_path, kill_after: int) -> None:
    found = reports(forker, tmp_path, "sound", kill_after)
    assert [each["equal"] for each in found] == [True] * (1 if kill_after else 2)


@pytest.mark.slow(seconds=15)
@pytest.mark.nightly
def test_what_is_wrong_after_the_loss_of_a_worker_is_found(forker, tmp_path) -> None:
    [report] = reports(forker, tmp_path, "divided", 2)
    first, cause = report["differences"][0], report["cause"]
    assert (first["step"], first["kind"]) == (3, "loss"), report
    assert cause == "scaled_by_replicas", report
    assert keras.backend.backend() in report["versions"]
