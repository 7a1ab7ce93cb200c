"""The environment of the processes of tests, in which frameworks compile plain code."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from harness.fork_server import PLAIN_GRAPHS

TESTS = Path(__file__).resolve().parents[1]
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


def of_tests(backend: str, is_nightly: bool, threads: int) -> dict[str, str]:
    """The environment variables of a process, with so many threads in each pool.

    At night programs are compiled as for users.
    """
    flags = [os.environ.get("XLA_FLAGS", "")]
    flags += () if is_nightly else PLAIN_CODE
    path = filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])
    return {
        "OMP_NUM_THREADS": str(threads),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Many tests train the same model: JAX compiles its programs once for all tests
        # and processes of a run, which takes a third of the time.
        "JAX_COMPILATION_CACHE_DIR": str(TESTS.parent / ".test-logs" / "jax-programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Otherwise each operation of a program carries ten lines of Python.
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "1",
        **os.environ,
        # Like XLA's plain code.
        PLAIN_GRAPHS: "" if is_nightly else "1",
        "KERAS_BACKEND": backend,
        "PYTHONPATH": os.pathsep.join(path),
        "XLA_FLAGS": " ".join(flags).strip(),
    }
