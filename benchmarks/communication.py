"""Bytes that a worker sends in a step, and its memory: counts, ours beside DDP's.

A language model and a segmentation, whose outputs are large, train on 1, 2, 4 and 8
workers, with as many rows for each worker. Counted per step on the worker 0:

- ours: the bytes of the tensors that it passes to all-reduces and receives in gathers;
- DDP: the bytes of its buckets;
- both: the peak of the resident memory above that before the model was made, when
  `fit` has imported what it uses.

Counts do not depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import Results, names, options_parser
from models import WORKLOADS, Workload
from multi_worker import own_rows, ranks
from page import write_page
from tables import markdown_table

MODELS = ("language model", "segmentation")
WORKERS = (1, 2, 4, 8)
#: Rows of each worker, and steps that are counted.
ROWS, STEPS = 4, 3


def resident() -> int:
    """The bytes that are resident in this process, at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def imported() -> int:
    """The bytes that are resident when `fit` has imported what it uses."""
    import keras
    import numpy as np

    # Keras imports TensorFlow, where it is installed, to seed it.
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.fit(np.zeros((2, 2)), np.zeros((2, 2)), verbose=0)
    return resident()


def ours(workload: Workload, index: int, count: int) -> dict[str, float]:
    import keras_strategies as ks
    from keras_strategies.engines.torch.worker_collectives import TorchWorkers

    sent = {"gathered": 0.0, "reduced": 0.0}
    gather, reduce = TorchWorkers.gather_rows, TorchWorkers.start_all_reduce

    def gather_rows(self: Any, tensor: Any, rows: Any) -> Any:
        found = gather(self, tensor, rows)
        sent["gathered"] += found.nbytes
        return found

    def start_all_reduce(self: Any, op: Any, flat: Any) -> Any:
        sent["reduced"] += flat.nbytes
        return reduce(self, op, flat)

    TorchWorkers.gather_rows = gather_rows  # type: ignore[method-assign]
    TorchWorkers.start_all_reduce = start_all_reduce  # type: ignore[method-assign]
    strategy = ks.MultiWorkerMirroredStrategy()
    x, y = workload.data()
    before = imported()
    with strategy.scope():
        model = workload.compiled()

    def epoch() -> None:
        model.fit(x, y, batch_size=workload.batch, shuffle=False, verbose=0)

    epoch()
    sent.update(gathered=0.0, reduced=0.0)
    epoch()
    counted = {name: value / workload.steps for name, value in sent.items()}
    return {**counted, "memory": resident() - before}


def ddp(workload: Workload, index: int, count: int) -> dict[str, float]:
    import keras
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.functional import cross_entropy

    keras.utils.set_random_seed(0)
    torch.distributed.init_process_group("gloo")
    x, y = (torch.as_tensor(part) for part in own_rows(workload, index, count))
    before = imported()
    module = workload.build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model = torch.nn.parallel.DistributedDataParallel(module)
    sent = {"reduced": 0.0}

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        sent["reduced"] += bucket.buffer().nbytes
        return allreduce_hook(state, bucket)

    model.register_comm_hook(None, hook)

    def epoch() -> None:
        for rows, labels in zip(x, y, strict=True):
            optimizer.zero_grad()
            logits = model(rows, training=True).flatten(0, -2)
            cross_entropy(logits, labels.flatten()).backward()
            optimizer.step()

    epoch()
    sent["reduced"] = 0.0
    epoch()
    found = {"gathered": 0.0, "reduced": sent["reduced"] / workload.steps}
    found["memory"] = resident() - before
    torch.distributed.destroy_process_group()
    return found


KINDS = {"ours": ours, "DDP": ddp}


def counted(kind: str, name: str, count: int) -> dict[str, float]:
    """The counts of worker 0 of some workers."""
    command = [sys.executable, __file__, "--kind", kind, "--models", name]
    found: dict[str, float] = ranks(command, count)[0]
    return found


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table, in MB."""
    header = ["model", "workers"]
    header += ["ours: all-reduced", "ours: gathered", "DDP: all-reduced"]
    header += ["ours: memory", "DDP: memory", "ours / DDP"]
    rows = []
    for name, by_workers in results.items():
        for count, kinds in by_workers.items():
            own, peer = kinds["ours"], kinds["DDP"]
            rows.append(
                [
                    name,
                    count,
                    f"{own['reduced'] / 1e6:.2f} MB",
                    f"{own['gathered'] / 1e6:.2f} MB",
                    f"{peer['reduced'] / 1e6:.2f} MB",
                    f"{own['memory'] / 1e6:.0f} MB",
                    f"{peer['memory'] / 1e6:.0f} MB",
                    f"{own['memory'] / peer['memory']:.2f}",
                ]
            )
    return markdown_table(header, rows)


def main() -> None:
    parser = options_parser(__doc__, models=MODELS)
    parser.add_argument("--workers", type=names, default=list(map(str, WORKERS)))
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        import torch

        torch.set_num_threads(1)
        index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        [name] = options.models
        workload = replace(WORKLOADS[name], batch=ROWS * count, steps=STEPS)
        print(json.dumps(KINDS[options.kind](workload, index, count)), flush=True)
        return
    known = Results(options.output / "communication.json")
    for name in options.models:
        found = {}
        for count in options.workers:
            print(f"counting {name}, {count} workers ...", file=sys.stderr, flush=True)
            found[count] = {kind: counted(kind, name, int(count)) for kind in KINDS}
        known.put(name, found)
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
