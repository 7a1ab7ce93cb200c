"""The runner's groups of files, and the sum of its results."""

from __future__ import annotations

from pathlib import Path

import pytest
from runner import jobs, results
from runner.jobs import Job

pytestmark = pytest.mark.one_backend
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_values" name="test_a[1.5-x]" time="2.5"/>
<testcase classname="tests.test_values" name="test_b"><failure/></testcase>
<testcase classname="tests.test_values" name="test_c"><error/></testcase>
<testcase classname="" name="tests.custom_loops.test_jax"><skipped/></testcase>
</testsuite></testsuites>"""


def test_each_backend_runs_every_file_but_those_of_others() -> None:
    found = jobs.test_jobs(["jax", "torch"], [])
    for backend, other in (("jax", "torch"), ("torch", "jax")):
        files = [f for job in found if job.backend == backend for f in job.files]
        assert len(files) == len(set(files))
        assert "tests/test_values.py" in files
        assert any(f"/backends/{backend}/" in file for file in files)
        assert not any(f"/backends/{other}/" in file for file in files)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setattr(jobs, "LOGS", tmp_path)
    monkeypatch.setattr(results, "LOGS", tmp_path)
    return Job("torch values", "torch")


def test_a_report_is_counted(job: Job, tmp_path: Path) -> None:
    job.file("xml").write_text(REPORT)
    found = results.result_of(job, "pytest ended with exit code 1", 3.0)
    assert str(found) == "1 passed, 2 failed, 1 skipped"
    total = results.summarize({job: found})
    assert str(total) == str(found)
    slowest = (tmp_path / "slowest.txt").read_text()
    assert slowest.startswith("    2.5 s  torch tests.test_values.test_a[1.5-x]\n")


@pytest.mark.parametrize(
    ("problem", "counts"),
    [
        ("", "0 passed, 1 failed, 0 skipped"),
        ("not finished after 9 s (KS_TIMEOUT)", "0 passed, 1 failed, 0 skipped"),
    ],
)
def test_a_job_without_a_report_has_failed(job: Job, problem: str, counts: str) -> None:
    assert str(results.result_of(job, problem, 3.0)) == counts


def test_a_job_that_ends_after_its_tests_has_failed(job: Job) -> None:
    job.file("xml").write_text(REPORT.replace("<failure/>", "").replace("<error/>", ""))
    for problem, failed in (("pytest ended with exit code 3", 1), ("exit code 5", 0)):
        assert results.result_of(job, problem, 3.0).failed == failed
