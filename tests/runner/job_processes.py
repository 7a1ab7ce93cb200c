"""Processes of jobs, most of them forks of one process for each backend."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from harness.fork_server import PLAIN_GRAPHS, SERVERS, ForkServer
from harness.forker import Forked, Forker
from runner.jobs import Job
from runner.settings import LOGS, ROOT, Settings

# XLA spends most of a test's time on machine code that runs for milliseconds. So it
# generates plain code here; what JAX and XLA make of a program before that, how it is
# cut and which collectives it has, is the same. At night it compiles as for users.
PLAIN_CODE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# XLA of later releases ends a process that sets it.
if importlib.metadata.version("jax").startswith("0.10."):
    PLAIN_CODE += ("--xla_cpu_use_fusion_emitters=false",)

#: Seconds between two looks at processes and jobs.
TICK = 0.05


def environment(backend: str, settings: Settings) -> dict[str, str]:
    # Jobs that run side by side share the cores instead of competing for them.
    threads = max(1, (os.cpu_count() or 1) // max(1, settings.jobs - 1))
    flags = [os.environ.get("XLA_FLAGS", "")]
    flags += () if settings.nightly else PLAIN_CODE
    path = filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")])
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
        await asyncio.sleep(TICK)
    return end[0]
