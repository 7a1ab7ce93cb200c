"""Jobs of a run: groups of files with tests, and commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from runner.settings import BACKENDS, DURATIONS, LOGS, ROOT, Settings

# What does not depend on a backend, or starts processes on each, runs once, on the
# first backend: JAX is the quickest to import.
ONCE = (
    "tests/architecture",
    "tests/checkpoints",
    "tests/processes",
    "tests/runner",
    "tests/cluster",
    "tests/input/test_options.py",
    "tests/input/test_prefetch.py",
    "tests/input/test_workers.py",
    "tests/model_parallel/test_layouts.py",
    # Sockets, and policies of Linux for threads.
    "tests/backends/test_engine_sockets.py",
    "tests/backends/test_thread_scheduling.py",
    "tests/packaging",
    "tests/tools",
    "tests/test_errors.py",
    "tests/test_exported_members.py",
    "tests/backends/test_numpy_engine.py",
    "tests/runtime/test_replica_set.py",
    # The hooks into Keras are installed in the same way on each backend.
    "tests/strategies/test_entry_points.py",
    # Code of the pages; what strategies compute on each backend is tested elsewhere.
    "tests/pages/test_pages.py",
    # Bytes on their way, and processes that meet: no backend has a part in it.
    "tests/parameter_server/test_local_cluster.py",
    "tests/parameter_server/test_server.py",
    "tests/parameter_server/test_server_addresses.py",
    "tests/ray_engine/test_smoke.py",
)

GROUP_SECONDS = 45.0
# Of a file that no run has recorded.
UNKNOWN_SECONDS = 20.0

LINT = {
    "ruff check": ("ruff", "check", "."),
    "ruff format": ("ruff", "format", "--check", "."),
    "mypy": ("mypy",),
}


@dataclass(frozen=True)
class Job:
    """Files that one pytest runs, or a command.

    Args:
        name: what the report calls it.
        backend: the KERAS_BACKEND of the process; empty for any.
        arguments: what pytest gets, or the command; with a backend, a script that uses
            Keras alone.
        seconds: how long it is expected to take.
        is_command: bool, whether it is a command.
        after: name of a job that has to end before.
    """

    name: str
    backend: str
    arguments: tuple[str, ...]
    seconds: float
    is_command: bool = False
    after: str = ""

    def file(self, ending: str) -> Path:
        return LOGS / f"{self.name.replace('/', '.').replace(' ', '-')}.{ending}"


def test_files(settings: Settings) -> list[str]:
    """The files of tests that are asked for, or ids of tests, by path."""
    found = []
    for given in settings.paths or ("tests",):
        path = ROOT / given
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        found += [file.relative_to(ROOT).as_posix() for file in files]
    return found


def runs_once(file: str) -> bool:
    return file.partition("::")[0].startswith(ONCE)


def is_of_another(file: str, backend: str) -> bool:
    """Whether these are tests of one backend that is not this one."""
    others = [name for name in BACKENDS if name != backend]
    return any(file.startswith(f"tests/backends/{name}/") for name in others)


def lint_jobs() -> list[Job]:
    folder = Path(sys.executable).parent
    return [
        Job(name, "", (str(folder / command[0]), *command[1:]), 0.0, is_command=True)
        for name, command in LINT.items()
    ]


def reference_jobs(settings: Settings) -> list[Job]:
    """The trainings on one device that tests compare with, which would otherwise be
    made on demand, by a process of each job."""
    script = str(ROOT / "tests" / "harness" / "references.py")
    # TensorFlow's take longest.
    return [
        Job(f"{backend} references", backend, (script,), 0.0, is_command=True)
        for backend in sorted(settings.backends, key="tensorflow jax torch".index)
    ]


def test_jobs(settings: Settings) -> list[Job]:
    """The files of each backend in groups, longest first."""
    known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    files = test_files(settings)
    jobs = []
    for backend in settings.backends:
        first = backend == settings.backends[0]
        own = [
            file
            for file in files
            if (first or not runs_once(file)) and not is_of_another(file, backend)
        ]
        if settings.check:
            jobs.append(Job(f"{backend} check", backend, tuple(own), UNKNOWN_SECONDS))
            continue
        times = {
            file: float(known.get(f"{backend} {file}", UNKNOWN_SECONDS)) for file in own
        }
        jobs += groups(backend, times)
    return sorted(jobs, key=lambda job: -job.seconds)


def groups(backend: str, times: dict[str, float]) -> Iterable[Job]:
    """Neighbouring files, so many that a job pays for the start of its process."""
    group: list[str] = []
    for file, seconds in times.items():
        if seconds >= GROUP_SECONDS:
            yield job_of(backend, [file], seconds)
            continue
        group.append(file)
        total = sum(times[name] for name in group)
        if total >= GROUP_SECONDS:
            yield job_of(backend, group, total)
            group = []
    if group:
        yield job_of(backend, group, sum(times[name] for name in group))


def job_of(backend: str, files: list[str], seconds: float) -> Job:
    name = files[0].removeprefix("tests/").removesuffix(".py")
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return Job(f"{backend} {name}{more}", backend, tuple(files), seconds)


def all_jobs(settings: Settings) -> list[Job]:
    """In the order in which they begin."""
    lint = lint_jobs() if settings.lint else []
    tests = test_jobs(settings)
    if settings.paths:
        return [*lint, *tests]
    tests = [replace(job, after=f"{job.backend} references") for job in tests]
    # One after the other, so that tests begin soon.
    first, *others = reference_jobs(settings)
    return [first, *lint, *others, *tests]
