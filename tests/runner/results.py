"""Results of jobs: counts, durations and the slowest tests."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.by_day import FILE as SLOW_TESTS
from harness.by_day import SHORT
from runner.jobs import Job
from runner.settings import DURATIONS, LOGS, ROOT, Settings


@dataclass(frozen=True)
class Result:
    """How many tests passed, and how long it took."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    problem: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def __add__(self, other: Result) -> Result:
        return Result(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.seconds + other.seconds,
        )


def result_of(job: Job, problem: str, seconds: float) -> Result:
    """Counts a job's tests; a command, and a job that broke off, counts as one."""
    if job.is_command or not job.file("xml").exists():
        bad = problem or ("" if job.is_command else "pytest wrote no report")
        return Result(int(not bad), int(bool(bad)), 0, seconds, bad)
    tests = failed = skipped = 0
    for suite in ElementTree.parse(job.file("xml")).getroot().iter("testsuite"):
        tests += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    # All tests of these files are for the night or for another backend.
    if problem.endswith("exit code 5"):
        problem = ""
    passed = tests - failed - skipped
    if problem and not failed:
        failed = 1
    return Result(passed, failed, skipped, seconds, problem)


def print_log(job: Job, result: Result) -> None:
    print(f"---- log of {job.name} ----")
    print(job.file("log").read_text(errors="replace").rstrip())
    print(f"---- end of {job.name}: {result.problem} ----")


def seconds_of_tests(job: Job) -> Iterable[tuple[str, str, float]]:
    """File, name and duration of each test of a job."""
    if job.is_command or not job.file("xml").exists():
        return
    for case in ElementTree.parse(job.file("xml")).getroot().iter("testcase"):
        name = case.get("name", "")
        # A file that is skipped, or cannot be imported, is a case named as its module.
        module = case.get("classname") or name
        yield module.replace(".", "/") + ".py", name, float(case.get("time", 0))


def summarize(results: dict[Job, Result], settings: Settings, idle: float) -> None:
    """Prints how long each part took, and writes down the slowest tests."""
    files: Counter[str] = Counter()
    tests: list[tuple[float, str]] = []
    for job in results:
        for file, name, seconds in seconds_of_tests(job):
            files[f"{job.backend} {file}"] += seconds
            tests.append((seconds, f"{job.backend} {file}::{name}"))
    slowest = [f"{seconds:7.1f} s  {name}" for seconds, name in sorted(tests)[::-1]]
    (LOGS / "slowest.txt").write_text("\n".join(slowest[:200]) + "\n")
    print_totals(results)
    print(
        f"Cores were idle for {idle:.0f} s; the slowest tests: .test-logs/slowest.txt"
    )
    if settings.record:
        record(files)
        record_tests({name: seconds for seconds, name in tests})


def record(files: Mapping[str, float], durations: Path = DURATIONS) -> None:
    """Writes the seconds of files, such as `jax tests/a.py`, to those of earlier runs.

    Files that no longer exist are left out.
    """
    known = json.loads(durations.read_text()) if durations.exists() else {}
    # Next to nothing is noted as one second: the process has to start.
    known |= {file: max(1, round(seconds)) for file, seconds in files.items()}
    kept = {
        name: seconds
        for name, seconds in sorted(known.items())
        if (ROOT / name.partition(" ")[2]).is_file()
    }
    durations.write_text(json.dumps(kept, indent=0) + "\n")


def record_tests(tests: Mapping[str, float], durations: Path = SLOW_TESTS) -> None:
    """Writes the seconds of tests, such as `jax tests/a.py::test_b[c]`.

    A test that has not run keeps what was recorded. Those of files that no longer exist
    are left out.
    """
    known = json.loads(durations.read_text()) if durations.exists() else {}
    known |= {test: round(seconds, 1) for test, seconds in tests.items()}
    kept = {
        test: seconds
        for test, seconds in sorted(known.items())
        if seconds >= SHORT
        and (ROOT / test.partition(" ")[2].partition("::")[0]).is_file()
    }
    durations.write_text(json.dumps(kept, indent=0) + "\n")


def print_totals(results: dict[Job, Result]) -> None:
    """A line for style and types, and one for each backend."""
    totals: dict[str, Result] = {}
    for job, result in results.items():
        kind = job.backend or "style and types"
        totals[kind] = totals.get(kind, Result()) + result
    for kind, result in totals.items():
        print(f"{kind}: {result}, {result.seconds:.0f} s of a core")
