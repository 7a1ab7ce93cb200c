"""Two workers on a core each: ours against each backend's peer, in one run.

For each backend and model these train in turn, an epoch at a time, each worker in a
process of its own that is pinned to one core:

- one worker under our `MultiWorkerMirroredStrategy`, on one core;
- two of them, with `Model.fit`;
- the peer's two processes: on JAX Keras's `DataParallel` over `jax.distributed`, on
  Torch `DistributedDataParallel` written by hand, on TensorFlow a loop written by hand
  over `tf.distribute.MultiWorkerMirroredStrategy`, which cannot `fit` Keras 3 models;
- where the peer moves data with Gloo, the same two processes as `SCHED_BATCH`, as by
  `chrt --batch 0 python ...`: what our workers do for Gloo's threads only, which on a
  core that is shared with them costs a scheduler's tick for most messages
  (`keras_strategies/runtime/thread_scheduling.py`);
- on Torch the same loop by hand with Keras's loss, which ours has, in place of Torch's,
  and Keras's `fit` with a `train_step` that calls the model through DDP: the least that
  a step of `fit` takes with DDP's exchange. Its losses and metrics are those of one
  worker's rows;
- two processes that exchange nothing, each with plain Keras's `fit` of its own rows:
  what a step of `fit` takes where communication and the library cost nothing.

Every number is the median over rounds of the milliseconds per step of worker 0, after
one epoch that warms up; ratios have the range of the rounds. Above 1 ours is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from charts import Speeds, speed_chart
from fit import keras_contestant, no_scope
from measuring import (
    BACKENDS,
    Results,
    Rounds,
    allocator,
    by_backend,
    measure,
    medians,
    options_parser,
    picture_path,
    ratio,
)
from models import WORKLOADS, Workload
from page import write_page
from tables import markdown_table

PEERS = {
    "jax": "DataParallel",
    "torch": "DDP",
    "tensorflow": "tf.distribute",
}
# Backends with a peer that moves data with Gloo.
WITH_GLOO = ("jax", "torch")
# Seconds in which a cluster has to come through its first epoch: up to ten processes
# import their framework at once.
START_SECONDS = 180
KERAS_LOSS = "peer_keras_loss"
IN_FIT = "peer_in_fit"
NO_EXCHANGE = "no_exchange"
# Seconds for all that a command of `ranks` does, with 8 workers on two cores.
RANKS_SECONDS = 600


class Cluster:
    """Processes that train together, an epoch each time that this is called.

    Args:
        backend: str.
        kind: str, what `script` gets as `--kind`.
        workers: int, the processes.
        workload: what they train.
        script: str, what each runs; it answers as `answer` does.
    """

    def __init__(
        self,
        backend: str,
        kind: str,
        workers: int,
        workload: Workload,
        script: str = __file__,
    ):
        from keras_strategies.cluster.resolvers.local_processes import free_addresses

        addresses = free_addresses(workers)
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, script, "--kind", kind),
                    *("--models", workload.name, "--steps", str(workload.steps)),
                ],
                env=environment(backend, addresses, index) | allocator(backend),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(workers)
        ]
        self._name = f"{kind} on {backend}"

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Until all are ready to train."""
        until = time.monotonic() + seconds
        for process in self._processes:
            left = max(0.0, until - time.monotonic())
            is_there, _, _ = select.select([process.stdout], [], [], left)
            if not is_there or process.stdout.readline().strip() != "ready":
                self.close(seconds=0)
                why = "failed in" if is_there else f"took more than {seconds:g} s for"
                raise RuntimeError(f"{self._name} {why} its first epoch.")

    def __call__(self) -> float:
        for process in self._processes:
            process.stdin.write("epoch\n")
            process.stdin.flush()
        first, *_ = [float(process.stdout.readline()) for process in self._processes]
        return first

    def close(self, seconds: float = 30) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def environment(backend: str, addresses: list[str], index: int) -> dict[str, str]:
    """What a process of a cluster finds around it."""
    host, port = addresses[0].rsplit(":", 1)
    config = {
        "cluster": {"worker": addresses},
        "task": {"type": "worker", "index": index},
    }
    return {
        **os.environ,
        "KERAS_BACKEND": backend,
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TF_CONFIG": json.dumps(config),
        "RANK": str(index),
        "WORLD_SIZE": str(len(addresses)),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }


