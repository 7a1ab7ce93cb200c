"""Keras models without a strategy: what the library costs them, as ratios of times.

    KERAS_BACKEND=torch python benchmarks/without_strategy.py

Two processes have the same small model of plain Keras. One has never imported the
library; in the other a strategy has trained another model and has run a function on its
replicas. They measure in turn, so that what the machine does besides falls on both. The
ratios are those of the shortest CPU times; above 1 the library costs something. Numbers
of calls, of Python's functions and of built-in ones, do not depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = 5
ROWS = 8


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


def serve(has_library: bool) -> None:
    """Writes numbers of calls; then, for each line of input, milliseconds of CPU."""
    import keras
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
    print(json.dumps([keras.backend.backend(), calls]), flush=True)
    for _ in sys.stdin:
        found = {}
        for name, run in measured.items():
            start = time.process_time()
            run()
            found[name] = (time.process_time() - start) * 1000 / STEPS
        print(json.dumps(found), flush=True)


def start(has_library: bool) -> subprocess.Popen[str]:
    """A process that measures."""
    flags = ["--serve", *(["--library"] if has_library else [])]
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="2", OMP_NUM_THREADS="1")
    if has_library:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    # JAX: as many devices in both.
    flag = "--xla_force_host_platform_device_count=2"
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    return subprocess.Popen(
        [sys.executable, __file__, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def measured_by(process: subprocess.Popen[str]) -> Any:
    """The next line of a process's results, None at their end."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def compare(rounds: int) -> None:
    processes = {False: start(False), True: start(True)}
    times: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
    calls: dict[bool, Any] = {}
    try:
        for has_library, process in processes.items():
            assert process.stdout is not None
            calls[has_library] = json.loads(process.stdout.readline())
        for number in range(rounds):
            for has_library in (False, True) if number % 2 else (True, False):
                for name, value in measured_by(processes[has_library]).items():
                    times[has_library].setdefault(name, []).append(value)
    finally:
        for process in processes.values():
            process.communicate()
    print(f"{calls[True][0]}: ms of CPU for each step, and calls in {STEPS} steps")
    for name, without in times[False].items():
        plain, own = min(without), min(times[True][name])
        row = f"{plain:8.3f} without, {own:8.3f} with the library"
        counts = [calls[has_library][1][name] for has_library in (False, True)]
        print(f"  {name:16}{row}, ratio {own / plain:.3f}, calls {counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--library", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.library)
    else:
        compare(arguments.rounds)


if __name__ == "__main__":
    main()
