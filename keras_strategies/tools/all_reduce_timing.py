"""Timing of an all-reduce between the workers of a cluster, in a separate process.

The process is separate because an engine starts once per process, and the doctor has
initialized devices already; the doctor reports its failure.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from keras_strategies.errors import EXPLAIN
from keras_strategies.text_tables import readable_bytes

#: Sizes in bytes: a small message, and a pack of gradients.
SIZES = (2**20, 25 * 2**20)
_ROUNDS = 5
# Time in which a process imports Keras and a framework, on a busy machine.
_START_SECONDS = 30.0


@dataclass(frozen=True)
class Timing:
    """Duration of one all-reduce.

    Args:
        nbytes: int, bytes that each worker has.
        seconds: float, the median.
    """

    nbytes: int
    seconds: float

    def __str__(self) -> str:
        rate = readable_bytes(self.nbytes / self.seconds)
        return f"{self.seconds * 1e3:.1f} ms  {rate}/s"


def timed_all_reduce(timeout: float) -> list[Timing]:
    """Times an all-reduce with the workers that the other tasks' doctors start.

    Args:
        timeout: float, seconds that workers wait for each other, without their start.

    Returns:
        list of `Timing`.

    Raises:
        RuntimeError: with the error of the worker.
    """
    wait = timeout + _START_SECONDS
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        process = subprocess.run(
            [
                sys.executable,
                "-m",
                "keras_strategies.tools.all_reduce_timing",
                str(wait),
            ],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=3 * wait,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"it did not end within {3 * wait:g} s") from error
    if process.returncode:
        lines = [
            line
            for line in process.stderr.strip().splitlines()
            if not line.startswith(f"See `{EXPLAIN}")
        ]
        raise RuntimeError(lines[-1] if lines else f"exit code {process.returncode}")
    return [Timing(*pair) for pair in json.loads(process.stdout.splitlines()[-1])]


def main(timeout: float) -> None:
    """Measures as one of the workers, and prints the timings as JSON."""
    import keras
    import numpy as np

    import keras_strategies as ks
    from keras_strategies.engines import get_engine

    options = ks.CommunicationOptions(timeout_seconds=timeout)
    strategy = ks.MultiWorkerMirroredStrategy(communication_options=options)
    workers, engine = strategy.workers, get_engine()
    assert workers is not None
    device = strategy.placement.replicas[0]
    timings = []
    for nbytes in SIZES:
        tensor = engine.to_device(np.ones(nbytes // 4, "float32"), device)
        seconds = []
        # The first round makes connections and compiles.
        for _ in range(1 + _ROUNDS):
            workers.group.barrier("a timed all-reduce")
            start = time.perf_counter()
            [total] = workers.all_reduce(ks.ReduceOp.SUM, [tensor])
            # Some engines compute while Python goes on.
            found = float(keras.ops.convert_to_numpy(total[:1])[0])
            seconds.append(time.perf_counter() - start)
            if found != workers.group.count:
                raise RuntimeError(
                    f"The all-reduce of a 1 of each of {workers.group.count} workers "
                    f"is {found:g}. Compare the versions of all workers."
                )
        timings.append((nbytes, statistics.median(seconds[1:])))
    print(json.dumps(timings), flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]))
