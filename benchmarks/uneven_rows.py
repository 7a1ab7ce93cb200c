"""Batches that do not divide over the devices, on JAX.

A process with two cores trains on batches of 64, 63, 62 and 61 rows, in turn: on one
device, and under MirroredStrategy on two and on four virtual CPU devices. XLA lets one
device use both cores, so the numbers to compare are those of one column.

    python benchmarks/uneven_rows.py

Milliseconds per step of an epoch, medians over rounds in which the contestants take
turns.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from fit import keras_contestant
from measuring import (
    Contestants,
    Results,
    measure,
    medians,
    options_parser,
    ratio,
    run_worker,
    use_cores,
)
from models import WORKLOADS
from page import write_page
from tables import markdown_table

ROWS = (64, 63, 62, 61)
DEVICES = (1, 2, 4)
MODELS = ("convolutional", "transformer")
_STEPS = 5


def work(cores: int, devices: int, name: str, rounds: int) -> None:
    """Measures on a number of devices and prints a line of JSON."""
    use_cores("jax", cores, devices)
    import keras_strategies as ks

    names = [f"cpu:{i}" for i in range(devices)]
    strategy = (
        ks.OneDeviceStrategy(names[0]) if devices == 1 else ks.MirroredStrategy(names)
    )
    contestants: Contestants = {
        f"{devices} {rows}": keras_contestant(
            dataclasses.replace(WORKLOADS[name], batch=rows, steps=_STEPS),
            strategy.scope,
        )
        for rows in ROWS
    }
    print(json.dumps(measure(contestants, rounds)))


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["model", "rows", "one device"]
    for count in DEVICES[1:]:
        header += [f"{count} devices", f"beside {ROWS[0]} rows"]
    lines = []
    for name, rounds in results.items():
        ms = medians(rounds)
        for rows in ROWS:
            cells = [name, str(rows), f"{ms[f'1 {rows}']:.1f} ms"]
            for count in DEVICES[1:]:
                cells.append(f"{ms[f'{count} {rows}']:.1f} ms")
                cells.append(
                    ratio(rounds[f"{count} {rows}"], rounds[f"{count} {ROWS[0]}"])
                )
            lines.append(cells)
    return markdown_table(header, lines)


def main() -> None:
    options = options_parser(__doc__, models=MODELS, has_workers=True).parse_args()
    if options.worker:
        work(options.cores, options.devices, options.model, options.rounds)
        return
    results = Results(options.output / "uneven_rows.json")
    for name in options.models:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        found: dict[str, Any] = {}
        for devices in DEVICES:
            found |= run_worker(
                __file__, "jax", 2, name, options.rounds, devices=devices
            )
        results.put(name, found)
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
