"""Keras models without a strategy: overhead of the library in their process.

Two processes have the same small model of plain Keras. One has never imported the
library; in the other a strategy has trained another model and has run a function on its
replicas. They measure in turn, milliseconds of CPU for each step, the shortest of
several runs in each round. Above 1 the library costs something. Numbers of calls, of
Python's functions and of built-in ones, do not depend on the machine.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import BACKENDS, Results, measure, medians, options_parser, ratio
from page import write_page
from tables import markdown_table

ROOT = Path(__file__).parents[1]
KINDS = WITHOUT, WITH = ("plain Keras", "with the library")
PHASES = ("__call__", "train_on_batch", "fit")
STEPS = 5
ROWS = 8
# Of which the shortest counts, in each round.
RUNS = 12


def compiled_model() -> Any:
    """A model of which Python is most of the time."""
    import keras

    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


def use_strategy(x: Any, y: Any) -> None:
    """Trains a model of a strategy, and runs a function on its replicas."""
    import keras

    import keras_strategies as ks

    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = compiled_model()
        count = keras.Variable(0.0, aggregation="sum", trainable=False)
    model.fit(x, y, batch_size=ROWS, verbose=0)
    strategy.run(lambda: count.assign_add(1.0))


def phases(x: Any, y: Any) -> dict[str, Callable[[], object]]:
    """What is measured, by name; each takes as many steps."""
    model = compiled_model()

    def each_step(step: Callable[[Any, Any], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(STEPS):
                step(x[:ROWS], y[:ROWS])

        return run

    return {
        "__call__": each_step(lambda x, y: model(x)),
        "train_on_batch": each_step(model.train_on_batch),
        "fit": lambda: model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0),
    }


def calls_of(run: Callable[[], object]) -> int:
    """How many functions are called in this thread."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def shortest(run: Callable[[], object]) -> float:
    """Milliseconds of CPU for a step."""
    found = []
    for _ in range(RUNS):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found) * 1000 / STEPS


def serve(has_library: bool) -> None:
    """Writes numbers of calls; then, for each phase that it reads, its time."""
    import numpy as np

    if has_library:
        import keras_strategies as ks

        ks.set_virtual_cpu_devices(2)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(STEPS * ROWS, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    if has_library:
        use_strategy(x, y)
    assert has_library or "keras_strategies" not in sys.modules
    measured = phases(x, y)
    for run in measured.values():
        run()
    calls = {name: calls_of(run) for name, run in measured.items()}
    print(json.dumps(calls), flush=True)
    for line in sys.stdin:
        print(shortest(measured[line.strip()]), flush=True)


def start(backend: str, kind: str) -> subprocess.Popen[str]:
    """A process that measures."""
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "OMP_NUM_THREADS": "1",
    }
    if kind == WITH:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # JAX: as many devices in both.
    flag = "--xla_force_host_platform_device_count=2"
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    return subprocess.Popen(
        [sys.executable, __file__, "--worker", kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def reply(process: subprocess.Popen[str], phase: str = "") -> Any:
    """What a process writes next, after the name of a phase was sent to it."""
    assert process.stdin is not None
    assert process.stdout is not None
    if phase:
        process.stdin.write(f"{phase}\n")
        process.stdin.flush()
    return json.loads(process.stdout.readline())


def compare(backend: str, rounds: int) -> dict[str, dict[str, Any]]:
    """For each phase, times and numbers of calls in both processes."""
    processes = {kind: start(backend, kind) for kind in KINDS}
    try:
        calls = {kind: reply(process) for kind, process in processes.items()}
        found = {}
        for phase in PHASES:
            contestants = {
                kind: functools.partial(reply, process, phase)
                for kind, process in processes.items()
            }
            counts = {kind: calls[kind][phase] for kind in KINDS}
            found[phase] = {"ms": measure(contestants, rounds), "calls": counts}
        return found
    finally:
        for process in processes.values():
            process.communicate()


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["backend", "call", *KINDS, "ratio", f"function calls of {STEPS} steps"]
    header += [WITH]
    rows = []
    for backend, phases in results.items():
        for phase, found in phases.items():
            ms = medians(found["ms"])
            cells = [backend, f"`{phase}`", *(f"{ms[kind]:.3f} ms" for kind in KINDS)]
            cells.append(ratio(found["ms"][WITH], found["ms"][WITHOUT]))
            rows.append([*cells, *(f"{found['calls'][kind]:,}" for kind in KINDS)])
    return markdown_table(header, rows)


def main() -> None:
    parser = options_parser(__doc__, BACKENDS)
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve(options.worker == WITH)
        return
    results = Results(options.output / "without_strategy.json")
    for backend in options.backends:
        print(f"measuring {backend} ...", file=sys.stderr, flush=True)
        results.put(backend, compare(backend, options.rounds))
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
