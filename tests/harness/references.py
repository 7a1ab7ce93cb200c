"""What Keras computes on one device: made once, in a process of its own, and kept.

A reference is what a case gives without a strategy. It is trained in a process that
imports of the library only what starts processes, which uses neither Keras nor a
framework, so that nothing of the library has a part in it. The reference is kept in a
file that all suites and later runs read. The folder's name contains a hash of
everything that a result depends on: the sources of the cases, the versions of Keras and
of the framework, and the options of their compilers and graphs.

A test gets references by `harness.training.alone`. One that is missing is trained then,
in a process that is started once per session. All of them beforehand:

    KERAS_BACKEND=jax python -m harness.references   # with tests/ on PYTHONPATH
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import keras

from harness import by_day
from harness.case import Case, Results, train, without_phantom_step
from harness.fork_server import PLAIN_GRAPHS
from keras_strategies.processes.process_group import ProcessGroup

TESTS = Path(__file__).resolve().parent.parent
FOLDER = TESTS.parent / ".test-references"
BACKEND = keras.backend.backend()

# Modules of cases that `make test` trains; each has a list CASES.
MODULES = ["exactness.cases", "multi_worker.worker_cases"]
if BACKEND in ("jax", "torch"):
    MODULES += ["model_parallel.model_parallel_cases"]
# What starts processes, without Keras and a framework, which processes of tests import.
_OF_PROCESSES = {
    "keras_strategies.processes",
    "keras_strategies.processes.orphan_guard",
    "keras_strategies.processes.process_group",
}
# What results depend on besides the module of the case.
_SOURCES = (
    "harness.case",
    "exactness.cases",  # Other modules of cases import its losses, metrics and scripts.
    "exactness.custom_steps",
    "harness.data",
    "harness.models",
    "harness.references",  # Whether they are trained by a program.
    "harness.tensorflow_graphs",
)
_PACKAGES = {
    "jax": ("jax", "jaxlib"),
    "torch": ("torch",),
    "tensorflow": ("tensorflow", "tensorflow-cpu"),
}
_VARIABLES = (
    "XLA_FLAGS",
    "TF_XLA_FLAGS",
    "TF_ENABLE_ONEDNN_OPTS",
    "JAX_ENABLE_X64",
    PLAIN_GRAPHS,
)


def load(case: Case) -> Results:
    """The case's reference, trained now if no process has done so yet."""
    name = case.reference or case.name
    file = _made(case.module, name, lambda file: _process().train(case, name, file))
    return _read(file)


@functools.cache
def _read(file: Path) -> Results:
    with file.open("rb") as stream:
        found: Results = pickle.load(stream)
    return found


def _made(module: str, name: str, make: Callable[[Path], None]) -> Path:
    """The file of a reference; `make` writes it where no process has yet."""
    file = _folder(module) / f"{name}.pickle"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.with_suffix(".lock"), "w") as lock:
            # Of two processes that need the same reference, one waits.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                make(file)
    return file


@functools.cache
def _folder(module: str) -> Path:
    found = hashlib.sha256()
    for name in sorted({*_SOURCES, module}):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, name
        found.update(Path(spec.origin).read_bytes())
    described = {
        "keras": keras.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "config": [keras.config.floatx(), keras.config.image_data_format()],
        "packages": {name: _version(name) for name in _PACKAGES.get(BACKEND, ())},
        "variables": {name: os.environ.get(name, "") for name in _VARIABLES},
    }
    found.update(json.dumps(described, sort_keys=True).encode())
    return FOLDER / f"{BACKEND}-{module.split('.')[-1]}-{found.hexdigest()[:16]}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _train(module: str, name: str, file: Path) -> None:
    """Trains a case in this process, and writes what came out."""
    cases = {case.name: case for case in importlib.import_module(module).CASES}
    case = cases[name]
    with _without_programs(case):
        results = without_phantom_step(case, train(case))
    found = {each for each in sys.modules if each.startswith("keras_strategies.")}
    assert found <= _OF_PROCESSES, f"the reference is to be Keras's own: {found}"
    part = file.with_suffix(f".{os.getpid()}")
    part.write_bytes(pickle.dumps(results))
    part.rename(file)


@contextlib.contextmanager
def _without_programs(case: Case) -> Iterator[None]:
    """TensorFlow runs operation by operation, which takes two thirds of the time.

    The operations are those of Keras's programs. JAX would compile each alone. The
    losses of several outputs are logged as means over rows only where Keras knows the
    number of rows, which it does not in a program.
    """
    if BACKEND != "tensorflow" or isinstance(case.loss(), dict):
        yield
        return
    import tensorflow as tf

    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(False)


# --- The process that trains what is missing -----------------------------------


class Trainer:
    """A process that trains one case after the other, with Keras alone."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = ProcessGroup(
            [sys.executable, "-m", "harness.references", "--serve"],
            {**os.environ, "PYTHONPATH": _python_path(), "KERAS_BACKEND": BACKEND},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            is_text=True,
        )
        self.pid = self._process.pid

    def train(self, case: Case, name: str, file: Path) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([case.module, name, str(file)]) + "\n")
        answer = self._process.stdout.readline()
        if not answer:
            self._log.seek(0)
            raise AssertionError(
                f"The process that trains references ended, with {case.name!r}:\n"
                f"{self._log.read()[-3000:]}"
            )
        if problem := json.loads(answer):
            raise AssertionError(f"Without a strategy {name!r} failed:\n{problem}")

    def close(self) -> None:
        self._process.close(60)
        self._log.close()


# By process, because a fork inherits it and has to start one of its own.
_trainers: dict[int, Trainer] = {}


def _process() -> Trainer:
    if os.getpid() not in _trainers:
        _trainers[os.getpid()] = Trainer()
    return _trainers[os.getpid()]


def trainer_pids() -> set[int]:
    """The processes that this one has started to train references."""
    return {trainer.pid for pid, trainer in _trainers.items() if pid == os.getpid()}


def close() -> None:
    """Ends this process's trainer, if there is one."""
    if trainer := _trainers.pop(os.getpid(), None):
        trainer.close()


def _python_path() -> str:
    given = [path for path in sys.path if path and path != str(TESTS)]
    return os.pathsep.join([str(TESTS), *given])


def _serve(orders: TextIO, answers: TextIO) -> None:
    for line in orders:
        module, name, file = json.loads(line)
        problem = ""
        try:
            _train(module, name, Path(file))
        except Exception:
            problem = traceback.format_exc()
        print(json.dumps(problem), file=answers, flush=True)


@contextlib.contextmanager
def _answers() -> Iterator[TextIO]:
    """Standard output for answers only: what else is printed goes to the log."""
    with os.fdopen(os.dup(1), "w") as stream:
        os.dup2(2, 1)
        yield stream


def _train_all() -> None:
    """Trains what `make test` needs; what another process trains is waited for."""
    is_day = bool(os.environ.get(PLAIN_GRAPHS))
    for module in MODULES:
        for case in importlib.import_module(module).CASES:
            if case.nightly or case.reference or BACKEND in case.refused_by:
                continue
            if is_day and not by_day.needs_case(BACKEND, case.name):
                continue
            _made(module, case.name, functools.partial(_train, module, case.name))


if __name__ == "__main__":
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # As in the processes of tests.
    if os.environ.get(PLAIN_GRAPHS) and BACKEND == "tensorflow":
        # A process that was not forked from one where this is so.
        importlib.import_module("harness.tensorflow_graphs").set_optimized(False)
    if "--serve" in sys.argv:
        with _answers() as stream:
            _serve(sys.stdin, stream)
    else:
        _train_all()
