"""`Model.fit`: ours against plain Keras, and two replicas against each backend's peer.

One run measures everything that it compares. For each backend a process pinned to one
core trains plain Keras and our OneDeviceStrategy in turn. Another, with one device and
two cores, trains plain Keras, which is what a user of a CPU otherwise does. A process
with two cores trains our MirroredStrategy on two CPU replicas and the peer in turn:

- JAX: `keras.distribution.DataParallel`;
- Torch: `DistributedDataParallel` written by hand, two processes, a core each, with
  Torch's loss and with Keras's, which ours has, and Hugging Face Accelerate where it is
  installed;
- TensorFlow: `tf.distribute.MirroredStrategy`.

Every number is the median over rounds of the milliseconds per step of an epoch, after
one that warms up. Rounds alternate between the contestants, so that what the machine
does besides falls on both; ratios have the range of the rounds. Above 1 ours is faster.
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

from charts import Speeds, speed_chart
from measuring import (
    BACKENDS,
    Contestants,
    Results,
    by_backend,
    epoch_timer,
    measure,
    medians,
    options_parser,
    picture_path,
    ratio,
    run_worker,
    use_cores,
)
from models import WORKLOADS, Workload
from page import write_page
from tables import markdown_table

WITH_KERAS_LOSS = "DDP with Keras's loss"

# --- In the measuring processes -----------------------------------------------


def keras_contestant(
    workload: Workload,
    scope: Any,
    data: tuple[Any, Any] | None = None,
    change: Callable[[Any], None] | None = None,
) -> Callable[[], float]:
    """Milliseconds per step of one epoch of `fit`, each time that it is called.

    Args:
        workload: what is trained.
        scope: function that returns a context.
        data: rows and labels that this process reads, if not those of the workload.
        change: function that is called with the compiled model.
    """
    x, y = data or workload.data()
    with scope() as _:
        model = workload.compiled()
    if change is not None:
        change(model)
    timer = epoch_timer()

    def epoch() -> float:
        with scope() as _:
            model.fit(
                x,
                y,
                batch_size=len(x) // workload.steps,
                shuffle=False,
                verbose=0,
                callbacks=[timer],
            )
        return timer.seconds / workload.steps * 1000

    return epoch


def no_scope() -> Any:
    import contextlib

    return contextlib.nullcontext()


def one_core(workload: Workload) -> Contestants:
    import keras_strategies as ks

    return {
        "plain": keras_contestant(workload, no_scope),
        "one_device": keras_contestant(workload, ks.OneDeviceStrategy("cpu:0").scope),
    }


def two_cores(workload: Workload, backend: str) -> Contestants:
    import keras_strategies as ks

    mirrored = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    contestants = {"mirrored": keras_contestant(workload, mirrored.scope)}
    if backend == "jax":
        import keras

        peer = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
        contestants["DataParallel"] = keras_contestant(workload, peer.scope)
    if backend == "tensorflow":
        import tensorflow as tf

        tf_peer = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        contestants["tf.distribute"] = keras_contestant(workload, tf_peer.scope)
    if backend == "torch":
        for name in ("DDP", WITH_KERAS_LOSS, "Accelerate"):
            peer_processes = TorchPeer(workload, name)
            if peer_processes.available:
                contestants[name] = peer_processes
    return contestants


class TorchPeer:
    """Two processes that train by `DistributedDataParallel`, an epoch at a time."""

    def __init__(self, workload: Workload, kind: str):
        import socket

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--ddp", kind, "--model", workload.name],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        answers = [process.stdout.readline().strip() for process in self.processes]
        self.available = answers == ["ready", "ready"]
        if not self.available:
            print(f"{kind}: {answers[0] or 'did not start'}", file=sys.stderr)
            self.close()

    def __call__(self) -> float:
        for process in self.processes:
            process.stdin.write("epoch\n")
            process.stdin.flush()
        return max(float(process.stdout.readline()) for process in self.processes)

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait(timeout=60)


def torch_peer(kind: str, workload: Workload) -> None:
    """One of the two processes of a `TorchPeer`."""
    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    import torch
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    import keras

    keras_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    keras.utils.set_random_seed(0)
    model = workload.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if kind == "Accelerate":
        try:
            from accelerate import Accelerator
        except ImportError:
            print("accelerate is not installed", flush=True)
            return
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    else:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
        backward = torch.Tensor.backward
    x, y = workload.data()
    half = workload.batch // 2
    # This process's half of every global batch.
    shape = (workload.steps, 2, half)
    x = torch.as_tensor(x.reshape(*shape, *x.shape[1:])[:, rank])
    y = torch.as_tensor(y.reshape(*shape, *y.shape[1:])[:, rank])
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        total = 0.0
        for rows, labels in zip(x, y, strict=True):
            optimizer.zero_grad()
            logits = model(rows, training=True)
            if kind == WITH_KERAS_LOSS:
                loss = keras_loss(labels, logits)
            else:
                loss = cross_entropy(logits.flatten(0, -2), labels.flatten())
            backward(loss)
            optimizer.step()
            total += loss.item()
        seconds = time.perf_counter() - start
        print(seconds / workload.steps * 1000, flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def one_device_two_cores(workload: Workload) -> Contestants:
    return {"plain, 2 cores": keras_contestant(workload, no_scope)}


def work(backend: str, cores: int, name: str, rounds: int, devices: int) -> None:
    """Measures on one or two cores and prints a line of JSON."""
    use_cores(backend, cores, devices)
    workload = WORKLOADS[name]
    if cores == 1:
        contestants = one_core(workload)
    elif devices == 1:
        contestants = one_device_two_cores(workload)
    else:
        contestants = two_cores(workload, backend)
    print(json.dumps(measure(contestants, rounds)))


# --- In the process that a person starts --------------------------------------


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["backend", "model", "ours / peer", "peer", "Mirrored, 2 cores"]
    header += ["speed-up", "plain Keras, 1 core", "OneDevice", "overhead"]
    header += ["plain Keras, 1 device on 2 cores", "its speed-up"]
    rows = []
    for backend, models in by_backend(results).items():
        for name, rounds in models.items():
            ms = medians(rounds)
            peers = {k: v for k, v in ms.items() if k not in OURS}
            for i, (peer, value) in enumerate(peers.items()):
                overhead = (ms["one_device"] / ms["plain"] - 1) * 100
                ours = [
                    f"{ms['mirrored']:.1f} ms",
                    f"{ms['plain'] / ms['mirrored']:.2f}x",
                    f"{ms['plain']:.1f} ms",
                    f"{ms['one_device']:.1f} ms",
                    f"{overhead:+.1f} %",
                    *_on_both_cores(ms),
                ]
                cells = [backend, name, ratio(rounds[peer], rounds["mirrored"])]
                cells.append(f"{peer}, {value:.1f} ms")
                rows.append([*cells, *(ours if i == 0 else [""] * len(ours))])
    return markdown_table(header, rows)


def _on_both_cores(ms: dict[str, float]) -> list[str]:
    """Time and speed-up of one device that has both cores."""
    if (both := ms.get("plain, 2 cores")) is None:
        return ["not measured", ""]
    return [f"{both:.1f} ms", f"{ms['plain'] / both:.2f}x"]


OURS = ("plain", "one_device", "plain, 2 cores", "mirrored")


def plot(results: dict[str, Any], path: Path) -> None:
    """Speeds as multiples of plain Keras's on one core."""
    speeds: Speeds = {}
    for backend, found in results.items():
        speeds[backend] = {}
        for model, rounds in found.items():
            times = medians(rounds)
            speeds[backend][model] = {
                label.replace("_", " "): times["plain"] / time
                for label, time in times.items()
                if label != "plain"
            }
    speed_chart(speeds, "plain Keras on one core", path)


def main() -> None:
    parser = options_parser(__doc__, BACKENDS, WORKLOADS, has_workers=True)
    parser.add_argument("--ddp", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ddp:
        torch_peer(options.ddp, WORKLOADS[options.model])
        return
    if options.worker:
        work(
            options.worker,
            options.cores,
            options.model,
            options.rounds,
            options.devices or options.cores,
        )
        return
    results = Results(options.output / "fit.json")
    for backend in options.backends:
        # A process for each model: tf.distribute confuses the collectives of two.
        for name in options.models:
            print(f"measuring {backend}, {name} ...", file=sys.stderr, flush=True)
            found = (
                run_worker(__file__, backend, 1, name, options.rounds)
                | run_worker(__file__, backend, 2, name, options.rounds, devices=1)
                | run_worker(__file__, backend, 2, name, options.rounds)
            )
            results.put(f"{backend}, {name}", found)
    plot(by_backend(results.values), picture_path(options.output, "fit.png"))
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
