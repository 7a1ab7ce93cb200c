"""Models with layers in which rows of a batch depend on each other.

A layer that is not proved to compute each row from its own is computed with the rows
of all replicas, which is exact. What that costs, and what the layers around it give:
`fit` of plain Keras on one core, of two replicas of one process on two cores, and of
two workers on a core each. They take turns, an epoch at a time.

The switch transformer routes the tokens of a batch to experts with a capacity. The
critic of StyleGAN has the deviation over the batch as a feature. There is no peer: by
data parallelism elsewhere each replica has its own capacity and its own deviation,
which is another model.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from fit import keras_contestant, no_scope
from measuring import (
    Results,
    Rounds,
    measure,
    medians,
    options_parser,
    ratio,
    use_cores,
)
from models import MIXING, Workload
from page import write_page
from tables import markdown_table
from two_workers import Cluster, answer, ours

BACKENDS = ("jax", "torch", "tensorflow")
# Of each contestant the processes, and the cores of each.
KINDS = {"plain": (1, 1), "mirrored": (1, 2), "workers": (2, 1)}


def serve(kind: str, workload: Workload) -> None:
    """Trains an epoch for each line that comes."""
    answer(lambda backend: _epoch(kind, workload, backend), cores=KINDS[kind][1])


def _epoch(kind: str, workload: Workload, backend: str) -> Any:
    import keras_strategies as ks

    if kind == "plain":
        return keras_contestant(workload, no_scope)
    if kind == "workers":
        return ours(workload)
    use_cores(backend, 2)
    return keras_contestant(workload, ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope)


def compare(backend: str, workload: Workload, rounds: int) -> dict[str, Rounds]:
    """Milliseconds per step of each."""
    contestants = {
        kind: Cluster(backend, kind, processes, workload, script=__file__)
        for kind, (processes, _) in KINDS.items()
    }
    for cluster in contestants.values():
        cluster.wait()
    return measure(contestants, rounds)


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["backend", "model", "plain Keras, one core", "Mirrored, two cores"]
    header += ["two workers", "plain / Mirrored", "plain / two workers"]
    rows = []
    for part, found in results.items():
        cells = [f"{medians(found)[kind]:.1f} ms" for kind in KINDS]
        cells += [
            ratio(found["plain"], found[kind]) for kind in ("mirrored", "workers")
        ]
        rows.append([*part.split(", "), *cells])
    return markdown_table(header, rows)


def main() -> None:
    parser = options_parser(__doc__, BACKENDS, MIXING)
    parser.add_argument("--steps", help=argparse.SUPPRESS)
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        serve(options.kind, MIXING[options.models[0]])
        return
    results = Results(options.output / "mixing_rows.json")
    for backend in options.backends:
        for name in options.models:
            print(f"measuring {backend}, {name} ...", file=sys.stderr, flush=True)
            found = compare(backend, MIXING[name], options.rounds)
            results.put(f"{backend}, {name}", found)
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
