"""Results of jobs: counts, seconds and the slowest tests."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

from runner.jobs import LOGS, Job


@dataclass(frozen=True)
class Result:
    """How many tests passed, and how long it took."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    problem: str = ""
    #: Seconds and id of each test.
    tests: tuple[tuple[float, str], ...] = ()

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def result_of(job: Job, problem: str, seconds: float) -> Result:
    """Counts a job's tests; style and types, or a job that broke off, count as one."""
    if not job.file("xml").exists():
        problem = problem or ("pytest wrote no report" if job.backend else "")
        return Result(int(not problem), int(bool(problem)), 0, seconds, problem)
    report = ElementTree.parse(job.file("xml")).getroot()
    cases = list(report.iter("testcase"))
    failed = sum(
        any(c.find(tag) is not None for tag in ("failure", "error")) for c in cases
    )
    skipped = sum(case.find("skipped") is not None for case in cases)
    # All tests of these files are for the night or for another backend.
    if problem.endswith("exit code 5"):
        problem = ""
    tests = tuple(
        (float(c.get("time", 0)), f"{job.backend} {c.get('classname')}.{c.get('name')}")
        for c in cases
    )
    passed = len(cases) - failed - skipped
    return Result(
        passed, failed or int(bool(problem)), skipped, seconds, problem, tests
    )


def print_log(job: Job, result: Result) -> None:
    print(f"---- log of {job.name} ----")
    print(job.file("log").read_text(errors="replace").rstrip())
    print(f"---- end of {job.name}: {result.problem} ----")


def summarize(results: dict[Job, Result]) -> Result:
    """Prints how long each part took, and writes down the slowest tests."""
    for kind in dict.fromkeys(job.backend for job in results):
        part = total([results[job] for job in results if job.backend == kind])
        print(f"{kind or 'style and types'}: {part}, {part.seconds:.0f} s of a core")
    found = total(list(results.values()))
    lines = [f"{seconds:7.1f} s  {name}" for seconds, name in sorted(found.tests)]
    (LOGS / "slowest.txt").write_text("\n".join(lines[:-301:-1]) + "\n")
    print("The slowest tests: .test-logs/slowest.txt")
    return found


def total(results: list[Result]) -> Result:
    counts = ("passed", "failed", "skipped", "seconds")
    sums = [sum(getattr(result, name) for result in results) for name in counts]
    return Result(*sums, tests=tuple(t for result in results for t in result.tests))
