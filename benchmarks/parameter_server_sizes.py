"""Parameter servers by the size of a table: two servers, one worker, Adagrad.

The longest gap is between two steps of one call of `fit`, with and without snapshots.
The file's write is beside one of the same bytes by NumPy, flushed. Prints Markdown.

python parameter_server_sizes.py [megabytes of the table ...]
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil

import keras_strategies as ks

COLUMNS, IDS, BATCH, STEPS, SNAPSHOT_SECONDS = 32, 8, 128, 2500, 3.0
PIECE_BYTES = 64 << 20
SIZES = (10, 1024)


def strategy_of(**options: Any) -> ks.ParameterServerStrategy:
    return ks.ParameterServerStrategy(
        ks.cluster_resolver.LocalClusterResolver(1, 2),
        variable_partitioner=ks.experimental.partitioners.FixedShardsPartitioner(2),
        **options,
    )


def model_of(rows: int) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((IDS,), dtype="int32"),
            keras.layers.Embedding(rows, COLUMNS),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adagrad", "mse")
    return model


def seconds(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


class Steps(keras.callbacks.Callback):
    """Times at which steps ended."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.times.append(time.perf_counter())

    def found(self) -> tuple[float, float]:
        """Steps per second, and the longest gap in seconds."""
        times = np.array(self.times[20:])
        return (len(times) - 1) / (times[-1] - times[0]), float(np.diff(times).max())


def trained(model: keras.Model, rows: int, steps: int = STEPS) -> Steps:
    generator = np.random.default_rng(0)
    x = generator.integers(0, rows, (steps * BATCH, IDS)).astype("int32")
    y = generator.normal(size=(len(x), 1)).astype("float32")
    callback = Steps()
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[callback])
    return callback


def server_pids(strategy: ks.ParameterServerStrategy) -> list[int]:
    return [server.pid for server in strategy.cluster.scheduler.servers.values()]


def megabytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss) >> 20


def without_snapshots(rows: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    nbytes = 2 * rows * COLUMNS * 4
    with strategy_of() as strategy, tempfile.TemporaryDirectory() as folder:
        models = []

        def create() -> None:
            with strategy.scope():
                model = model_of(rows)
                model.optimizer.build(model.trainable_variables)
            models.append(model)

        found["creation, MB/s"] = nbytes / 1e6 / seconds(create)
        found["steps/s"], found["longest gap, ms"] = trained(models[0], rows).found()
        found["longest gap, ms"] *= 1000
        found["memory of a server, MB"] = megabytes(server_pids(strategy)[0])
        found["of the coordinator, MB"] = megabytes(os.getpid())
        path = Path(folder) / "model.keras"
        # What Keras imports in the first save.
        keras.Sequential([keras.Input((1,))]).save(Path(folder) / "first.keras")
        saved = seconds(lambda: models[0].save(path))
        size = path.stat().st_size
        found["save, MB/s"] = size / 1e6 / saved
        models.clear()
        gc.collect()
        with strategy.scope():
            loaded = seconds(lambda: keras.saving.load_model(path))
        found["load, MB/s"] = size / 1e6 / loaded
        path.unlink()
        content = np.ones(PIECE_BYTES, np.uint8)
        with path.open("wb") as file:

            def write() -> None:
                for start in range(0, size, PIECE_BYTES):
                    content[: size - start].tofile(file)
                file.flush()
                os.fsync(file.fileno())

            found["NumPy's write, MB/s"] = size / 1e6 / seconds(write)
    return found


def with_snapshots(rows: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with strategy_of(snapshot_seconds=SNAPSHOT_SECONDS) as strategy:
        with strategy.scope():
            model = model_of(rows)
        found["steps/s, snapshots"], gap = trained(model, rows).found()
        found["longest gap, snapshots, ms"] = gap * 1000
        found["of a server, snapshots, MB"] = megabytes(server_pids(strategy)[0])
        time.sleep(2 * SNAPSHOT_SECONDS)
        victim = server_pids(strategy)[0]
        killer = threading.Timer(2.0, os.kill, (victim, signal.SIGKILL))
        killer.start()
        found["recovery, s"] = trained(model, rows).found()[1]
        killer.join()
    return found


def measured(size: int) -> dict[str, float]:
    rows = size * 2**20 // (COLUMNS * 4)
    found = {**without_snapshots(rows), **with_snapshots(rows)}
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def main() -> None:
    sizes = [int(text) for text in sys.argv[1:]] or SIZES
    if len(sizes) == 1:
        print(json.dumps(measured(sizes[0])))
        return
    columns = []
    for size in sizes:
        # What one has left in memory is not that of the next.
        command = [sys.executable, __file__, str(size)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        columns.append(json.loads(printed.stdout.splitlines()[-1]))
        print(size, columns[-1], f"load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    print(f"| {keras.backend.backend()} |", *(f"{size} MB |" for size in sizes))
    print("|---|" + "---|" * len(sizes))
    for name in columns[0]:
        print(f"| {name} |", *(f"{each[name]:g} |" for each in columns))


if __name__ == "__main__":
    main()
