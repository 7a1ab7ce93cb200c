"""Run every test suite, each in a process of its own, and add up the results.

Keras reads KERAS_BACKEND once per process, so each backend needs its own pytest. It has
several, one for each kind of tests, so that all cores have work to the end. What does
not depend on a backend runs once, as the suite "common".

KS_BACKENDS  backends to test, separated by commas (default: all three)
KS_FAST      1 leaves out the tests marked slow
KS_NIGHTLY   1 adds the tests marked nightly, about 40 minutes for each backend
KS_SUITES    kinds of suites to run, separated by commas, such as field (default: all)
KS_JOBS      suites that run at the same time (default: 2, or 1 on one core)
KS_TIMEOUT   seconds after which a suite is ended (default: 4500)
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".test-logs"
BACKENDS = ("jax", "torch", "tensorflow")
COMMON = (
    "tests/architecture",
    "tests/checkpoints",
    "tests/cli",
    "tests/cluster",
    "tests/packaging",
    # The hooks into Keras are installed in the same way on each backend.
    "tests/test_entry_points.py",
    # Bytes on their way, and processes that meet: no backend has a part in it.
    "tests/parameter_server/test_channels.py",
    "tests/parameter_server/test_server.py",
)
# Each of these is a suite of its own for each backend, and so is what is left.
KINDS = {
    "models": ("tests/model_parallel/test_strategy.py", "tests/test_applications.py"),
    "exactness": ("tests/test_exactness.py",),
    "workers": ("tests/multi_worker",),
    "examples": (
        "tests/test_examples.py",
        "tests/test_notebooks.py",
        "tests/custom_loops/test_examples.py",
        "tests/model_parallel/test_example.py",
    ),
    "servers": ("tests/parameter_server", "tests/test_sidecar.py"),
    "field": ("tests/field",),
}
# What takes a minute or two, the longest first; any other suite takes several.
SHORT = (
    "torch-workers",
    "jax-models",
    "tensorflow-models",
    "torch",
    "torch-exactness",
    "torch-models",
    "tensorflow-field",
    "jax-field",
    "torch-field",
)
# XLA spends most of a test's time on machine code that runs for milliseconds. So it
# generates plain code here; what JAX and XLA make of a program before that, how it is
# cut and which collectives it has, is the same. Only where numbers are compared with
# those of one device, compiled alike: all else is compiled as for people.
PLAIN_KINDS = ("models", "exactness", "workers", "field")
PLAIN_CODE = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_use_fusion_emitters=false",
)


@dataclass(frozen=True)
class Settings:
    backends: tuple[str, ...]
    fast: bool
    nightly: bool
    kinds: tuple[str, ...]
    jobs: int
    timeout: float

    @classmethod
    def from_environment(cls) -> "Settings":
        given = os.environ.get("KS_BACKENDS") or ",".join(BACKENDS)
        backends = tuple(name.strip() for name in given.split(","))
        if unknown := sorted(set(backends) - set(BACKENDS)):
            sys.exit(f"KS_BACKENDS is {given!r}: {unknown} not among {BACKENDS}.")
        chosen = os.environ.get("KS_SUITES") or ""
        kinds = tuple(name.strip() for name in chosen.split(",") if name.strip())
        if unknown := sorted(set(kinds) - set(KINDS)):
            sys.exit(f"KS_SUITES is {chosen!r}: {unknown} not among {tuple(KINDS)}.")
        return cls(
            backends=backends,
            fast=os.environ.get("KS_FAST", "0") not in ("", "0"),
            nightly=os.environ.get("KS_NIGHTLY", "0") not in ("", "0"),
            kinds=kinds,
            jobs=int(os.environ.get("KS_JOBS") or min(2, os.cpu_count() or 1)),
            timeout=float(os.environ.get("KS_TIMEOUT") or 4500),
        )


@dataclass(frozen=True)
class Suite:
    name: str
    backend: str
    paths: tuple[str, ...]
    compiles_plainly: bool = False

    @property
    def log(self) -> Path:
        return LOGS / f"{self.name}.log"

    @property
    def report(self) -> Path:
        return LOGS / f"{self.name}.xml"


@dataclass(frozen=True)
class Result:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    problem: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"

    def __add__(self, other: "Result") -> "Result":
        return Result(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
        )


def suites(settings: Settings) -> list[Suite]:
    """All suites, short ones last, so that no core has to wait long at the end."""
    common = tuple(f"--ignore={path}" for path in COMMON)
    kinds = [path for paths in KINDS.values() for path in paths]
    rest = ("tests", *(f"--ignore={path}" for path in kinds), *common)
    backends = settings.backends
    found = [
        Suite("common", backends[0], COMMON),
        *(Suite(backend, backend, rest) for backend in backends),
        *(
            Suite(f"{backend}-{kind}", backend, (*paths, *common), kind in PLAIN_KINDS)
            for kind, paths in KINDS.items()
            for backend in backends
        ),
    ]
    if settings.kinds:
        ends = tuple(f"-{kind}" for kind in settings.kinds)
        found = [suite for suite in found if suite.name.endswith(ends)]
    turns = {name: turn for turn, name in enumerate(SHORT, start=1)}
    return sorted(found, key=lambda suite: turns.get(suite.name, 0))


def command(suite: Suite, settings: Settings) -> list[str]:
    marks = ["not gpu"]
    marks += ["not slow"] if settings.fast else []
    marks += [] if settings.nightly else ["not nightly"]
    options = [
        "-m",
        " and ".join(marks),
        f"--junit-xml={suite.report}",
        "--durations=20",
    ]
    paths = [path for path in suite.paths if path[0] == "-" or (ROOT / path).exists()]
    return [sys.executable, "-m", "pytest", *options, *paths]


def environment(suite: Suite, settings: Settings) -> dict[str, str]:
    # Suites that run side by side share the cores instead of competing for them.
    threads = max(1, (os.cpu_count() or 1) // settings.jobs)
    flags = [os.environ.get("XLA_FLAGS", "")]
    flags += PLAIN_CODE if suite.compiles_plainly else ()
    path = [str(ROOT / "tests" / "harness" / "lean"), os.environ.get("PYTHONPATH")]
    return {
        "OMP_NUM_THREADS": str(threads),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Many tests train the same model: JAX compiles its programs once for all tests
        # and processes of this run, which takes a third of the time.
        "JAX_COMPILATION_CACHE_DIR": str(LOGS / "jax-programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **os.environ,
        "KERAS_BACKEND": suite.backend,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "XLA_FLAGS": " ".join(flags).strip(),
    }


async def run(suite: Suite, settings: Settings, slots: asyncio.Semaphore) -> Result:
    async with slots:
        print(f"{suite.name}: started, log in {suite.log.relative_to(ROOT)}")
        start = time.monotonic()
        problem = await run_pytest(suite, settings)
        result = read_report(suite.report, problem)
        seconds = time.monotonic() - start
    print(f"{suite.name}: {result} in {seconds:.0f} s")
    if result.failed:
        print_log(suite, result)
    return result


async def run_pytest(suite: Suite, settings: Settings) -> str:
    """Run the suite and return what went wrong, or an empty string."""
    with suite.log.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command(suite, settings),
            cwd=ROOT,
            env=environment(suite, settings),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code = await asyncio.wait_for(process.wait(), settings.timeout)
        return f"pytest ended with exit code {code}" if code else ""
    except TimeoutError:
        # pytest's faulthandler answers this signal with a traceback of each thread.
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 10)
        return f"not finished after {settings.timeout:g} s (KS_TIMEOUT)"
    finally:
        # The tests' own processes go too, also when this run is interrupted.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def read_report(report: Path, problem: str) -> Result:
    """Count a suite's tests; a suite that broke off counts as one failure."""
    if not report.exists():
        return Result(failed=1, problem=problem or "pytest wrote no report")
    tests = failed = skipped = 0
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        tests += int(suite.get("tests", 0))
        failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        skipped += int(suite.get("skipped", 0))
    passed = tests - failed - skipped
    if problem and not failed:
        failed = 1
    return Result(passed, failed, skipped, problem)


def print_log(suite: Suite, result: Result) -> None:
    print(f"---- log of {suite.name} ----")
    print(suite.log.read_text(errors="replace").rstrip())
    print(f"---- end of {suite.name}: {result.problem} ----")


async def main() -> int:
    settings = Settings.from_environment()
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir()
    slots = asyncio.Semaphore(settings.jobs)
    results = await asyncio.gather(
        *(run(suite, settings, slots) for suite in suites(settings))
    )
    total = sum(results, Result())
    print(total)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    sys.exit(asyncio.run(main()))
