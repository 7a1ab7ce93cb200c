"""Parameter servers: ours on each backend against TensorFlow's own with `tf_keras`.

Two workers and one server, each a process, and the coordinator share this machine's
cores. Both sides train the same models on the same arrays in memory; every number is
the median over launches of the steps per second of all workers together, after an epoch
that warms up. Launches of both sides take turns. Ratios above 1 mean that ours is
faster than the better way of TensorFlow's.

It needs `tf_keras` of TensorFlow's version (`pip install --no-deps tf_keras==2.21.0`),
since `tf.distribute.ParameterServerStrategy` cannot train a model of Keras 3.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from measuring import (
    BACKENDS,
    Results,
    Rounds,
    medians,
    names,
    options_parser,
    picture_path,
    ratio,
    run_script,
)
from page import write_page
from tables import markdown_table

HERE = Path(__file__).parent
PEER = "tf.distribute"
MODELS = ("sparse", "dense")
CURVES = {
    "ours": "curve-ours",
    "ours, pull_ahead=False": "curve-fresh",
    "tf.distribute": "curve-tensorflow",
    "one device": "curve-one-device",
}


def run(script: str, *arguments: str, backend: str) -> Any:
    """Runs a script of this folder, which prints JSON at its end."""
    return run_script(HERE / script, *arguments, backend=backend, timeout=600)


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Steps per second, of every launch."""
    sides = [(PEER, "tensorflow"), *((name, name) for name in options.backends)]
    found: dict[str, Any] = {model: {} for model in options.models}
    for number in range(options.rounds):
        for model in options.models:
            for side, backend in sides:
                say(f"launch {number + 1} of {options.rounds}: {model}, {side}")
                kind = "tensorflow" if side == PEER else "ours"
                launch = run(
                    "parameter_server_contestants.py", kind, model, backend=backend
                )
                say(str(launch))
                for way, value in launch.items():
                    found[model].setdefault(side, {}).setdefault(way, []).append(value)
    return found


def part(name: str) -> Any:
    """A part that is measured on JAX alone: it is not about the backend."""

    def measure(options: argparse.Namespace) -> Any:
        say(name)
        return run("parameter_server_parts.py", name, backend=options.backends[0])

    return measure


def curves(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name, script in CURVES.items():
        say(f"loss of {name}")
        backend = "tensorflow" if name == PEER else options.backends[0]
        found[name] = run("parameter_server_parts.py", script, backend=backend)
    return found


def rates(options: argparse.Namespace) -> dict[str, Any]:
    return {
        backend: run("parameter_server_rates.py", backend=backend)
        for backend in options.backends
    }


def faults(options: argparse.Namespace) -> dict[str, Any]:
    return {
        backend: run("parameter_server_parts.py", "faults", backend=backend)
        for backend in options.backends
    }


PARTS = {
    "speed": speed,
    "bytes": part("bytes"),
    "scaling": part("scaling"),
    "curves": curves,
    "rates": rates,
    "faults": faults,
}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- What a person reads ------------------------------------------------------


def best_way(launches: dict[str, Rounds]) -> Rounds:
    """Steps per second of the faster way of a side, by launch."""
    return [max(found) for found in zip(*launches.values(), strict=True)]


def speed_table(found: dict[str, Any]) -> str:
    header = ["model", "side", "`fit`", "10 steps per execution", "loop by hand"]
    header += ["ours / its better way"]
    rows = []
    for model, sides in found.items():
        for side, launches in sides.items():
            values = medians(launches)
            ways = ("fit, 1 per call", "fit, 10 per call", "coordinator")
            cells = [f"{values[way]:.1f}" if way in values else "" for way in ways]
            if side != PEER:
                cells.append(ratio(best_way(launches), best_way(sides[PEER])))
            rows.append([model, side, *cells])
    return markdown_table(header, rows)


def pairs_table(found: dict[str, float], what: str, unit: str) -> str:
    rows = [[name, f"{value:,.1f}"] for name, value in found.items()]
    return markdown_table([what, unit], rows)


def curves_table(found: dict[str, Rounds]) -> str:
    """The largest difference of each loss from that of one device, in an epoch."""
    rows = []
    for name in (each for each in CURVES if each != "one device"):
        pairs = zip(found[name], found["one device"], strict=True)
        rows.append([name, f"{100 * max(abs(a / b - 1) for a, b in pairs):.0f} %"])
    return markdown_table(["side", "largest difference"], rows)


def rates_table(found: dict[str, Any]) -> str:
    measured = next(iter(next(iter(found.values())).values()))
    rows = [
        [backend, workers, *(f"{value:,.4g}" for value in each.values())]
        for backend, by_workers in found.items()
        for workers, each in by_workers.items()
    ]
    return markdown_table(["backend", "workers", *measured], rows)


def faults_table(found: dict[str, Any]) -> str:
    rows = []
    for name in next(iter(found.values())):
        cells = [
            f"{each[name]['seconds']:.1f} s, {each[name]['lost']:.0f} steps lost"
            for each in found.values()
        ]
        rows.append([name, *cells])
    return markdown_table(["fault", *found], rows)


TABLES = {
    "speed": speed_table,
    "bytes": lambda found: pairs_table(found, "rows of the table", "bytes/step"),
    "scaling": lambda found: pairs_table(found, "cluster", "steps/s"),
    "curves": curves_table,
    "rates": rates_table,
    "faults": faults_table,
}


def plot(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7))
    (speeds, moved), (scaled, losses) = axes
    for i, (model, sides) in enumerate(results.get("speed", {}).items()):
        peer = best_way(sides[PEER])
        ratios = []
        for best in map(best_way, sides.values()):
            pairs = zip(best, peer, strict=True)
            ratios.append(statistics.median(own / other for own, other in pairs))
        speeds.bar([j + 0.4 * i for j in range(len(sides))], ratios, 0.38, label=model)
        speeds.set_xticks([j + 0.2 for j in range(len(sides))], list(sides))
    speeds.axhline(1, color="black", linewidth=0.8)
    speeds.set_title("speed, TensorFlow's better way = 1")
    if results.get("bytes"):
        rows = [int(name) for name in results["bytes"]]
        moved.loglog(rows, list(results["bytes"].values()), "o-", label="a step moves")
        moved.loglog(rows, [r * 64 * 4 for r in rows], ":", label="the table has")
        moved.set_xlabel("rows of the table")
    moved.set_title("bytes")
    scaling = results.get("scaling", {})
    scaled.bar([name.replace(", ", "\n") for name in scaling], list(scaling.values()))
    scaled.tick_params(axis="x", labelsize=7)
    cores = len(os.sched_getaffinity(0))
    scaled.set_title(f"steps/s of the sparse model, {cores} cores in all")
    for name, values in results.get("curves", {}).items():
        losses.plot(range(1, len(values) + 1), values, label=name)
    losses.set_xlabel("epoch")
    losses.set_title("loss")
    for axis in (speeds, moved, losses):
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = options_parser(__doc__, BACKENDS, MODELS)
    parser.add_argument("--parts", type=names, default=list(PARTS))
    options = parser.parse_args()
    results = Results(options.output / "parameter_server.json")
    for name in options.parts:
        found = PARTS[name](options)
        # Models and backends that were left out keep what they had.
        results.put(name, {**results.values.get(name, {}), **found})
    plot(results.values, picture_path(options.output, "parameter_server.png"))
    for name, table in TABLES.items():
        if name in results.values:
            print(table(results.values[name]), end="\n\n")
    write_page(options.output)


if __name__ == "__main__":
    main()
