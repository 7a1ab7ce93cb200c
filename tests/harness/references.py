"""What Keras computes on one device: made once, in a process of its own, and kept.

A reference is what a case gives without a strategy. It is trained in a process that
imports of the library only what starts processes, which uses neither Keras nor a
framework, so that nothing of the library has a part in it. The reference is kept in a
file that all suites and later runs read. The folder's name contains a hash of
everything that a result depends on: the sources of the cases, the versions of Keras and
of the framework, and the options of their compilers and graphs.

A test gets references by `harness.training.alone`. One that is missing is trained then,
by this file as a script, in a fork of a process that has imported Keras.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import pickle
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import keras

from harness.case import Case, Results, train, without_phantom_step
from harness.fork_server import PLAIN_GRAPHS
from harness.forker import Forker

TESTS = Path(__file__).resolve().parent.parent
FOLDER = TESTS.parent / ".test-references"
BACKEND = keras.backend.backend()

# That a training on one device may take.
_SECONDS = 300.0
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
    return _read(_made(case.module, name))


@functools.cache
def _read(file: Path) -> Results:
    with file.open("rb") as stream:
        found: Results = pickle.load(stream)
    return found


def _made(module: str, name: str) -> Path:
    """The file of a reference, which is trained if no process has done so yet."""
    file = _folder(module) / f"{name}.pickle"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file.with_suffix(".lock"), "w") as lock:
            # Of two processes that need the same reference, one waits.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                _train_in_a_fork(module, name, file)
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


def _train_in_a_fork(module: str, name: str, file: Path) -> None:
    log = file.with_suffix(".log")
    with Forker(imports_strategies=False) as forker:
        script = forker.start(log, __file__, module, name, str(file))
        code, _ = script.wait(_SECONDS)
    if code:
        raise AssertionError(f"Without a strategy {name!r} failed:\n{script.text()}")


if __name__ == "__main__":
    module, name, file = sys.argv[1:]
    _train(module, name, Path(file))
