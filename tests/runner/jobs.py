"""Jobs of a run: groups of files with tests, and style and types."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness import environment
from harness.fork_server import SERVERS, ForkServer
from harness.forker import Forker
from harness.marks import BACKENDS

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".test-logs"
#: Of the tests of a job, as `seconds_of` estimates them.
JOB_SECONDS = 75.0
LINT = "ruff check . && ruff format --check . && mypy"


@dataclass(frozen=True)
class Job:
    """Files that one pytest runs on a backend; without a backend, `LINT`."""

    name: str = "style and types"
    backend: str = ""
    files: tuple[str, ...] = ()

    def file(self, ending: str) -> Path:
        return LOGS / f"{self.name.replace('/', '.').replace(' ', '-')}.{ending}"


def test_jobs(backends: Iterable[str], paths: Iterable[str]) -> list[Job]:
    """Neighbouring files in groups, longest first."""
    found: list[tuple[float, Job]] = []
    for backend in backends:
        others = [f"/backends/{name}/" for name in BACKENDS if name != backend]
        groups: list[dict[str, float]] = [{}]
        for file in _test_files(paths or ("tests",)):
            if any(other in file for other in others):
                continue
            seconds = seconds_of((ROOT / file.partition("::")[0]).read_text())
            if sum(groups[-1].values()) + seconds > JOB_SECONDS:
                groups.append({})
            groups[-1][file] = seconds
        found += [(sum(g.values()), _job(backend, *g)) for g in groups if g]
    return [job for _, job in sorted(found, key=lambda each: -each[0])]


def _test_files(paths: Iterable[str]) -> Iterable[str]:
    """The files of tests that are asked for, or ids of tests."""
    for path in paths:
        folder = ROOT / path
        files = sorted(folder.rglob("test_*.py")) if folder.is_dir() else [folder]
        yield from (file.relative_to(ROOT).as_posix() for file in files)


def seconds_of(source: str) -> float:
    """An estimate by the tests of a file, and what their marks say."""
    slow = sum(map(float, re.findall(r"mark\.slow\(seconds=(\d+)", source)))
    return 1.0 + slow + 0.5 * len(re.findall(r"^ *def test_", source, re.MULTILINE))


def _job(backend: str, first: str, *others: str) -> Job:
    name = first.removeprefix("tests/").removesuffix(".py")
    more = f" and {len(others)} more" if others else ""
    return Job(f"{backend} {name}{more}", backend, (first, *others))


class Processes:
    """Runs jobs; pytest in forks of one process for each backend."""

    def __init__(self, nightly: bool, side_by_side: int) -> None:
        self._nightly = nightly
        self._timeout = float(os.environ.get("KS_TIMEOUT") or (1500, 7200)[nightly])
        # Jobs that run side by side share the cores instead of competing for them.
        self._threads = max(1, (os.cpu_count() or 1) // max(1, side_by_side - 1))
        self._folder = tempfile.TemporaryDirectory(prefix="ks-fork-")
        os.environ[SERVERS] = self._folder.name
        self._lock = threading.Lock()
        self._started: dict[str, tuple[ForkServer, Forker]] = {}

    def close(self) -> None:
        for server, forker in self._started.values():
            forker.close()
            server.close()
        self._folder.cleanup()

    def run(self, job: Job) -> str:
        """Runs the job and returns what went wrong, or an empty string."""
        if not job.backend:
            with job.file("log").open("wb") as log:
                done = subprocess.run(
                    LINT, shell=True, cwd=ROOT, stdout=log, stderr=log, env=_on_path()
                )
            return f"exit code {done.returncode}" if done.returncode else ""
        script = str(ROOT / "tests" / "harness" / "pytest_process.py")
        marks = "not gpu" if self._nightly else "not gpu and not nightly"
        options = [f"--rootdir={ROOT}", f"--junit-xml={job.file('xml')}", "-m", marks]
        options += ["-p", "no:cacheprovider", "--durations=20", *job.files]
        forked = self._forker(job.backend).start(job.file("log"), script, *options)
        try:
            code, _ = forked.wait(self._timeout)
            return f"pytest ended with exit code {code}" if code else ""
        except AssertionError:
            # pytest's faulthandler answers this signal with a traceback of each thread.
            os.kill(forked.pid, signal.SIGABRT)
            with contextlib.suppress(AssertionError):
                forked.wait(10)
            return f"not finished after {self._timeout:g} s (KS_TIMEOUT)"
        finally:
            # The tests' own processes go too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forked.pid, signal.SIGKILL)

    def _forker(self, backend: str) -> Forker:
        with self._lock:
            if backend not in self._started:
                given = environment.of_tests(backend, self._nightly, self._threads)
                log = LOGS / f"{backend}-imports.log"
                server = ForkServer(backend, Path(self._folder.name), given, log)
                self._started[backend] = server, Forker(backend)
            return self._started[backend][1]


def _on_path() -> dict[str, str]:
    """The environment, with the programs of this Python's environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path}
