"""Steps on Torch with and without `jit_compile=True`, on two cores.

A transformer with dropout, a residual net and a segmentation net are trained, each
eagerly and compiled, by:

- plain Keras in one process on one core, which compiles its step by `torch.compile`;
- `MirroredStrategy` with two replicas in one process, which compiles layer calls;
- `MultiWorkerMirroredStrategy` with two processes, a core each, likewise;
- `DistributedDataParallel` by hand in two processes, of `torch.compile(model)`.

    python benchmarks/compiled_calls.py

Milliseconds per step, medians over rounds in which the contestants take turns, and
seconds until the first epoch has ended, compilers included.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import two_workers
from fit import keras_contestant, no_scope
from measuring import Results, measure, medians, options_parser
from models import WORKLOADS, Workload
from page import write_page
from tables import markdown_table

#: By name: the processes, and the cores of each.
KINDS = {
    "plain Keras": (1, 1),
    "two replicas": (1, 2),
    "two workers": (2, 1),
    "DDP by hand": (2, 1),
}
START_SECONDS = 1800.0
_STEPS = 6


def residual() -> Any:
    import keras
    from keras import layers

    images = keras.Input((32, 32, 3))
    x = layers.Conv2D(32, 3, padding="same", use_bias=False)(images)
    for _ in range(3):
        h = layers.ReLU()(layers.BatchNormalization()(x))
        h = layers.Conv2D(32, 3, padding="same", use_bias=False)(h)
        h = layers.ReLU()(layers.BatchNormalization()(h))
        x = x + layers.Conv2D(32, 3, padding="same", use_bias=False)(h)
    x = layers.GlobalAveragePooling2D()(layers.BatchNormalization()(x))
    return keras.Model(images, layers.Dense(10)(x))


def _images(random: np.random.Generator, rows: int) -> np.ndarray:
    return random.random((rows, 32, 32, 3), dtype="float32")


MODELS = {
    name: replace(WORKLOADS[name], steps=_STEPS)
    for name in ("transformer with dropout", "segmentation")
} | {"residual": Workload("residual", residual, _images, batch=64, steps=_STEPS)}


def contestant(kind: str, workload: Workload) -> Callable[[], float]:
    """An epoch of one of `KINDS`, with " compiled" at its end or not."""
    name, _, compiled = kind.partition(", ")
    if name == "DDP by hand":
        index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return two_workers.torch_peer(
            workload, index, count, is_compiled=bool(compiled)
        )
    scope = no_scope
    if name != "plain Keras":
        import keras_strategies as ks

        is_one = name == "two replicas"
        scope = (
            ks.MirroredStrategy(["cpu:0", "cpu:1"], processes=False)
            if is_one
            else ks.MultiWorkerMirroredStrategy()
        ).scope

    def change(model: Any) -> None:
        model.jit_compile = bool(compiled)

    return keras_contestant(workload, scope, change=change)


def serve(kind: str, workload: Workload) -> None:
    cores = KINDS[kind.partition(", ")[0]][1]
    two_workers.answer(lambda backend: contestant(kind, workload), cores)


def compare(workload: Workload, rounds: int) -> dict[str, Any]:
    """Milliseconds per step, and seconds until the first epoch has ended."""
    contestants, starts = {}, {}
    for name, (workers, _) in KINDS.items():
        for suffix in ("", ", compiled"):
            start = time.monotonic()
            cluster = two_workers.Cluster(
                "torch", name + suffix, workers, workload, __file__
            )
            cluster.wait(START_SECONDS)
            starts[name + suffix] = round(time.monotonic() - start, 1)
            contestants[name + suffix] = cluster
    load = round(os.getloadavg()[0], 1)
    return {"ms": measure(contestants, rounds), "starts": starts, "load": load}


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["model", *KINDS, "load"]
    lines = []
    for name, found in results.items():
        ms = medians(found["ms"])
        cells = []
        for kind in KINDS:
            first = found["starts"][f"{kind}, compiled"]
            compiled = ms[f"{kind}, compiled"]
            cells.append(f"{ms[kind]:.0f} -> {compiled:.0f} ms (first {first:.0f} s)")
        lines.append([name, *cells, str(found["load"])])
    return markdown_table(header, lines)


def main() -> None:
    parser = options_parser(__doc__, models=MODELS)
    parser.add_argument("--kind", help="of a process that this script starts")
    parser.add_argument("--steps", type=int, default=_STEPS)
    options = parser.parse_args()
    if options.kind:
        [name] = options.models
        serve(options.kind, replace(MODELS[name], steps=options.steps))
        return
    results = Results(options.output / "compiled_calls.json")
    for name in options.models:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        workload = replace(MODELS[name], steps=options.steps)
        results.put(name, compare(workload, options.rounds))
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