def ranks(
    command: list[str],
    count: int,
    backend: str = "torch",
    seconds: float = RANKS_SECONDS,
) -> list[Any]:
    """Runs a command as each of some workers.

    Args:
        command: a command that prints JSON in its last line.
        count: int, the workers.
        backend: str.
        seconds: float, the most that they may take.

    Returns:
        list of what each has printed.
    """
    from keras_strategies.cluster.resolvers.local_processes import free_addresses

    addresses = free_addresses(count)
    processes = [
        subprocess.Popen(
            command,
            env=environment(backend, addresses, index),
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    until = time.monotonic() + seconds
    try:
        outputs = [
            process.communicate(timeout=max(1.0, until - time.monotonic()))[0]
            for process in processes
        ]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{' '.join(command)} failed with {count} workers.")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


# --- In the workers -----------------------------------------------------------


def end_group() -> None:
    """Ends Torch's group of processes, if there is one.

    DDP's reducer waits without end where its group is destroyed before it: nothing may
    refer to the model.
    """
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def serve(kind: str, workload: Workload) -> None:
    """Trains an epoch for each line that comes."""
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if kind == "peer_batch":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    def make(backend: str) -> Callable[[], float]:
        if kind == "ours":
            return ours(workload)
        if kind == KERAS_LOSS:
            return torch_peer(workload, index, count, has_keras_loss=True)
        if kind == IN_FIT:
            return ddp_in_fit(workload, index, count)
        if kind == NO_EXCHANGE:
            return fit_of_own_rows(workload, index, count)
        return PEERS_OF[backend](workload, index, count)

    answer(make)


def answer(make: Callable[[str], Callable[[], float]], cores: int = 1) -> None:
    """Calls a function for each line that comes, and answers what it returned.

    Args:
        make: makes the function, of a backend.
        cores: int, those of this process; one is that of its rank.
    """
    # Gloo prints to the standard output, which is for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    backend = os.environ["KERAS_BACKEND"]
    if cores == 1:
        index, there = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {there[index % len(there)]})
        if backend == "tensorflow":
            import tensorflow as tf

            tf.config.threading.set_intra_op_parallelism_threads(1)
            tf.config.threading.set_inter_op_parallelism_threads(1)
        if backend == "torch":
            import torch

            torch.set_num_threads(1)
    epoch = make(backend)
    epoch()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        print(epoch(), file=answers, flush=True)


def ours(workload: Workload) -> Callable[[], float]:
    import keras_strategies as ks

    return keras_contestant(workload, ks.MultiWorkerMirroredStrategy().scope)


def own_rows(workload: Workload, index: int, count: int) -> Any:
    """This process's part of every global batch, batch after batch."""
    x, y = workload.data()
    shape = (workload.steps, count, workload.batch // count)
    parts = [each.reshape(*shape, *each.shape[1:])[:, index] for each in (x, y)]
    return parts[0], parts[1]


def jax_peer(workload: Workload, index: int, count: int) -> Callable[[], float]:
    import jax

    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    jax.distributed.initialize(address, count, index)
    import keras

    keras.distribution.set_distribution(
        keras.distribution.DataParallel(auto_shard_dataset=False)
    )
    return fit_of_own_rows(workload, index, count)


def fit_of_own_rows(
    workload: Workload,
    index: int,
    count: int,
    change: Callable[[Any], None] | None = None,
) -> Callable[[], float]:
    x, y = own_rows(workload, index, count)
    x, y = (part.reshape(-1, *part.shape[2:]) for part in (x, y))
    return keras_contestant(workload, no_scope, (x, y), change)


def torch_peer(
    workload: Workload,
    index: int,
    count: int,
    has_keras_loss: bool = False,
    is_compiled: bool = False,
) -> Callable[[], float]:
    import keras
    import torch
    from torch.nn.functional import cross_entropy

    keras_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    keras.utils.set_random_seed(0)
    torch.distributed.init_process_group("gloo")
    model = workload.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model = torch.nn.parallel.DistributedDataParallel(model)
    if is_compiled:
        model = torch.compile(model)
    x, y = (torch.as_tensor(part) for part in own_rows(workload, index, count))

    def epoch() -> float:
        start = time.perf_counter()
        total = 0.0
        for rows, labels in zip(x, y, strict=True):
            optimizer.zero_grad()
            logits = model(rows, training=True)
            if has_keras_loss:
                loss = keras_loss(labels, logits)
            else:
                loss = cross_entropy(logits.flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()
            total += loss.item()
        return (time.perf_counter() - start) / workload.steps * 1000

    return epoch


def ddp_in_fit(workload: Workload, index: int, count: int) -> Callable[[], float]:
    """Keras's `fit` of own rows, with a `train_step` that goes through DDP."""
    import keras
    import torch

    torch.distributed.init_process_group("gloo")

    def call_through_ddp(model: Any) -> None:
        through_ddp = torch.nn.parallel.DistributedDataParallel(model)

        def train_step(data: Any) -> dict[str, Any]:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            y_pred = through_ddp(x, training=True)
            model.zero_grad()
            loss = model.compute_loss(x=x, y=y, y_pred=y_pred)
            model._loss_tracker.update_state(loss, sample_weight=len(x))
            loss.backward()
            variables = model.trainable_variables
            with torch.no_grad():
                model.optimizer.apply([v.value.grad for v in variables], variables)
            found: dict[str, Any] = model.compute_metrics(x, y, y_pred)
            return found

        model.train_step = train_step

    return fit_of_own_rows(workload, index, count, call_through_ddp)


def tensorflow_peer(
    workload: Workload, index: int, count: int, strategy: Any = None
) -> Callable[[], float]:
    import keras
    import tensorflow as tf

    strategy = strategy or tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = workload.build()
    x, y = own_rows(workload, index, count)

    def replica_step(rows: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                labels, model(rows, training=True)
            )
            loss = tf.reduce_sum(losses) / (workload.batch * np.prod(workload.labels))
        variables = [v.value for v in model.trainable_variables]
        # An embedding's are rows, more of them here than the table has.
        gradients = [
            tf.convert_to_tensor(each) for each in tape.gradient(loss, variables)
        ]
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)

        def update(strategy: Any, *gradients: Any) -> None:
            for variable, gradient in zip(variables, gradients, strict=True):
                strategy.extended.update(
                    variable, lambda v, g: v.assign_sub(0.01 * g), args=(gradient,)
                )

        context.merge_call(update, args=tuple(gradients))
        return loss

    @tf.function
    def step(rows: Any, labels: Any) -> Any:
        losses = strategy.run(replica_step, args=(rows, labels))
        return strategy.reduce("SUM", losses, axis=None)

    def epoch() -> float:
        start = time.perf_counter()
        total = 0.0
        for rows, labels in zip(x, y, strict=True):
            total += float(step(tf.constant(rows), tf.constant(labels)))
        return (time.perf_counter() - start) / workload.steps * 1000

    return epoch


PEERS_OF = {"jax": jax_peer, "torch": torch_peer, "tensorflow": tensorflow_peer}


# --- In the process that a person starts --------------------------------------


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["backend", "model", "1 worker, 1 core", "2 workers, 2 cores"]
    header += ["speed-up", "peer", "ours / peer", "peer, `SCHED_BATCH`", "ours / that"]
    rows = []
    for backend, models in by_backend(results).items():
        for name, rounds in models.items():
            ms = medians({kind: found for kind, found in rounds.items() if found})
            cells = [
                backend,
                name,
                f"{ms['one']:.1f} ms",
                f"{ms['two']:.1f} ms",
                f"{ratio(rounds['one'], rounds['two'])}",
            ]
            kinds = ("peer", "peer_batch") if backend in WITH_GLOO else ("peer",)
            for kind in kinds:
                if kind in ms:
                    cells.append(f"{ms[kind]:.1f} ms")
                    cells.append(ratio(rounds[kind], rounds["two"]))
                else:
                    cells += ["did not start" if kind in rounds else "not measured", ""]
            cells[5] = f"{PEERS[backend]}, {cells[5]}"
            rows.append(cells)
            further = {
                KERAS_LOSS: f"{PEERS[backend]} with Keras's loss",
                IN_FIT: f"{PEERS[backend]} in a `train_step` of `fit`",
                NO_EXCHANGE: "`fit` of own rows without exchange",
            }
            for kind, label in further.items():
                if kind in ms:
                    peer = f"{label}, {ms[kind]:.1f} ms"
                    part = ratio(rounds[kind], rounds["two"])
                    rows.append([backend, name, "", "", "", peer, part, "", ""])
    return markdown_table(header, rows)


def compare(backend: str, workload: Workload, rounds: int) -> dict[str, Rounds | None]:
    """Milliseconds per step of each; None for what did not come through an epoch."""
    kinds = {"one": ("ours", 1), "two": ("ours", 2), "peer": ("peer", 2)}
    if backend in WITH_GLOO:
        kinds["peer_batch"] = ("peer_batch", 2)
    if backend == "torch":
        kinds[KERAS_LOSS] = (KERAS_LOSS, 2)
        kinds[IN_FIT] = (IN_FIT, 2)
    kinds[NO_EXCHANGE] = (NO_EXCHANGE, 2)
    contestants = {}
    # A peer that spins is not to hold up the start of ours.
    for names in (
        ["one", "two"],
        [name for name in kinds if name not in ("one", "two")],
    ):
        started = {name: Cluster(backend, *kinds[name], workload) for name in names}
        for name, cluster in started.items():
            try:
                cluster.wait()
            except RuntimeError as error:
                print(error, file=sys.stderr)
            else:
                contestants[name] = cluster
    return dict.fromkeys(kinds) | measure(contestants, rounds)


def plot(results: dict[str, Any], path: Path) -> None:
    """Speed of two workers, ours and the peer's, as multiples of one worker's."""
    labels = {"two": "ours", "peer": "{}", "peer_batch": "{}, SCHED_BATCH"}
    speeds: Speeds = {}
    for backend, models in results.items():
        speeds[backend] = {}
        for model, rounds in models.items():
            times = medians({kind: each for kind, each in rounds.items() if each})
            speeds[backend][model] = {
                label.format(PEERS[backend]): times["one"] / times[kind]
                for kind, label in labels.items()
                if kind in times and "one" in times
            }
    speed_chart(speeds, "our one worker on one core", path)


def main() -> None:
    parser = options_parser(__doc__, BACKENDS, WORKLOADS)
    parser.add_argument("--steps", type=int, help="steps of an epoch")
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    workloads = {
        name: replace(WORKLOADS[name], steps=options.steps or WORKLOADS[name].steps)
        for name in options.models
    }
    if options.kind:
        serve(options.kind, *workloads.values())
        return
    # What is measured now takes the place of what was; the rest stays.
    known = Results(options.output / "two_workers.json")
    for backend in options.backends:
        for name, workload in workloads.items():
            print(f"measuring {backend}, {name} ...", file=sys.stderr, flush=True)
            found = compare(backend, workload, options.rounds)
            known.put(f"{backend}, {name}", found)
    results = by_backend(known.values)
    plot(results, picture_path(options.output, "two_workers.png"))
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
