"""Durations of test files, from pytest's reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runner import jobs, results
from runner.jobs import Job
from runner.settings import BACKENDS, DURATIONS, ROOT

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_values" name="test_a[1.5-x]" time="2.5"/>
<testcase classname="" name="tests.custom_loops.test_jax" time="0.0"/>
</testsuite></testsuites>"""


def test_each_case_of_a_report_has_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "LOGS", tmp_path)
    job = Job("torch values", "torch", (), 1.0)
    job.file("xml").write_text(REPORT)
    assert list(results.seconds_of_tests(job)) == [
        ("tests/test_values.py", "test_a[1.5-x]", 2.5),
        ("tests/custom_loops/test_jax.py", "tests.custom_loops.test_jax", 0.0),
    ]


def test_durations_of_files_that_exist_are_recorded(tmp_path: Path) -> None:
    durations = tmp_path / "durations.json"
    durations.write_text(json.dumps({"jax .py": 3, "jax tests/test_values.py": 7}))
    found = {"torch tests/test_values.py": 0.2, "torch tests/test_gone.py": 5.0}
    results.record(found, durations)
    assert json.loads(durations.read_text()) == {
        "jax tests/test_values.py": 7,
        "torch tests/test_values.py": 1,
    }


def test_recorded_durations_are_those_of_files_that_run() -> None:
    unknown = [
        name
        for name in json.loads(DURATIONS.read_text())
        if not runs_on(*name.split(" ", 1))
    ]
    assert not unknown, "\n".join(unknown)


def runs_on(backend: str, file: str) -> bool:
    """Whether a file exists, and a backend runs it."""
    return (
        backend in BACKENDS
        and (ROOT / file).is_file()
        and not jobs.is_of_another(file, backend)
        and (backend == BACKENDS[0] or not jobs.runs_once(file))
    )
