"""Failure of one worker: the error on the others, with its step, and complete files."""

from __future__ import annotations

import re

import keras
import pytest
from harness.processes import assert_gone
from multi_worker.faults import LIMIT, FaultCase, Outcome, run_fault
from multi_worker.faulty import STEPS, TIMEOUT

BACKEND = keras.backend.backend()
pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]

LOST = [
    # The others wait in the step's collectives, and for batches.
    FaultCase("kill", "callback", victim=1, workers=3),
    FaultCase("kill", "data", victim=0),
    FaultCase("kill", "saving", victim=0),
    FaultCase("stop", "callback", victim=0),
    FaultCase("hang", "callback", victim=1),
    FaultCase("stop", "data", victim=1),
    # On Torch the others wait for the batch, see `test_comparisons_of_steps.py`.
    *[FaultCase("hang", "data", victim=1)] * (BACKEND != "torch"),
    FaultCase("raise", "data", victim=1),
    FaultCase("exit", "callback", victim=0),
]
HOW = {
    "kill": "its process or its connection ended.",
    "stop": "no heartbeat for",
    "hang": "in happen: `time.sleep(600)`",
    "raise": "ValueError: bad rows in file 3.",
    "exit": "SystemExit: 0.",
}


def check(case: FaultCase, outcomes: list[Outcome]) -> list[str]:
    """What holds after every fault; the errors of those who did not make it."""
    assert_gone([outcome.pid for outcome in outcomes])
    errors = []
    for number in case.others:
        outcome = outcomes[number]
        assert outcome.code == 1, outcome.log
        assert outcome.end_seconds < LIMIT, outcome.log
        # JAX's collectives cannot be left: the process is ended, with the error.
        is_ended = BACKEND == "jax" and "still waits for it" in outcome.log
        assert outcome.error or is_ended, outcome.log
        errors.append(outcome.error or outcome.log)
    return errors


@pytest.mark.nightly(unless=["exit-callback-0_of_2"])
@pytest.mark.parametrize("case", LOST, ids=str)
def test_the_others_name_the_lost_worker_and_its_step(case, forker, tmp_path):
    outcomes = run_fault(forker, case, tmp_path)
    for error in check(case, outcomes):
        lost = outcomes[case.victim].pid
        assert f"Worker {case.victim} (127.0.0.1, process {lost}) was lost" in error
        assert HOW[case.kind] in error
        found = re.search(r"lost at step (\d+) of fit.* This is worker", error)
        assert found is not None, error
        # Its last whole step. Data is read ahead of its step; of a worker that can
        # say nothing more, the last step is known that it has told of.
        last = 20 if case.place == "saving" else 16
        ahead = 3 if case.place == "data" else 1
        least = last - ahead if case.kind in ("raise", "exit") else STEPS
        assert least <= int(found[1]) <= last
    # At once, where something tells; a worker that is stopped is silent.
    fast = [outcomes[n].seconds for n in case.others if outcomes[n].error]
    limit = TIMEOUT + 3 if case.kind in ("stop", "hang") else TIMEOUT
    limit += 2 * (case.kind == "hang" and case.place == "data")
    assert max(fast, default=0) < limit
    files = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    hidden = [name for name in files if name.startswith(".part-")]
    assert len(hidden) == (case.place == "saving")
    assert files == [*hidden, "last.keras"]
    model = keras.saving.load_model(tmp_path / "checkpoints" / "last.keras")
    # That of the first epoch. On JAX three workers compute 8 rows whole, each for
    # itself, and may have ended the second when they hear of the loss.
    alone = BACKEND == "jax" and case.workers == 3
    assert int(model.optimizer.iterations) in (
        (STEPS, 2 * STEPS) if alone else (STEPS,)
    )
