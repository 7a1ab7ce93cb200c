"""Start: seconds from `python` to the end of the first step of `fit`.

For each backend, processes are started one contestant after the other, in rounds:

- `one process`: plain Keras, and our OneDeviceStrategy and MirroredStrategy on two CPU
  replicas, in one process each;
- `two workers`: our MultiWorkerMirroredStrategy, started by `keras-strategies launch`
  and by `ks.launch`, and two processes of the backend's own way: `jax.distributed` with
  Keras's DataParallel, `torchrun` with DistributedDataParallel, and
  `tf.distribute.MultiWorkerMirroredStrategy` with a loop by hand;
- `parameter servers`: a coordinator, two workers and a server on this machine, ours on
  each backend and TensorFlow's with `tf_keras`;
- `ray`: the same cluster of ours in a Ray cluster of one node that runs already.

Every number is the median over rounds. The CPU seconds are those of all processes, and
on Ray of the coordinator only. "Import" is the part of the wall time in which the first
process imports Keras with its framework (TensorFlow's parameter servers: `tf_keras`).
Models and batches are the perceptron's of `models.py`, and on parameter servers the
dense model's of `parameter_server_contestants.py`.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from measuring import (
    BACKENDS,
    Results,
    Rounds,
    medians,
    names,
    options_parser,
    ratio,
)
from page import write_page
from process_trees import Command, Used, arrive, used
from tables import markdown_table

ONE_PROCESS = ("plain Keras", "OneDevice", "Mirrored")
TWO_WORKERS = ("keras-strategies launch", "ks.launch", "peer")
PEERS = {
    "jax": "`jax.distributed`",
    "torch": "DDP by `torchrun`",
    "tensorflow": "`tf.distribute`",
}
SERVERS = "parameter servers"


# --- In the measured processes ------------------------------------------------


def imported(module: str) -> float:
    """Imports a module; the seconds that it took."""
    begin = time.perf_counter()
    importlib.import_module(module)
    return time.perf_counter() - begin


def one_step(name: str = "mlp") -> Any:
    """A workload of one step."""
    from models import WORKLOADS

    return replace(WORKLOADS[name], steps=1)


def fit(scope: Any, workload: Any) -> None:
    with scope:
        model = workload.compiled()
    x, y = workload.data()
    model.fit(x, y, batch_size=workload.batch, shuffle=False, verbose=0)


def one_process(contestant: str) -> None:
    seconds = imported("keras")
    if contestant != "plain Keras":
        import keras_strategies as ks

        ks.set_virtual_cpu_devices(2)
    scope: Any = contextlib.nullcontext()
    if contestant == "OneDevice":
        scope = ks.OneDeviceStrategy("cpu:0").scope()
    if contestant == "Mirrored":
        scope = ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope()
    fit(scope, one_step())
    arrive(seconds)


def worker() -> None:
    """One of our two workers."""
    seconds = imported("keras")
    import keras_strategies as ks

    fit(ks.MultiWorkerMirroredStrategy().scope(), one_step())
    arrive(seconds)


def launched(path: list[str]) -> None:
    """One of our two workers, as `ks.launch` calls it."""
    sys.path[:] = path
    importlib.import_module("start").worker()


def launching() -> None:
    import keras_strategies as ks

    ks.launch(launched, workers=2, args=(sys.path,))


def peer() -> None:
    """One of two processes of the backend's own way."""
    backend = os.environ["KERAS_BACKEND"]
    # `jax.distributed` has to be initialized before Keras is imported.
    seconds = imported("jax" if backend == "jax" else "keras")
    train_as_peer(one_step())
    arrive(seconds)


def train_as_peer(workload: Any) -> None:
    from two_workers import PEERS_OF

    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    PEERS_OF[os.environ["KERAS_BACKEND"]](workload, index, count)()


def coordinator(on_ray: bool = False) -> None:
    """Our coordinator of a cluster of parameter servers."""
    seconds = imported("keras")
    import keras
    from parameter_server_contestants import WORKLOADS

    import keras_strategies as ks

    workload = replace(WORKLOADS["dense"], steps=1)
    resolver = (
        ks.cluster_resolver.RayClusterResolver(workers=2, ps=1)
        if on_ray
        else ks.cluster_resolver.LocalClusterResolver(workers=2, ps=1)
    )
    with ks.ParameterServerStrategy(resolver) as strategy:
        with strategy.scope():
            model = workload.build(keras, 1)
        x, y = workload.data()
        model.fit(x, y, batch_size=workload.batch, shuffle=False, verbose=0)
        arrive(seconds)


def coordinator_of_tensorflow() -> None:
    from parameter_server_contestants import (
        WORKLOADS,
        tensorflow_input,
        tensorflow_strategy,
    )

    workload = replace(WORKLOADS["dense"], steps=1)
    with tensorflow_strategy() as strategy:
        seconds = imported("tf_keras")
        import tf_keras

        with strategy.scope():
            model = workload.build(tf_keras, 1)
        creator = tf_keras.utils.experimental.DatasetCreator(tensorflow_input(workload))
        model.fit(creator, steps_per_epoch=workload.steps, verbose=0)
        arrive(seconds)


WORK: dict[str, Callable[[], None]] = {
    **{name: lambda name=name: one_process(name) for name in ONE_PROCESS},  # type: ignore[misc]
    "keras-strategies launch": worker,
    "ks.launch": launching,
    "peer": peer,
    SERVERS: coordinator,
    "tf.distribute": coordinator_of_tensorflow,
    "ray": lambda: coordinator(on_ray=True),
}


