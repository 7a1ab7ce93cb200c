"""Bytes that a worker sends in a step, and its memory: counts, ours beside a peer's.

A language model and a segmentation, whose outputs are large, train on 1, 2, 4 and 8
workers, with a global batch of 64 rows. Counted per step on the worker 0:

- on Torch the bytes of the tensors that ours passes to all-reduces and receives in
  gathers, and those of the buckets of DDP;
- on TensorFlow the results of the collectives in the programs that are executed, of
  ours and of a loop over `tf.distribute.MultiWorkerMirroredStrategy`; ours gathers the
  gradients of a table by rows, as Keras's optimizers take them, the loop sums tables;
- the peak of the resident memory above that before the model was made, when
  `fit` has imported what it uses.

Counts do not depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from measuring import Results, names, options_parser
from models import WORKLOADS, Workload
from page import write_page
from tables import markdown_table
from two_workers import end_group, own_rows, ranks, tensorflow_peer

MODELS = ("language model", "segmentation")
WORKERS = (1, 2, 4, 8)
#: Rows of the global batch, and steps that are counted.
ROWS, STEPS = 64, 3


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
    import keras

    import keras_strategies as ks

    strategy = ks.MultiWorkerMirroredStrategy()
    x, y = workload.data()
    before = imported()
    with strategy.scope():
        model = workload.compiled()

    def epoch() -> None:
        model.fit(x, y, batch_size=workload.batch, shuffle=False, verbose=0)

    if keras.backend.backend() == "tensorflow":
        return executed(epoch, workload.steps, before)
    epoch()
    sent = {"gathered": 0.0, "reduced": 0.0}
    with counting(sent):
        epoch()
    counted = {name: value / workload.steps for name, value in sent.items()}
    return {**counted, "memory": resident() - before}


@contextlib.contextmanager
def counting(sent: dict[str, float]) -> Iterator[None]:
    """Counts the bytes of this package's collectives on Torch."""
    from keras_strategies.engines.torch.worker_collectives import TorchCommunicator

    gather, reduce = TorchCommunicator.gather_rows, TorchCommunicator.start_all_reduce

    def gather_rows(self: Any, tensor: Any, rows: Any) -> Any:
        found = gather(self, tensor, rows)
        sent["gathered"] += found.nbytes
        return found

    def start_all_reduce(self: Any, op: Any, flat: Any) -> Any:
        sent["reduced"] += flat.nbytes
        return reduce(self, op, flat)

    with (
        mock.patch.object(TorchCommunicator, "gather_rows", gather_rows),
        mock.patch.object(TorchCommunicator, "start_all_reduce", start_all_reduce),
    ):
        yield


def executed(epoch: Callable[[], Any], steps: int, before: int) -> dict[str, float]:
    """The bytes of the collectives that TensorFlow executes in a step, and the memory.

    Counted are the results of the operations in each program that Python executes.

    Args:
        epoch: runs an epoch.
        steps: int, its steps.
        before: int, the bytes that were resident before.
    """
    from tensorflow.python.eager import context
    from tensorflow.python.eager.polymorphic_function.atomic_function import (
        AtomicFunction,
    )

    sent = {"gathered": 0.0, "reduced": 0.0}
    call = AtomicFunction.call_flat
    unknown: list[str] = []

    def call_flat(self: Any, *args: Any) -> Any:
        if context.executing_eagerly():
            for operation in operations_in(self.graph):
                if operation.type.startswith("Collective"):
                    kind = "reduced" if "Reduce" in operation.type else "gathered"
                    [result] = operation.outputs
                    size = result.shape.num_elements()
                    if size is None:
                        unknown.append(operation.name)
                    else:
                        sent[kind] += size * result.dtype.size
        return call(self, *args)

    with unknown_lengths() as total:
        epoch()
    count, nbytes = total()
    with mock.patch.object(AtomicFunction, "call_flat", call_flat):
        epoch()
    assert total()[0] - count == len(unknown), unknown
    sent["gathered"] += total()[1] - nbytes
    counted = {name: value / steps for name, value in sent.items()}
    return {**counted, "memory": resident() - before}


