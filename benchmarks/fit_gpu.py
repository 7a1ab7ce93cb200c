"""`Model.fit` on one GPU: plain Keras against strategies that compute on that GPU.

    python benchmarks/fit_gpu.py                   # JAX and Torch on gpu:0
    python benchmarks/fit_gpu.py --device cpu:0    # tries the script; writes no results

For each backend and model, one process trains plain Keras, OneDeviceStrategy,
MirroredStrategy with one replica, and CentralStorageStrategy with the variables on the
CPU in turn. Another one is then the coordinator of a parameter server and of a worker
that computes on the GPU; it sees no GPU itself. Every number is the median over rounds
of the milliseconds per step of an epoch, after one that warms up. The aim is an
overhead of at most 1 % over plain Keras for OneDevice and Mirrored.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from fit import keras_contestant, no_scope
from measuring import (
    Contestants,
    Results,
    Rounds,
    measure,
    medians,
    options_parser,
    run_script,
)
from models import WORKLOADS, Workload
from page import write_page
from tables import markdown_table

BACKENDS = ("jax", "torch")
#: Contestants, and their columns.
COLUMNS = {
    "plain": "plain Keras",
    "one_device": "OneDevice",
    "mirrored": "Mirrored, 1 replica",
    "central_storage": "CentralStorage, variables on the CPU",
    "parameter_servers": "parameter servers, 1 worker",
}
#: The models, with the rows of a batch and the steps of an epoch on a GPU.
SIZES = {
    "convolutional": (256, 50),
    "mlp": (256, 300),
    "transformer": (256, 50),
    "transformer with dropout": (256, 50),
    "language model": (64, 50),
}

# --- In the measuring processes -----------------------------------------------


def workload_of(name: str, device: str) -> Workload:
    """A workload, with larger batches on a GPU and three small ones on the CPU."""
    batch, steps = (16, 3) if device.startswith("cpu") else SIZES[name]
    return dataclasses.replace(WORKLOADS[name], batch=batch, steps=steps)


def synchronous(workload: Workload, device: str) -> Contestants:
    """Contestants that compute in this process."""
    import keras_strategies as ks
    from keras_strategies.engines import get_engine

    is_cpu = device.startswith("cpu")
    if is_cpu:
        ks.set_virtual_cpu_devices(2)
    default = str(get_engine().local_devices()[0])
    if default != device:
        sys.exit(f"Keras computes on {default} here, not on {device}.")
    scopes = {
        "plain": no_scope,
        "one_device": ks.OneDeviceStrategy(device).scope,
        "mirrored": ks.MirroredStrategy([device]).scope,
        "central_storage": ks.CentralStorageStrategy(
            [device], "cpu:1" if is_cpu else "cpu:0"
        ).scope,
    }
    return {name: keras_contestant(workload, scope) for name, scope in scopes.items()}


def on_parameter_servers(
    workload: Workload, device: str, rounds: int
) -> dict[str, Rounds]:
    """Times of a cluster of one server and of one worker."""
    import keras_strategies as ks

    resolver = ks.cluster_resolver.LocalClusterResolver(workers=1, ps=1)
    with ks.ParameterServerStrategy(resolver) as strategy:
        (used,) = strategy.extended.worker_devices
        if not used.lower().endswith(device):
            sys.exit(f"The worker computes on {used}, not on {device}.")
        epoch = keras_contestant(workload, strategy.scope)
        return measure({"parameter_servers": epoch}, rounds)


def work(kind: str, device: str, name: str, rounds: int) -> None:
    """Measures and prints a line of JSON."""
    workload = workload_of(name, device)
    if kind == "synchronous":
        print(json.dumps(measure(synchronous(workload, device), rounds)))
    else:
        print(json.dumps(on_parameter_servers(workload, device, rounds)))


# --- In the process that a person starts --------------------------------------


def measured_in_processes(
    backend: str, name: str, options: argparse.Namespace
) -> dict[str, Rounds]:
    """The times of all contestants with one model."""
    found: dict[str, Rounds] = {}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if options.device.startswith("cpu") else {}
    for kind in ("synchronous", "parameter_servers"):
        arguments = ["--worker", kind, "--device", options.device, "--model", name]
        try:
            found |= run_script(
                __file__,
                *arguments,
                "--rounds",
                str(options.rounds),
                backend=backend,
                environment=hidden,
            )
        except subprocess.CalledProcessError:
            sys.exit(f"{backend}, {name}: the measuring process failed, see above.")
    return found


def check_device(device: str) -> None:
    """Ends the program if this machine has no such device."""
    from keras_strategies.processes.local_cluster import GPUS, visible_gpus

    kind, _, index = device.partition(":")
    if (kind, index) not in (("gpu", "0"), ("cpu", "0")):
        sys.exit(
            f"`--device` must be gpu, gpu:0 or cpu:0. Received: {device!r}. Set "
            f"{GPUS} to choose among several GPUs."
        )
    if kind == "gpu" and not visible_gpus(os.environ):
        sys.exit(
            "`--device gpu` needs a GPU, and none is visible on this machine: "
            f"nvidia-smi lists none, or {GPUS} hides them. `--device cpu:0` tries the "
            "script on the CPU, without writing results."
        )


def gpu_name() -> str:
    """The first visible GPU, as its driver names it."""
    from keras_strategies.processes.local_cluster import visible_gpus

    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    command += [f"--id={visible_gpus(os.environ)[0]}"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table: milliseconds per step, and the overhead."""
    rows = []
    for backend, models in results.items():
        for name, rounds in models.items():
            ms = medians(rounds)
            cells = [f"{ms['plain']:.2f} ms"]
            for each in list(COLUMNS)[1:]:
                overhead = (ms[each] / ms["plain"] - 1) * 100
                cells.append(f"{ms[each]:.2f} ms, {overhead:+.1f} %")
            rows.append([backend, name, *cells])
    return markdown_table(["backend", "model", *COLUMNS.values()], rows)


def main() -> None:
    parser = options_parser(__doc__, BACKENDS, SIZES, has_workers=True)
    parser.add_argument("--device", default="gpu", help="gpu (the default), or cpu:0")
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.device, options.model, options.rounds)
        return
    options.device += "" if ":" in options.device else ":0"
    check_device(options.device)
    is_gpu = options.device.startswith("gpu")
    results = Results(options.output / "fit_gpu.json")
    found: dict[str, Any] = {}
    for backend in options.backends:
        found[backend] = {}
        for name in options.models:
            print(f"measuring {backend}, {name} ...", file=sys.stderr, flush=True)
            found[backend][name] = measured_in_processes(backend, name, options)
            if is_gpu:
                # A run that is cut keeps the models before.
                results.put(backend, found[backend], gpu=gpu_name())
                print(table(found), flush=True)
    if not is_gpu:
        print(table(found))
    if is_gpu:
        write_page(options.output)


if __name__ == "__main__":
    main()
