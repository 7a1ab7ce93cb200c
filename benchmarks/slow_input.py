"""Input that takes long to read, on one and two workers: ours beside DDP's, on Torch.

A dataset takes 5 or 20 ms for each row, as from a disk or a decoder, and trains a small
model.
Ours is `fit` with a `DataLoader` of global batches; DDP's each has the rows of a
`DistributedSampler`. Reading is nearly all of the time, and does not need a core.
On TensorFlow it is `fit` with a pipeline of `tf.data` that maps positions to rows,
behind `shard(SHARD_HINT, SHARD_HINT)`.

Numbers are rows per second of all workers, and the bytes that worker 0 reads in an
epoch, which do not depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from measuring import Results, measure, names, options_parser, ratio
from page import write_page
from tables import markdown_table
from two_workers import end_group, ranks

WORKERS = ("1", "2")
KINDS = {"ours": "torch", "DDP": "torch", "ours, tf.data": "tensorflow"}
#: Milliseconds to read a row.
READS = ("5", "20")
#: Rows of an epoch and of a global batch; numbers in a row.
ROWS, BATCH, WIDTH = 640, 32, 1024


def dataset_of_rows(seconds: float) -> Any:
    """A dataset that takes so long for a row, and notes what it has read."""
    import numpy as np

    class SlowRows:
        def __init__(self) -> None:
            # The bytes of each row.
            self.read: list[int] = []

        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> Any:
            time.sleep(seconds)
            row = np.random.default_rng(index).normal(size=WIDTH).astype("float32")
            self.read.append(row.nbytes)
            return row, row[:1]

    return SlowRows()


def model_on_workers() -> Any:
    import keras

    import keras_strategies as ks

    with ks.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    return model


def ours(dataset: Any) -> Callable[[], None]:
    import torch

    model = model_on_workers()
    loader = torch.utils.data.DataLoader(dataset, BATCH, shuffle=True)
    return lambda: model.fit(loader, verbose=0)


def ours_with_tf_data(dataset: Any) -> Callable[[], None]:
    import tensorflow as tf

    def row(index: Any) -> Any:
        kinds = tf.float32, tf.float32
        found = tf.numpy_function(lambda i: dataset[int(i)], [index], kinds)
        return tf.ensure_shape(found[0], (WIDTH,)), tf.ensure_shape(found[1], (1,))

    model = model_on_workers()
    hint = tf.data.experimental.SHARD_HINT
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.HINT
    )
    positions = tf.data.Dataset.range(ROWS).shuffle(ROWS, seed=0).shard(hint, hint)
    batches = positions.map(row).batch(BATCH).with_options(options)
    return lambda: model.fit(batches, verbose=0)


def ddp(dataset: Any) -> Callable[[], None]:
    import keras
    import torch

    torch.distributed.init_process_group("gloo")
    module = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
    model = torch.nn.parallel.DistributedDataParallel(module)
    count = torch.distributed.get_world_size()
    sampler = torch.utils.data.distributed.DistributedSampler(dataset)
    loader = torch.utils.data.DataLoader(dataset, BATCH // count, sampler=sampler)

    def epoch() -> None:
        for rows, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(rows), targets).backward()
            optimizer.step()

    return epoch


def train(kind: str, milliseconds: float, rounds: int) -> dict[str, Any]:
    """Rows per second by round, and bytes read in an epoch."""
    if KINDS[kind] == "torch":
        import torch

        torch.set_num_threads(1)
    dataset = dataset_of_rows(milliseconds / 1000)
    make = {"ours": ours, "DDP": ddp, "ours, tf.data": ours_with_tf_data}
    run = make[kind](dataset)
    read: list[int] = []

    def epoch() -> float:
        dataset.read.clear()
        began = time.perf_counter()
        run()
        found = ROWS / (time.perf_counter() - began)
        read.append(sum(dataset.read))
        return found

    times = measure({kind: epoch}, rounds)[kind]
    return {"rows": times, "bytes": read[-1]}


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["ms to read a row", "workers", "ours", "of one worker", "DDP"]
    header += ["of one worker", "ours / DDP"]
    header += ["ours: read by worker 0", "DDP: read by worker 0"]
    rows = []
    for read, by_workers in results.items():
        alone = by_workers[WORKERS[0]]
        for workers, found in by_workers.items():

            def cells(kind: str) -> list[str]:
                speeds = [found[kind]["rows"], alone[kind]["rows"]]  # noqa: B023
                return [f"{median(speeds[0]):.0f} rows/s", ratio(*speeds)]

            def size(kind: str) -> str:
                return f"{found[kind]['bytes'] / 1e3:.0f} kB"  # noqa: B023

            compared = ratio(found["ours"]["rows"], found["DDP"]["rows"])
            rows.append([read, workers, *cells("ours"), *cells("DDP"), compared])
            rows[-1] += [size("ours"), size("DDP")]
            rows.append([read, f"{workers}, `tf.data`", *cells("ours, tf.data")])
            rows[-1] += ["", "", "", size("ours, tf.data"), ""]
    return markdown_table(header, rows)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--reads", type=names, default=READS, help="milliseconds")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        found = train(options.kind, float(options.reads[0]), options.rounds)
        end_group()
        print(json.dumps(found), flush=True)
        return
    known = Results(options.output / "slow_input.json")
    for read in options.reads:
        found = {}
        for workers in WORKERS:
            found[workers] = {}
            for kind, backend in KINDS.items():
                print(f"{read} ms, {workers} workers, {kind} ...", file=sys.stderr)
                command = [sys.executable, os.path.abspath(__file__), "--kind", kind]
                command += ["--rounds", str(options.rounds), "--reads", read]
                found[workers][kind] = ranks(command, int(workers), backend)[0]
        known.put(read, found)
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