@contextlib.contextmanager
def unknown_lengths() -> Iterator[Callable[[], tuple[int, int]]]:
    """Counts gathers of a length that a program does not know when it is traced.

    They are those of the gradients of tables, in ours; the peer sums whole tables. The
    programs that are traced in the context count.

    Yields:
        A function that returns the number of these gathers, and their bytes.
    """
    import tensorflow as tf

    from keras_strategies.engines.tensorflow.workers.worker_collectives import (
        TensorFlowCommunicator,
    )

    gather = TensorFlowCommunicator._gather
    counts = tf.Variable([0, 0], dtype=tf.int64, trainable=False)

    def counted(communicator: Any, tensor: Any) -> Any:
        found = gather(communicator, tensor)
        if tf.executing_eagerly() or found.shape.is_fully_defined():
            return found
        nbytes = tf.size(found, out_type=tf.int64) * found.dtype.size
        counts.assign_add(tf.stack([tf.ones([], tf.int64), nbytes]))
        return found

    def total() -> tuple[int, int]:
        count, nbytes = counts.numpy()
        return int(count), int(nbytes)

    with mock.patch.object(TensorFlowCommunicator, "_gather", counted):
        yield total


def operations_in(graph: Any) -> Iterator[Any]:
    """The operations of a graph, and of those that it calls."""
    for operation in graph.get_operations():
        yield operation
        for attribute in operation.op_def.attr:
            if attribute.type == "func":
                name = operation.get_attr(attribute.name).name
                yield from operations_in(graph._get_function(name).graph)


def tf_distribute(workload: Workload, index: int, count: int) -> dict[str, float]:
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    before = imported()
    epoch = tensorflow_peer(workload, index, count, strategy)
    return executed(epoch, workload.steps, before)


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
    return found


#: The peer of each backend.
PEERS: dict[str, tuple[str, Callable[..., dict[str, float]]]] = {
    "torch": ("DDP", ddp),
    "tensorflow": ("tf.distribute", tf_distribute),
}


def counted(
    backend: str, kind: str, name: str, count: int, rows: int
) -> dict[str, float]:
    """The counts of worker 0 of some workers."""
    command = [sys.executable, __file__, "--kind", kind, "--models", name]
    command += ["--rows", str(rows)]
    found: dict[str, float] = ranks(command, count, backend)[0]
    return found


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table, in MB."""
    header = ["backend", "model", "workers", "ours: all-reduced", "ours: gathered"]
    header += ["peer: all-reduced", "ours - peer", "ours: memory", "peer: memory"]
    header += ["ours / peer"]
    rows = []
    for part, by_workers in results.items():
        for count, kinds in by_workers.items():
            own, peer = kinds["ours"], kinds["peer"]
            more = own["reduced"] + own["gathered"] - peer["reduced"] - peer["gathered"]
            rows.append(
                [
                    *part.split(", "),
                    count,
                    f"{own['reduced'] / 1e6:.2f} MB",
                    f"{own['gathered'] / 1e6:.2f} MB",
                    f"{peer['reduced'] / 1e6:.2f} MB",
                    f"{more:+,.0f} bytes",
                    f"{own['memory'] / 1e6:.0f} MB",
                    f"{peer['memory'] / 1e6:.0f} MB",
                    f"{own['memory'] / peer['memory']:.2f}",
                ]
            )
    return markdown_table(header, rows)


def main() -> None:
    parser = options_parser(__doc__, backends=PEERS, models=MODELS)
    parser.add_argument("--workers", type=names, default=list(map(str, WORKERS)))
    parser.add_argument("--rows", type=int, default=ROWS, help="of the global batch")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        backend = os.environ["KERAS_BACKEND"]
        if backend == "torch":
            import torch

            torch.set_num_threads(1)
        index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        [name] = options.models
        workload = replace(WORKLOADS[name], batch=options.rows, steps=STEPS)
        count_of = ours if options.kind == "ours" else PEERS[backend][1]
        counts = count_of(workload, index, count)
        if backend == "torch":
            end_group()
        print(json.dumps(counts), flush=True)
        return
    known = Results(options.output / "communication.json")
    for backend in options.backends:
        for name in options.models:
            part = f"{backend}, {name}"
            # Other numbers of workers stay, as they were counted.
            found = known.values.get(part, {})
            for count in options.workers:
                print(f"{part}, {count} workers ...", file=sys.stderr, flush=True)
                found[count] = {
                    kind: counted(backend, kind, name, int(count), options.rows)
                    for kind in ("ours", "peer")
                }
                known.put(part, found)
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
