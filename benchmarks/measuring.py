"""Measurements of contestants in turn, their processes, options and results."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PICTURES = Path(__file__).parents[1] / "docs" / "img"
BACKENDS = ("jax", "torch", "tensorflow")
# Each runs an epoch and returns the milliseconds that a step took.
Contestants = dict[str, Callable[[], float]]
# A number for each round.
Rounds = list[float]


def measure(contestants: Contestants, rounds: int) -> dict[str, Rounds]:
    """The numbers of each, in rounds in which they take turns.

    What the machine does besides falls on all of them. The first epoch of each, which
    compiles, does not count.
    """
    for run in contestants.values():
        run()
    times: dict[str, Rounds] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, run in contestants.items():
            times[name].append(round(run(), 4))
    for run in contestants.values():
        if hasattr(run, "close"):
            run.close()
    return times


def numbers_of(script: str, arguments: Sequence[str], backend: str = "") -> Any:
    """What a script prints in its last line, as JSON, in a process of its own.

    Args:
        script: the path of the script.
        arguments: its arguments.
        backend: the KERAS_BACKEND of the process; empty for that of this one.
    """
    chosen = {"KERAS_BACKEND": backend} if backend else {}
    output = subprocess.run(
        [sys.executable, script, *arguments],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        env={**os.environ, **chosen},
    ).stdout
    return json.loads(output.splitlines()[-1])


def medians(found: Mapping[str, Rounds]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


def ratio(one: Rounds, other: Rounds) -> str:
    """How two compare that took turns: the median of the rounds' ratios, and the range.

    Args:
        one: a number for each round.
        other: those that they are divided by.
    """
    ratios = [first / second for first, second in zip(one, other, strict=True)]
    middle = f"{statistics.median(ratios):.2f}"
    if len(ratios) == 1:
        return middle
    return f"{middle} ({min(ratios):.2f} to {max(ratios):.2f})"


def epoch_timer() -> Any:
    """A callback with the `seconds` of the last epoch of `fit`."""
    import keras

    class Timer(keras.callbacks.Callback):
        seconds = 0.0

        def on_epoch_begin(self, epoch, logs=None):
            self.start = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds = time.perf_counter() - self.start

    return Timer()


def use_cores(backend: str, cores: int, devices: int | None = None) -> None:
    """Lets this process use so many cores, shared by its virtual CPU devices.

    Args:
        backend: str.
        cores: int.
        devices: int; by default each device has a core.
    """
    devices = devices or cores
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cores]))
    if backend == "tensorflow":
        import tensorflow as tf

        # The cores of each replica's kernels.
        tf.config.threading.set_intra_op_parallelism_threads(cores // devices)
        tf.config.threading.set_inter_op_parallelism_threads(cores)
    if backend == "torch":
        import torch

        torch.set_num_threads(cores)
    import keras_strategies as ks

    ks.set_virtual_cpu_devices(devices)


def options_parser(
    description: str,
    backends: Iterable[str] = (),
    models: Iterable[str] = (),
    has_workers: bool = False,
) -> argparse.ArgumentParser:
    """The options of a benchmark: what it measures, how often, and its files.

    Args:
        description: its first line is that of the help.
        backends: the default of `--backends`; without any there is no such option.
        models: the default of `--models`, likewise.
        has_workers: whether `run_worker` runs the script.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    if backends:
        parser.add_argument("--backends", type=names, default=list(backends))
    if models:
        parser.add_argument("--models", type=names, default=list(models))
    if has_workers:
        parser.add_argument("--worker", help=argparse.SUPPRESS)
        parser.add_argument("--cores", type=int, help=argparse.SUPPRESS)
        parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
        parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--quick", dest="rounds", action="store_const", const=1, help="one round each"
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser


def names(text: str) -> list[str]:
    """The parts of an option that is a list."""
    return text.split(",")


def run_script(
    script: str | Path,
    *arguments: str,
    backend: str,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> Any:
    """Runs a script in a process of its own; the JSON that it prints at its end."""
    process = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout,
        check=True,
    )
    return json.loads(process.stdout.splitlines()[-1])


