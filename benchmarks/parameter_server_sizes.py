"""Parameter servers by the size of a table: two servers, one worker, Adagrad.

Ours and `tf.distribute`'s servers in turn, and the same bytes by NumPy beside ours. The
longest gap is between two steps of one call of `fit`. Files of ours are models of
Keras; those of `tf.distribute` are checkpoints, which its servers write.

    python benchmarks/parameter_server_sizes.py --sizes 10,1024 --backends jax

It needs `tf_keras`, as `parameter_server.py` does.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from measuring import Results, names, options_parser, run_script
from page import write_page
from parameter_server_contestants import tensorflow_strategy
from tables import markdown_table

PEER = "tf.distribute"
COLUMNS, IDS, BATCH = 32, 8, 128
#: Of a call of `fit`: it ends when either has passed.
STEPS, SECONDS = 2500, 12.0
#: Seconds between snapshots, and of `fit` with them: a full one, then changed rows.
SNAPSHOT_SECONDS, SECONDS_WITH_SNAPSHOTS = 60.0, 150.0
PIECE_BYTES = 64 << 20
SIZES = (10, 1024, 3072)


def compiled(keras: Any, rows: int) -> Any:
    """A model with a table, of `keras` or `tf_keras`, with the slots of its table."""
    model = keras.Sequential(
        [
            keras.layers.InputLayer((IDS,), dtype="int32"),
            keras.layers.Embedding(rows, COLUMNS),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adagrad", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def data(rows: int, steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    x = generator.integers(0, rows, (steps * BATCH, IDS)).astype("int32")
    return x, generator.normal(size=(len(x), 1)).astype("float32")


def seconds(function: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    function()
    return time.perf_counter() - begun


def megabytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss) >> 20


# --- Ours ---------------------------------------------------------------------


def strategy_of(**options: Any) -> Any:
    import keras_strategies as ks

    return ks.ParameterServerStrategy(
        ks.cluster_resolver.LocalClusterResolver(1, 2),
        variable_partitioner=ks.experimental.partitioners.FixedShardsPartitioner(2),
        **options,
    )


def trained(
    model: Any, rows: int, steps: int = STEPS, most: float = SECONDS
) -> tuple[float, float]:
    """Steps per second of `fit`, and the longest gap between two in seconds."""
    import keras

    times: list[float] = []

    def end(batch: int, logs: Any) -> None:
        times.append(time.perf_counter())
        model.stop_training = times[-1] - times[0] > most

    x, y = data(rows, steps)
    note = keras.callbacks.LambdaCallback(on_train_batch_end=end)
    model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[note])
    found = np.array(times[20:])
    return (len(found) - 1) / (found[-1] - found[0]), float(np.diff(found).max())


def server_pids(strategy: Any) -> list[int]:
    return [server.pid for server in strategy.cluster.scheduler.servers.values()]


def without_snapshots(rows: int) -> dict[str, Any]:
    import keras

    found: dict[str, Any] = {}
    nbytes = 2 * rows * COLUMNS * 4
    with strategy_of() as strategy, tempfile.TemporaryDirectory() as folder:
        models = []

        def create() -> None:
            with strategy.scope():
                models.append(compiled(keras, rows))

        found["creation, MB/s"] = nbytes / 1e6 / seconds(create)
        found["steps/s"], gap = trained(models[0], rows)
        found["longest gap, ms"] = 1000 * gap
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
    return found


def with_snapshots(rows: int) -> dict[str, Any]:
    import keras

    found: dict[str, Any] = {}
    with strategy_of(snapshot_seconds=SNAPSHOT_SECONDS) as strategy:
        with strategy.scope():
            model = compiled(keras, rows)
        steps = int(STEPS * SECONDS_WITH_SNAPSHOTS / SECONDS)
        found["steps/s, snapshots"], gap = trained(
            model, rows, steps, SECONDS_WITH_SNAPSHOTS
        )
        found["longest gap, snapshots, ms"] = 1000 * gap
        found["of a server, snapshots, MB"] = megabytes(server_pids(strategy)[0])
        victim = server_pids(strategy)[0]
        killer = threading.Timer(2.0, os.kill, (victim, signal.SIGKILL))
        killer.start()
        found["recovery of a server, s"] = trained(model, rows)[1]
        killer.join()
    return found


def numpy_alone(rows: int) -> dict[str, Any]:
    """The same bytes computed, written and flushed, and read by NumPy in pieces."""
    nbytes = 2 * rows * COLUMNS * 4
    generator = np.random.default_rng(0)
    count = PIECE_BYTES // 4
    lengths = [min(count, nbytes // 4 - i) for i in range(0, nbytes // 4, count)]
    content = np.ones(count, np.float32)
    pieces = []

    def create() -> None:
        for i, length in enumerate(lengths):
            # Half of them are slots.
            if i % 2:
                pieces.append(np.full(length, 0.1, np.float32))
            else:
                pieces.append(generator.random(length, np.float32))

    found = {"creation by NumPy, MB/s": nbytes / 1e6 / seconds(create)}
    pieces.clear()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "values"

        def write() -> None:
            with path.open("wb") as file:
                for length in lengths:
                    content[:length].tofile(file)
                file.flush()
                os.fsync(file.fileno())

        def read() -> None:
            with path.open("rb") as file:
                for length in lengths:
                    pieces.append(np.fromfile(file, np.float32, length))

        found["write by NumPy, flushed, MB/s"] = nbytes / 1e6 / seconds(write)
        found["read by NumPy, MB/s"] = nbytes / 1e6 / seconds(read)
    return found


def ours(rows: int) -> dict[str, Any]:
    return {**without_snapshots(rows), **with_snapshots(rows), **numpy_alone(rows)}


# --- TensorFlow's -------------------------------------------------------------


def tensorflow(rows: int) -> dict[str, Any]:
    """What `tf.distribute`'s servers do: no snapshots, and a lost server ends it."""
    found: dict[str, Any] = {}
    nbytes = 2 * rows * COLUMNS * 4
    with (
        tensorflow_strategy(1, 2, shards=2) as strategy,
        tempfile.TemporaryDirectory() as folder,
    ):
        import tensorflow as tf
        import tf_keras

        models = []

        def create() -> None:
            with strategy.scope():
                models.append(compiled(tf_keras, rows))

        found["creation, MB/s"] = nbytes / 1e6 / seconds(create)
        x, y = data(rows)

        def dataset(context: Any) -> Any:
            return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()

        creator = tf_keras.utils.experimental.DatasetCreator(dataset)

        def fit(steps: int) -> None:
            models[0].fit(creator, steps_per_epoch=steps, verbose=0)

        fit(20)
        steps, passed = 0, 0.0
        while steps < STEPS and passed < SECONDS:
            passed += seconds(lambda: fit(STEPS // 10))
            steps += STEPS // 10
        found["steps/s"] = steps / passed
        # In the order in which `tensorflow_cluster` starts them: the worker is first.
        _, server, _ = psutil.Process().children()
        found["memory of a server, MB"] = megabytes(server.pid)
        found["of the coordinator, MB"] = megabytes(os.getpid())

        def checkpoint() -> Any:
            return tf.train.Checkpoint(model=models[0], optimizer=models[0].optimizer)

        path = f"{folder}/checkpoint"
        saved = seconds(lambda: checkpoint().write(path))
        size = sum(each.stat().st_size for each in Path(folder).iterdir())
        found["save, MB/s"] = size / 1e6 / saved
        loaded = seconds(lambda: checkpoint().read(path).assert_consumed())
        found["load, MB/s"] = size / 1e6 / loaded
    return found


# --- What a person reads ------------------------------------------------------


def table(results: dict[str, dict[str, float]]) -> str:
    """The results as a Markdown table, sizes beside each other."""
    parts = sorted(results, key=lambda part: int(part.split(", ")[1].split()[0]))
    measured = dict.fromkeys(name for part in parts for name in results[part])

    def cell(part: str, name: str) -> str:
        return f"{results[part][name]:g}" if name in results[part] else ""

    rows = [[name, *(cell(part, name) for part in parts)] for name in measured]
    return markdown_table(["", *parts], rows)


def main() -> None:
    parser = options_parser(__doc__, ("jax",))
    parser.add_argument("--sizes", type=names, default=[str(size) for size in SIZES])
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        side, _, size = options.worker.partition(", ")
        rows = int(size.split()[0]) * 2**20 // (COLUMNS * 4)
        found = (tensorflow if side == PEER else ours)(rows)
        print(json.dumps({name: float(f"{v:.4g}") for name, v in found.items()}))
        return
    known = Results(options.output / "parameter_server_sizes.json")
    for size in options.sizes:
        for side in (*options.backends, PEER):
            part = f"{side}, {size} MB"
            backend = "tensorflow" if side == PEER else side
            # What one has left in memory is not that of the next.
            known.put(part, run_script(__file__, "--worker", part, backend=backend))
            print(part, known.values[part], file=sys.stderr, flush=True)
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
