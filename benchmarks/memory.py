"""Memory: the peak of each process, ours beside the peer's for the same work.

For each backend and model these train for one epoch, each in processes of its own:

- `one process`: plain Keras, our MirroredStrategy on two CPU replicas, and the peer of
  `fit.py`; on Torch that is DistributedDataParallel in two processes;
- `two workers`: our MultiWorkerMirroredStrategy, and the peer of `two_workers.py`;
- `parameter servers`: a coordinator, two workers and a server, ours and TensorFlow's,
  which needs `tf_keras` (`pip install --no-deps tf_keras==2.21.0`).

The peak of a process is the most that was resident at once (`VmHWM`). Processes have
pages in common, such as those of libraries and of forks: each counts for its part in
"all processes" (`Pss`), at the end of the epoch. Numbers are medians over rounds.
Processes that neither compute nor store anything (launchers, guards) count in "all".
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
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
from models import CLASSIFIERS, WORKLOADS
from page import write_page
from process_trees import Command, Used, arrive, used
from start import fit, peer_commands, train_as_peer
from tables import markdown_table

MB = 1e6
OF_SERVERS = ("sparse", "dense")
FIT_PEERS = {
    "jax": "DataParallel",
    "torch": "DDP",
    "tensorflow": "tf.distribute",
}


# --- In the measured processes ------------------------------------------------


def plain(model: str) -> None:
    fit(contextlib.nullcontext(), WORKLOADS[model])


def mirrored(model: str) -> None:
    import keras_strategies as ks

    ks.set_virtual_cpu_devices(2)
    fit(ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope(), WORKLOADS[model])


def data_parallel(model: str) -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    import keras

    peer = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
    fit(peer.scope(), WORKLOADS[model])


def tf_distribute(model: str) -> None:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * 2
    )
    peer = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    fit(peer.scope(), WORKLOADS[model])


def worker(model: str) -> None:
    import keras_strategies as ks

    fit(ks.MultiWorkerMirroredStrategy().scope(), WORKLOADS[model])


def coordinator(model: str) -> None:
    import keras
    import parameter_server_contestants as contestants

    import keras_strategies as ks

    workload = contestants.WORKLOADS[model]
    resolver = ks.cluster_resolver.LocalClusterResolver(workers=2, ps=1)
    with ks.ParameterServerStrategy(resolver) as strategy:
        with strategy.scope():
            built = workload.build(keras, 1)
        x, y = workload.data()
        built.fit(x, y, batch_size=workload.batch, shuffle=False, verbose=0)
        arrive()


def coordinator_of_tensorflow(model: str) -> None:
    import parameter_server_contestants as contestants

    workload = contestants.WORKLOADS[model]
    with contestants.tensorflow_strategy() as strategy:
        import tf_keras

        with strategy.scope():
            built = workload.build(tf_keras, 1)
        dataset = contestants.tensorflow_input(workload)
        creator = tf_keras.utils.experimental.DatasetCreator(dataset)
        built.fit(creator, steps_per_epoch=workload.steps, verbose=0)
        arrive()


WORK: dict[str, Callable[[str], None]] = {
    "plain Keras": plain,
    "Mirrored": mirrored,
    "DataParallel": data_parallel,
    "tf.distribute": tf_distribute,
    "two workers": worker,
    "DDP": lambda model: train_as_peer(WORKLOADS[model]),
    "parameter servers": coordinator,
    "tf.distribute's servers": coordinator_of_tensorflow,
}
WORK["two peers"] = WORK["DDP"]
# These arrive before their cluster ends.
_ARRIVED = ("parameter servers", "tf.distribute's servers")


def work(contestant: str, model: str) -> None:
    WORK[contestant](model)
    if contestant not in _ARRIVED:
        arrive()


# --- In the process that a person starts --------------------------------------


def run(backend: str, contestant: str, model: str) -> Used:
    """Runs a contestant in processes of its own."""
    script = [__file__, "--worker", contestant, "--model", model]
    variables = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if contestant == "two workers":
        launcher = ["-m", "keras_strategies", "launch", "--workers", "2"]
        return used([Command([*launcher, *script], variables)], 2)
    if contestant in ("two peers", "DDP"):
        return used(peer_commands(backend, script), 2)
    return used([Command(script, variables)])


def compare(
    backends: dict[str, str], model: str, rounds: int
) -> dict[str, dict[str, Rounds]]:
    """Megabytes of contestants, which have a backend each, in turn."""
    runs: dict[str, list[Used]] = {}
    for number in range(rounds):
        for name, backend in backends.items():
            print(f"round {number + 1}: {name}, {model}, {backend}", file=sys.stderr)
            runs.setdefault(name, []).append(run(backend, name, model))
    return {
        name: {
            "peak": [round(max(each.peaks) / MB, 3) for each in found],
            "all": [round(sum(each.shares) / MB, 3) for each in found],
        }
        for name, found in runs.items()
    }


def contestants(part: str, backend: str) -> dict[str, str]:
    """The names of what is compared, each with its backend."""
    if part == "one process":
        return dict.fromkeys(("plain Keras", "Mirrored", FIT_PEERS[backend]), backend)
    if part == "two workers":
        return dict.fromkeys(("two workers", "two peers"), backend)
    return {"parameter servers": backend, "tf.distribute's servers": "tensorflow"}


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["backend", "what", "model", "ours, largest process", "all processes"]
    header += ["peer", "its largest process", "all processes"]
    header += ["ours / peer, largest", "all"]
    rows = []
    for name, found in results.items():
        part, backend, model = name.split(", ")
        # The last two, of which the first is ours.
        *others, ours, peer = contestants(part, backend)
        for beside in (*others, peer):
            rows.append(row(backend, model, (ours, beside), found))
    return markdown_table(header, rows)


def row(
    backend: str, model: str, pair: tuple[str, str], found: dict[str, Any]
) -> list[str]:
    cells = [backend, pair[0], model]
    for name in pair:
        middle = medians(found[name])
        cells += [f"{middle['peak']:.0f} MB", f"{middle['all']:.0f} MB"]
    peer = {"two peers": FIT_PEERS[backend]}.get(pair[1], pair[1])
    cells.insert(5, peer)
    for key in ("peak", "all"):
        cells.append(ratio(found[pair[0]][key], found[pair[1]][key]))
    return cells


PARTS = ("one process", "two workers", "parameter servers")


def main() -> None:
    parser = options_parser(__doc__, BACKENDS, CLASSIFIERS)
    parser.add_argument("--worker", choices=list(WORK), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--server-models", type=names, default=list(OF_SERVERS))
    parser.add_argument("--parts", type=names, default=list(PARTS))
    parser.set_defaults(rounds=3)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.model)
        return
    results = Results(options.output / "memory.json")
    for part in options.parts:
        is_servers = part == "parameter servers"
        models = options.server_models if is_servers else options.models
        for backend in options.backends:
            for model in models:
                rivals = contestants(part, backend)
                found = compare(rivals, model, options.rounds)
                results.put(f"{part}, {backend}, {model}", found)
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
