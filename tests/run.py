"""Run the tests of all backends on all cores, and add up the results.

    python tests/run.py                     # every test of `make test`
    python tests/run.py tests/input ...     # only these files or folders
    python tests/run.py --lint              # style and types, too
    python tests/run.py --check             # the quickest test of each subject
    python tests/run.py --nightly           # the tests marked nightly, too
    python tests/run.py --record            # note how long each file takes

Keras reads KERAS_BACKEND once per process, so each backend has its own pytest. The
files of tests are grouped into jobs of at least 45 seconds, by the durations in
`durations.json`, and the longest job comes first, so that all cores have work to the
end. A job's process is forked from one that has imported its framework already. Files
of tests that do not depend on a backend run once.

KS_BACKENDS  backends to test, separated by commas (default: all three)
KS_JOBS      jobs that run at the same time (default: one for each core, at most two,
             and one more, because tests of several processes often wait)
KS_TIMEOUT   seconds after which a job is ended (default: 1500, nightly 7200)
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.fork_server import PLAIN_GRAPHS, PROCESSES, SERVERS, ForkServer
from harness.forker import Forked, Forker

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".test-logs"
DURATIONS = ROOT / "tests" / "durations.json"
BACKENDS = ("jax", "torch", "tensorflow")
# What does not depend on a backend, or starts processes on each, runs once, on the
# first backend: JAX is the quickest to import.
ONCE = (
    "tests/architecture",
    "tests/checkpoints",
    "tests/processes",
    "tests/cluster",
    "tests/input/test_options.py",
    "tests/input/test_prefetch.py",
    "tests/input/test_workers.py",
    "tests/model_parallel/test_layouts.py",
    "tests/packaging",
    "tests/tools",
    "tests/test_exported_members.py",
    "tests/test_numpy_engine.py",
    "tests/test_replica_set.py",
    # The hooks into Keras are installed in the same way on each backend.
    "tests/test_entry_points.py",
    # Code of the pages; what strategies compute on each backend is tested elsewhere.
    "tests/test_pages.py",
    # Bytes on their way, and processes that meet: no backend has a part in it.
    "tests/parameter_server/test_local_cluster.py",
    "tests/parameter_server/test_server.py",
)
# XLA spends most of a test's time on machine code that runs for milliseconds. So it
# generates plain code here; what JAX and XLA make of a program before that, how it is
# cut and which collectives it has, is the same. At night it compiles as for users.
PLAIN_CODE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_use_fusion_emitters=false",
)
# The quickest tests that pass through most of the library: `make check`.
CHECK = (
    "tests/architecture/test_layers.py",
    "tests/test_contexts.py",
    "tests/test_values.py",
    "tests/test_exactness.py::test_same_as_one_device[size_3-mirrored_2]",
    "tests/test_collectives.py::test_reduce_along_an_axis_has_the_true_denominator",
    *(
        f"tests/custom_loops/{name}"
        for name in (
            "test_training.py::"
            "test_the_portable_loop_equals_one_device[mirrored_2-35-16-True]",
            "test_run.py::test_run_reduce_and_gather_inside_a_function",
            "test_run.py::test_random_layers_draw_a_mask_of_each_replicas_own",
            "test_run.py::test_on_read_variables_are_brought_together_when_read",
            "test_run.py::test_an_exception_in_one_replica_reaches_the_caller",
            "test_optimizers.py::test_gradients_are_summed_before_they_are_clipped",
        )
    ),
    *(
        f"tests/input/test_datasets.py::{name}"
        for name in (
            "test_the_last_batch_is_smaller_and_nothing_is_dropped",
            "test_a_function_is_called_once_and_its_batches_are_not_split",
            "test_what_is_no_dataset",
        )
    ),
    "tests/test_model_integration.py::"
    "test_a_saved_model_opens_with_and_without_a_strategy[mirrored_2]",
)

GROUP_SECONDS = 45.0
# Of a file that no run has recorded.
UNKNOWN_SECONDS = 20.0
_TICK = 0.05

LINT = {
    "ruff check": ("ruff", "check", "."),
    "ruff format": ("ruff", "format", "--check", "."),
    "mypy": ("mypy",),
}


@dataclass(frozen=True)
class Settings:
    """What is run, and how."""

    paths: tuple[str, ...]
    lint: bool
    check: bool
    nightly: bool
    record: bool
    backends: tuple[str, ...]
    jobs: int
    timeout: float

    @classmethod
    def from_command_line(cls) -> Settings:
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("paths", nargs="*")
        for option in ("lint", "check", "nightly", "record"):
            parser.add_argument(f"--{option}", action="store_true")
        given = parser.parse_args()
        for path in given.paths:
            if not (ROOT / path.partition("::")[0]).exists():
                parser.error(f"there is no {path!r} below {ROOT}")
        chosen = os.environ.get("KS_BACKENDS") or ",".join(BACKENDS)
        backends = tuple(name.strip() for name in chosen.split(","))
        if unknown := sorted(set(backends) - set(BACKENDS)):
            parser.error(f"KS_BACKENDS is {chosen!r}: {unknown} not among {BACKENDS}")
        return cls(
            paths=tuple(given.paths) or (CHECK if given.check else ()),
            lint=given.lint,
            check=given.check,
            nightly=given.nightly,
            record=given.record,
            backends=backends,
            jobs=int(os.environ.get("KS_JOBS") or 1 + min(2, os.cpu_count() or 1)),
            timeout=float(
                os.environ.get("KS_TIMEOUT") or (7200 if given.nightly else 1500)
            ),
        )


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


# --- Jobs ---------------------------------------------------------------------


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


# --- Processes ----------------------------------------------------------------


def environment(backend: str, settings: Settings) -> dict[str, str]:
    # Jobs that run side by side share the cores instead of competing for them.
    threads = max(1, (os.cpu_count() or 1) // max(1, settings.jobs - 1))
    flags = [os.environ.get("XLA_FLAGS", "")]
    flags += () if settings.nightly else PLAIN_CODE
    path = [str(ROOT / "tests"), str(ROOT / "tests" / "harness" / "lean")]
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {
        "OMP_NUM_THREADS": str(threads),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Many tests train the same model: JAX compiles its programs once for all tests
        # and processes of this run, which takes a third of the time.
        "JAX_COMPILATION_CACHE_DIR": str(LOGS / "jax-programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Otherwise each operation of a program carries ten lines of Python.
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "1",
        **os.environ,
        # Like XLA's plain code.
        PLAIN_GRAPHS: "" if settings.nightly else "1",
        PROCESSES: str(LOGS / "processes.txt"),
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join(path),
        "XLA_FLAGS": " ".join(flags).strip(),
    }


def pytest_arguments(job: Job, settings: Settings) -> list[str]:
    marks = "not gpu" if settings.nightly else "not gpu and not nightly"
    options = [f"--rootdir={ROOT}", f"--junit-xml={job.file('xml')}", "-m", marks]
    options += ["-p", "no:cacheprovider", "--durations=20"]
    return [*options, *job.arguments]


class Processes:
    """Starts jobs; pytest in forks of one process for each backend.

    Args:
        settings: what is run.
        folder: Path of the folder for the sockets of these processes, which tests
            use, too.
    """

    def __init__(self, settings: Settings, folder: Path):
        self._settings = settings
        self._folder = folder
        self._servers: list[ForkServer] = []
        self._forkers: dict[tuple[str, bool], Forker] = {}

    def start_servers(self, backends: Iterable[str]) -> None:
        os.environ[SERVERS] = str(self._folder)
        for backend in backends:
            given = environment(backend, self._settings)
            errors = LOGS / f"{backend}-imports.log"
            self._servers.append(ForkServer(backend, self._folder, given, errors))
            for strategies in (False, True):
                self._forkers[backend, strategies] = Forker(backend, strategies)

    async def run(self, job: Job) -> str:
        """Runs the job and returns what went wrong, or an empty string."""
        if not job.is_command:
            return await self._pytest(job)
        return await (self._script(job) if job.backend else self._command(job))

    async def _command(self, job: Job) -> str:
        with job.file("log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *job.arguments,
                cwd=ROOT,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
            )
        try:
            code = await process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return f"it ended with exit code {code}" if code else ""

    async def _script(self, job: Job) -> str:
        forked = await self._fork(job, job.arguments)
        code = await end_of(forked, self._settings.timeout)
        if code is None:
            forked.kill()
            return f"not finished after {self._settings.timeout:g} s (KS_TIMEOUT)"
        return f"it ended with exit code {code}" if code else ""

    async def _fork(self, job: Job, arguments: Iterable[str]) -> Forked:
        forker = self._forkers[job.backend, not job.is_command]
        # It waits until the server has imported everything.
        return await asyncio.to_thread(forker.start, job.file("log"), *arguments)

    async def _pytest(self, job: Job) -> str:
        script = str(ROOT / "tests" / "harness" / "pytest_process.py")
        arguments = [script, *pytest_arguments(job, self._settings)]
        forked = await self._fork(job, arguments)
        try:
            code = await end_of(forked, self._settings.timeout)
            if code is not None:
                return f"pytest ended with exit code {code}" if code else ""
            # pytest's faulthandler answers this signal with a traceback of each thread.
            os.kill(forked.pid, signal.SIGABRT)
            await end_of(forked, 10)
            return f"not finished after {self._settings.timeout:g} s (KS_TIMEOUT)"
        finally:
            # The tests' own processes go too, also when this run is interrupted.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forked.pid, signal.SIGKILL)

    def close(self) -> None:
        for forker in self._forkers.values():
            forker.close()
        for server in self._servers:
            server.close()


async def end_of(forked: Forked, seconds: float) -> int | None:
    """The exit code; None if the process has not ended in time."""
    until = time.monotonic() + seconds
    while (end := forked.ended()) is None:
        if time.monotonic() > until:
            return None
        await asyncio.sleep(_TICK)
    return end[0]


# --- Results ------------------------------------------------------------------


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
        file = case.get("classname", "").replace(".", "/") + ".py"
        yield file, case.get("name", ""), float(case.get("time", 0))


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
    print(processes())
    print(
        f"Cores were idle for {idle:.0f} s; the slowest tests: .test-logs/slowest.txt"
    )
    if settings.record:
        known = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
        # Next to nothing is noted as one second: the process has to start.
        known |= {file: max(1, round(seconds)) for file, seconds in files.items()}
        DURATIONS.write_text(json.dumps(dict(sorted(known.items())), indent=0) + "\n")


def processes() -> str:
    """How many processes there were; importing a framework takes most of their time."""
    noted: dict[str, set[str]] = {}
    file = LOGS / "processes.txt"
    for line in file.read_text().splitlines() if file.exists() else ():
        number, what = line.split()
        noted.setdefault(what, set()).add(number)
    started, forked = noted.pop("started", set()), noted.pop("forked", set())
    importing = set().union(*noted.values())
    return (
        f"Processes: {len(started)} interpreters and {len(forked)} forks; "
        f"{len(importing)} imported a framework"
    )


def print_totals(results: dict[Job, Result]) -> None:
    """A line for style and types, and one for each backend."""
    totals: dict[str, Result] = {}
    for job, result in results.items():
        kind = job.backend or "style and types"
        totals[kind] = totals.get(kind, Result()) + result
    for kind, result in totals.items():
        print(f"{kind}: {result}, {result.seconds:.0f} s of a core")


# --- The run ------------------------------------------------------------------


async def work(jobs: list[Job], run: Callable, results: dict[Job, Result]) -> float:
    """Takes jobs from the front until none is left; returns when it ended."""
    while jobs:
        job = next_job(jobs, {done.name for done in results})
        if job is None:
            await asyncio.sleep(_TICK)
            continue
        start = time.monotonic()
        problem = await run(job)
        result = result_of(job, problem, time.monotonic() - start)
        results[job] = result
        print(f"{job.name}: {result} in {result.seconds:.0f} s")
        if result.failed:
            print_log(job, result)
    return time.monotonic()


def next_job(jobs: list[Job], done: set[str]) -> Job | None:
    """Removes and returns the first job that need not wait."""
    for index, job in enumerate(jobs):
        if not job.after or job.after in done:
            return jobs.pop(index)
    return None


async def main() -> int:
    settings = Settings.from_command_line()
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir()
    start = time.monotonic()
    jobs = all_jobs(settings)
    used = {job.backend for job in jobs if not job.is_command}
    results: dict[Job, Result] = {}
    sockets = tempfile.TemporaryDirectory(prefix="ks-fork-")
    processes = Processes(settings, Path(sockets.name))
    try:
        processes.start_servers(name for name in settings.backends if name in used)
        ends = await asyncio.gather(
            *(work(jobs, processes.run, results) for _ in range(settings.jobs))
        )
    finally:
        processes.close()
        sockets.cleanup()
    total = sum(results.values(), Result())
    summarize(results, settings, sum(max(ends) - end for end in ends))
    print(f"{time.monotonic() - start:.0f} s in all")
    print(total)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(asyncio.run(main()))
