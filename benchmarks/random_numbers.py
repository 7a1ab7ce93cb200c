"""What it costs on Torch that random numbers belong to rows: a step with dropout.

The transformer with dropout of `models.py`, which draws 4.7 million numbers in a step,
trains with `fit`. Epochs in which the numbers of a row do not depend on the replicas
alternate with epochs in which each replica draws for itself, as Torch does, in the same
processes: one device on one thread, and two processes with a thread each.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from typing import Any

from measuring import Results, Rounds, measure, numbers_of, options_parser, ratio
from models import WORKLOADS
from page import write_page
from tables import markdown_table

KINDS = {"one device": 1, "two workers": 2}
DRAWS = ("of rows", "of replicas")


def train(replicas: int, rounds: int) -> dict[str, Rounds]:
    """Milliseconds of a step, by round."""
    import torch

    import keras_strategies as ks
    from keras_strategies.engines.torch.random_numbers import row_numbers

    torch.set_num_threads(1)
    workload = WORKLOADS["transformer with dropout"]
    devices = [f"cpu:{i}" for i in range(replicas)]
    strategy: Any = (
        ks.MirroredStrategy(devices, processes=True)
        if replicas > 1
        else ks.OneDeviceStrategy(devices[0])
    )
    with strategy.scope():
        model = workload.compiled()
    x, y = workload.data()
    draws = {
        "of rows": row_numbers.block_draw,
        "of replicas": lambda draw, draws: draw.call(),
    }

    def epoch(kind: str) -> float:
        row_numbers.block_draw = draws[kind]
        began = time.perf_counter()
        model.fit(x, y, batch_size=workload.batch, verbose=0)
        return (time.perf_counter() - began) / workload.steps * 1000

    return measure({kind: functools.partial(epoch, kind) for kind in DRAWS}, rounds)


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["replicas", "numbers of rows", "of replicas", "of rows / of replicas"]
    rows = []
    for kind, found in results.items():
        cells = [f"{sorted(found[k])[len(found[k]) // 2]:.0f} ms" for k in DRAWS]
        rows.append([kind, *cells, ratio(found["of rows"], found["of replicas"])])
    return markdown_table(header, rows)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--replicas", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replicas:
        print(json.dumps(train(options.replicas, options.rounds)))
        return
    known = Results(options.output / "random_numbers.json")
    for kind, replicas in KINDS.items():
        print(f"{kind} ...", file=sys.stderr, flush=True)
        arguments = ["--replicas", str(replicas), "--rounds", str(options.rounds)]
        known.put(kind, numbers_of(__file__, arguments, "torch"))
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