# --- In the process that a person starts --------------------------------------


def run(backend: str, contestant: str) -> Used:
    """Runs a contestant in processes of its own."""
    variables = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    script = [__file__, "--worker", contestant]
    alone = [Command(script, variables)]
    if contestant == "keras-strategies launch":
        launcher = ["-m", "keras_strategies", "launch", "--workers", "2"]
        return used([Command([*launcher, *script], variables)], 2)
    if contestant == "ks.launch":
        return used(alone, 2)
    if contestant == "peer":
        return used(peer_commands(backend, script), 2)
    return used(alone)


def peer_commands(backend: str, script: list[str]) -> list[Command]:
    """How two processes of the backend's own way are started."""
    from two_workers import environment

    from keras_strategies.cluster.resolvers.local_processes import free_addresses

    if backend == "torch":
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
        # A free port, instead of the same one for all.
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        return [Command([*torchrun, *script], {"KERAS_BACKEND": backend})]
    addresses = free_addresses(2)
    return [Command(script, environment(backend, addresses, i)) for i in range(2)]


def measure(
    contestants: list[tuple[str, str]], rounds: int
) -> dict[str, dict[str, Rounds]]:
    """Runs all in turn: seconds of each by its name."""
    found: dict[str, list[Used]] = {}
    for number in range(rounds):
        for backend, contestant in contestants:
            print(f"round {number + 1}: {contestant}, {backend}", file=sys.stderr)
            found.setdefault(contestant, []).append(run(backend, contestant))
    return {
        name: {
            "wall": [round(each.wall, 3) for each in runs],
            "cpu": [round(each.cpu, 3) for each in runs],
            "import": [round(max(each.facts), 3) for each in runs],
        }
        for name, runs in found.items()
    }


@contextlib.contextmanager
def ray_cluster() -> Iterator[None]:
    """A Ray cluster on this machine."""
    ray = str(Path(sys.executable).with_name("ray"))
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run([ray, "start", "--head", "--num-cpus=8"], check=True, **quiet)
    try:
        yield
    finally:
        subprocess.run([ray, "stop", "--force"], check=False, **quiet)


def servers(backend: str, rounds: int) -> dict[str, Any]:
    return measure([(backend, SERVERS), ("tensorflow", "tf.distribute")], rounds)


def on_ray(backend: str, rounds: int) -> dict[str, Any]:
    with ray_cluster():
        return measure([(backend, "ray")], rounds)


def processes(kind: tuple[str, ...]) -> Callable[[str, int], dict[str, Any]]:
    return lambda backend, rounds: measure([(backend, each) for each in kind], rounds)


PARTS: dict[str, Callable[[str, int], dict[str, Any]]] = {
    "one process": processes(ONE_PROCESS),
    "two workers": processes(TWO_WORKERS),
    SERVERS: servers,
    "ray": on_ray,
}


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["backend", "what starts", "import of Keras", "wall", "CPU", "beside"]
    header += ["its wall", "its CPU", "ratio of walls"]
    rows = []
    for backend in BACKENDS:
        for part in PARTS:
            found = results.get(f"{part}, {backend}", {})
            for name, beside in pairs(part, backend):
                if name in found:
                    rows.append(row(backend, name, beside, found))
    return markdown_table(header, rows)


def pairs(part: str, backend: str) -> list[tuple[str, tuple[str, str]]]:
    """The contestants of a part, each with another one and the name of that."""
    if part == "one process":
        return [(name, ("plain Keras", "plain Keras")) for name in ONE_PROCESS[1:]]
    if part == "two workers":
        return [(name, ("peer", PEERS[backend])) for name in TWO_WORKERS[:2]]
    peer = ("tf.distribute", "`tf.distribute`")
    return [(SERVERS, peer)] if part == SERVERS else [("ray", ("", ""))]


SHOWN = {
    "keras-strategies launch": "two workers, `keras-strategies launch`",
    "ks.launch": "two workers, `ks.launch`",
    "ray": f"{SERVERS} on Ray",
}


def row(
    backend: str, name: str, beside: tuple[str, str], found: dict[str, Any]
) -> list[str]:
    def seconds(contestant: str, *keys: str) -> list[str]:
        middle = medians(found[contestant])
        return [f"{middle[key]:.1f} s" for key in keys]

    cells = [backend, SHOWN.get(name, name), *seconds(name, "import", "wall", "cpu")]
    cells.append(beside[1])
    if beside[0] in found:
        cells += seconds(beside[0], "wall", "cpu")
        cells.append(ratio(found[name]["wall"], found[beside[0]]["wall"]))
    return cells


def main() -> None:
    parser = options_parser(__doc__, BACKENDS)
    parser.add_argument("--worker", choices=list(WORK), help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=names, default=list(PARTS))
    options = parser.parse_args()
    if options.worker:
        WORK[options.worker]()
        return
    # As an installed package is, also where Python is told not to write bytecode.
    compileall.compile_dir(Path(__file__).parents[1] / "keras_strategies", quiet=1)
    results = Results(options.output / "start.json")
    for part in options.parts:
        for backend in options.backends:
            found = PARTS[part](backend, options.rounds)
            results.put(f"{part}, {backend}", found)
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