def run_worker(
    script: str,
    backend: str,
    cores: int,
    name: str,
    rounds: int,
    devices: int | None = None,
) -> dict[str, Rounds]:
    """Runs a script as `script --worker backend ...`, which prints JSON at its end."""
    arguments = ["--worker", backend, "--cores", str(cores), "--model", name]
    if devices is not None:
        arguments += ["--devices", str(devices)]
    # Idle threads of one contestant are not to spin while another is measured.
    passive = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    arguments += ["--rounds", str(rounds)]
    found: dict[str, Rounds] = run_script(
        script,
        *arguments,
        backend=backend,
        environment={**passive, **allocator(backend)},
    )
    return found


def allocator(backend: str) -> dict[str, str]:
    """Environment variables with which Torch keeps the memory of a step for the next.

    On accelerators it has an allocator that does. On CPUs glibc's returns large arrays
    to the system, and what is measured is how fast that clears pages: a third of a step
    with large outputs, and whether a step meets it depends on the order in which its
    arrays are freed. Of arenas other than the first, which threads have, it always
    returns arrays above 64 MB.
    """
    if backend != "torch":
        return {}
    from keras_strategies.cluster.environment import KEPT_MEMORY

    return {**KEPT_MEMORY, "MALLOC_ARENA_MAX": "1"}


class Results:
    """The results of a benchmark by their parts, and the conditions of each part.

    Args:
        path: the JSON file; what it has already stays until it is measured again.
    """

    def __init__(self, path: Path):
        self.path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        self.values: dict[str, Any] = known.get("results", {})
        #: What `conditions` returned.
        self.measured: dict[str, dict[str, Any]] = known.get("measured", {})

    def conditions_of(self, *parts: str) -> dict[str, dict[str, Any]]:
        """Conditions of parts, by default of all."""
        return {part: self.measured[part] for part in parts or self.values}

    def put(self, part: str, value: Any, **more: str) -> None:
        """Adds what has just been measured, and writes the file.

        Args:
            part: str, its name.
            value: the results.
            more: conditions besides those of `conditions`, such as the GPU.
        """
        self.values[part] = value
        self.measured[part] = {**conditions(), **more}
        self.path.parent.mkdir(exist_ok=True)
        text = {"measured": self.measured, "results": self.values}
        self.path.write_text(json.dumps(text, indent=2) + "\n")


def by_backend(results: dict[str, Any]) -> dict[str, Any]:
    """Results of "backend, model" as dicts of backends, each of its models."""
    from models import WORKLOADS

    found: dict[str, Any] = {}
    for part in results:
        found.setdefault(part.partition(", ")[0], {})
    for backend, models in found.items():
        for name in WORKLOADS:
            if f"{backend}, {name}" in results:
                models[name] = results[f"{backend}, {name}"]
    return found


def conditions() -> dict[str, Any]:
    """When, of which commit, where and with which versions something is measured."""
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {"python": platform.python_version(), **dict(_versions())},
    }


def _commit() -> str:
    # What benchmarks write themselves is no other version of what they measure.
    written = [f":!{name}" for name in ("benchmarks/results", "docs", "README.md")]
    changed = _git("status", "--porcelain", "--", ".", *written)
    commit = _git("describe", "--always") or "not a git clone"
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    found = subprocess.run(
        ["git", *arguments],
        cwd=RESULTS.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip()


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> Iterator[tuple[str, str]]:
    # Another package with the module `keras`; its versions end with ".dev" and a date.
    keras = ("keras", "keras-nightly")
    for name in (*keras, *BACKENDS, "tensorflow_cpu", "tf_keras", "accelerate"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name.removesuffix("-nightly"), importlib.metadata.version(name)


def picture_path(output: Path, name: str) -> Path:
    """Where a picture goes: to the pages, or to a folder that was asked for."""
    return (PICTURES if output == RESULTS else output) / name
