"""Clusters with a fault in them: started, waited for, and timed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from harness.forker import Forked, Forker
from multi_worker.faulty import TIMEOUT

SCRIPT = str(Path(__file__).with_name("faulty.py"))
#: Seconds that every other worker may take until its error (contract: plus ten).
LIMIT = TIMEOUT + 10
# Meeting and two epochs, on a busy core.
_START_SECONDS = 60.0


@dataclass(frozen=True)
class FaultCase:
    """One fault."""

    kind: str
    place: str
    victim: int = 1
    workers: int = 2

    def __str__(self) -> str:
        return f"{self.kind}-{self.place}-{self.victim}_of_{self.workers}"

    @property
    def others(self) -> list[int]:
        """The workers that end by themselves."""
        return [index for index in range(self.workers) if index != self.victim]


@dataclass(frozen=True)
class Outcome:
    """What came of one process."""

    pid: int
    code: int | None
    error: str
    seconds: float
    end_seconds: float
    log: str


def run_fault(forker: Forker, case: FaultCase, folder: Path) -> list[Outcome]:
    """Trains until the fault has ended it."""
    (folder / "checkpoints").mkdir()
    logs = [folder / f"process{index}.log" for index in range(case.workers)]
    arguments = [case.kind, case.place, str(case.victim), str(folder)]
    processes = forker.start_workers(logs, SCRIPT, *arguments)
    try:
        for index in case.others:
            processes[index].wait(_START_SECONDS + LIMIT)
        begin = _begin(folder)
        return [_outcome(process, begin) for process in processes]
    finally:
        for process in processes:
            process.kill()


def _begin(folder: Path) -> float:
    """When the fault was; without one of its own, when the workers met."""
    for name in ("fault", "begin"):
        file = folder / f"{name}.time"
        if file.exists():
            return float(file.read_text())
    raise AssertionError("No worker has begun.")


def _outcome(process: Forked, begin: float) -> Outcome:
    text = process.text()
    found = re.search(r"^ERROR (\S+) (.*)", text, re.MULTILINE)
    code, ended = process.ended() or (None, float("nan"))
    return Outcome(
        pid=process.pid,
        code=code,
        error=found[2] if found else "",
        seconds=float(found[1]) - begin if found else float("nan"),
        end_seconds=ended - begin,
        log=text,
    )
