"""Torch: no partial sum of a collective that NCCL has aborted is used."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from backends.torch import nccl_training
from backends.torch.nccl_training import STEPS, VICTIM_STEP
from harness.forker import Forked, Forker

from keras_strategies.engines.torch import nccl_works
from keras_strategies.engines.torch.confirmed_steps import confirmed, written_by_steps
from keras_strategies.engines.torch.nccl_works import NcclWorks
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.errors import WorkerError

SECONDS = 120.0


def start(forker: Forker, folder: Path, count: int, *options: str) -> list[Forked]:
    """Starts workers, or a training on one device."""
    logs = [folder / f"log{index}_of_{count}" for index in range(count)]
    return forker.start_workers(logs, nccl_training.__file__, str(folder), *options)


def trained(forker: Forker, folder: Path, *options: str) -> tuple[int, str, Any]:
    """The exit code and the output of worker 0, and the weights by worker."""
    processes = [each for n in (2, 1) for each in start(forker, folder, n, *options)]
    codes = [process.wait(SECONDS)[0] for process in processes]
    assert codes[1] in (-signal.SIGKILL, 128 + signal.SIGKILL), processes[1].text()
    assert codes[2] == 0, processes[2].text()
    weights = [dict(np.load(folder / f"weights{index}.npz")) for index in (0, -1)]
    return codes[0], processes[0].text(), weights


@pytest.mark.slow(seconds=7)
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", [[], ["loop"]], ids=["fit", "loop"])
def test_partial_sums_of_a_lost_worker_are_not_applied(forker, tmp_path, kind):
    code, text, (own, alone) = trained(forker, tmp_path, *kind)
    assert code == 1
    assert "Worker 1 (127.0.0.1, process" in text
    assert kind or f"This is worker 0, at step {VICTIM_STEP} of fit." in text
    assert max(map(int, own.keys() - {"end"})) == VICTIM_STEP - 1
    last = str(VICTIM_STEP - 1)
    np.testing.assert_allclose(own[last], alone[last], 1e-5, 1e-6)
    # All variables but the moving statistics, which precede the gradients: they were
    # updated by partial sums, and cannot be taken for weights.
    size = 4 * 5 + 5 + 5
    assert np.isnan(own["end"][:size]).all() and np.isnan(own["end"][-6:]).all()


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", [[], ["loop"]], ids=["fit", "loop"])
def test_the_host_waits_for_no_device_before_the_end_of_a_step(forker, tmp_path, kind):
    for process in start(forker, tmp_path, 2, "counts", *kind):
        code, _ = process.wait(SECONDS)
        assert code == 0, process.text()
        [line] = [each for each in process.text().splitlines() if "waits [" in each]
        waits = json.loads(line.partition("waits ")[2])
        # Groups are made and rows are proved in the first steps.
        assert len(waits) == STEPS and waits[2:] == [[]] * (STEPS - 2), waits


@pytest.mark.multiprocess
def test_an_elastic_group_repeats_the_step(forker, tmp_path):
    code, text, (own, alone) = trained(forker, tmp_path, "elastic")
    assert code == 0, text
    for step in (*range(1, STEPS + 1), "end"):
        np.testing.assert_allclose(own[str(step)], alone[str(step)], 1e-5, 1e-6)


@pytest.mark.parametrize("is_lost", [False, True])
def test_weights_are_spoiled_by_aborted_sums_and_not_by_interruptions(is_lost):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    workers = TorchCommunicator.__new__(TorchCommunicator)
    lost = WorkerError("Worker 1 was lost.") if is_lost else None
    workers.group = mock.Mock(spec=["check"], **{"check.side_effect": lost})
    workers._works = NcclWorks()
    # A collective that ends after some looks at it.
    looks = itertools.chain([False] * 3, itertools.repeat(True))
    work = mock.Mock(spec=["is_completed", "wait"])
    work.is_completed.side_effect = looks
    with (
        pytest.raises(KeyboardInterrupt),
        confirmed(lambda: written_by_steps(model), workers),
    ):
        workers._works.add(work)
        workers._works.use()
        raise KeyboardInterrupt
    assert workers.has_used_unconfirmed == is_lost
    assert all(np.isnan(w).all() == is_lost for w in model.get_weights())


def test_torch_leaves_errors_to_this_package(monkeypatch):
    """Under torchrun, Torch's watchdog would end the process."""
    found: dict[str, str | None] = {}
    names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT")

    def create(*given: Any) -> None:
        found.update({name: os.environ.get(name) for name in names})

    nccl = mock.Mock(side_effect=create)
    monkeypatch.setattr(nccl_works.dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setenv(names[0], "1")
    monkeypatch.delenv(names[1], raising=False)
    nccl_works.create_nccl_group(None, 0, 2, None)  # type: ignore[arg-type]
    assert found == dict.fromkeys(names, "2") | {names[1]: "0"}
    assert os.environ[names[0]] == "1"
    assert names[1] not in os.environ
