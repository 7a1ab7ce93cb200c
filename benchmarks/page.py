"""Writes the tables of docs/benchmarks.md and of the README from benchmarks/results.

    python benchmarks/page.py            # write
    python benchmarks/page.py --check    # exit with 1 if a page differs from results

A table stands between the lines `<!-- measured: NAME -->` and `<!-- end -->`.
Benchmarks call `write_page` when they have written their results.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from measuring import RESULTS, Results, ratio
from tables import markdown_table

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "README.md")
_BLOCK = re.compile(r"(<!-- measured: ([\w, ]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def whole(file: str, table: Callable[[Any], str]) -> str:
    """A table of a results file, and the conditions of each of its parts."""
    results = Results(RESULTS / f"{file}.json")
    if not results.values:
        return "Not measured yet."
    return f"{table(results.values)}\n\n{measured(results.conditions_of())}"


def part(file: str, name: str, table: Callable[[Any], str]) -> str:
    """A table of one part of a results file, and its conditions."""
    results = Results(RESULTS / f"{file}.json")
    return f"{table(results.values[name])}\n\n{measured(results.conditions_of(name))}"


def measured(conditions: dict[str, dict[str, Any]]) -> str:
    """One line for each of the conditions under which parts were measured."""
    by_text: dict[str, list[str]] = {}
    for name, found in conditions.items():
        by_text.setdefault(_text(found), []).append(name)
    if len(by_text) == 1:
        return f"Measured: {next(iter(by_text))}."
    lines = [f"- {'; '.join(names)}: {text}." for text, names in by_text.items()]
    return "\n".join(["Measured:", "", *lines])


def _text(found: dict[str, Any]) -> str:
    known = [
        found["date"],
        f"commit {found['commit']}",
        found.get("gpu", ""),
        found["cpu"],
        f"{found['cores']} cores",
        ", ".join(f"{name} {version}" for name, version in found["versions"].items()),
    ]
    return "; ".join(filter(None, known))


def summary() -> str:
    """Rows of `fit` and of parameter servers, for the README."""
    from parameter_server import PEER, best_way

    fits = Results(RESULTS / "fit.json")
    servers = Results(RESULTS / "parameter_server.json")
    compared = (
        ("jax", "convolutional", "DataParallel", "Keras `DataParallel`"),
        ("torch", "convolutional", "DDP", "DDP"),
        ("torch", "transformer", "DDP", "DDP"),
        ("tensorflow", "convolutional", "tf.distribute", "`tf.distribute`"),
    )
    rows = []
    for backend, model, peer, shown in compared:
        found = fits.values.get(f"{backend}, {model}")
        if found is None:  # A run with a part of the models.
            continue
        ours, theirs = found["mirrored"], found[peer]
        cells = [f"{median(ours):.1f} ms", f"{shown}, {median(theirs):.1f} ms"]
        cells.append(ratio(theirs, ours))
        rows.append([f"`fit`, {model}, 2 replicas", backend, *cells])
    speed = servers.values["speed"].get("sparse", {})
    if {"tensorflow", PEER} <= speed.keys():
        ours, theirs = (best_way(speed[side]) for side in ("tensorflow", PEER))
        cells = [f"{median(ours):.1f} steps/s"]
        cells += [f"`tf.distribute`, {median(theirs):.1f} steps/s", ratio(ours, theirs)]
        rows.append(["parameter servers, sparse model", "tensorflow", *cells])
    return markdown_table(
        ["workload", "backend", "this package", "peer", "ratio"], rows
    )


def table(name: str) -> str:
    """The Markdown of one block."""
    import batch_comparison
    import communication
    import compiled_calls
    import elasticity
    import faults
    import first_step
    import first_step_large
    import fit
    import fit_gpu
    import fsdp
    import lead_costs
    import loops
    import memory
    import mixing_rows
    import model_parallel
    import parameter_server as ps
    import parameter_server_sizes
    import presets
    import python_time
    import random_numbers
    import ratios
    import recording_costs
    import slow_input
    import snapshots
    import start
    import two_workers
    import uneven_rows
    import verify_costs
    import without_strategy

    file, _, what = name.partition(", ")
    if file == "parameter servers":
        return part("parameter_server", what, ps.TABLES[what])
    if file == "snapshots":
        tables = {"pauses": snapshots.pauses_table, "kills": snapshots.kills_table}
        return part("snapshots", what, tables[what])
    if file == "model parallelism":
        tables = {
            "times": model_parallel.times_table,
            "memory": model_parallel.memory_table,
            "tensorflow": model_parallel.tensorflow_table,
            "torch": model_parallel.torch_table,
        }
        return part("model_parallel", what, tables[what])
    if file == "ratios":
        return ratios.TABLES[what]()
    if file == "soak":
        return whole("soak", lead_costs.soak_table)
    if (file, what) == ("presets", "speed"):
        return whole("presets_speed", presets.speed_table)
    if file == "fsdp memory":
        return whole("fsdp_memory", fsdp.memory_table)
    modules = {
        "batch comparison": batch_comparison,
        "communication": communication,
        "compiled calls": compiled_calls,
        "elasticity": elasticity,
        "fit": fit,
        "fsdp": fsdp,
        "lead costs": lead_costs,
        "loops": loops,
        "faults": faults,
        "memory": memory,
        "mixing rows": mixing_rows,
        "parameter server sizes": parameter_server_sizes,
        "presets": presets,
        "python time": python_time,
        "random numbers": random_numbers,
        "recording costs": recording_costs,
        "slow input": slow_input,
        "start": start,
        "first step": first_step,
        "first step large": first_step_large,
        "fit gpu": fit_gpu,
        "two workers": two_workers,
        "uneven rows": uneven_rows,
        "verify costs": verify_costs,
        "without strategy": without_strategy,
    }
    if file in modules:
        return whole(file.replace(" ", "_"), modules[file].table)
    assert file == "summary"
    return summary()


def rewritten(text: str) -> str:
    """A page with the tables of the results as they are now."""
    return _BLOCK.sub(
        lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", text
    )


def write_page(output: Path) -> None:
    """Writes the pages, unless results were written elsewhere than to `RESULTS`."""
    if output == RESULTS:
        for page in PAGES:
            page.write_text(rewritten(page.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        write_page(RESULTS)
        return
    old = [str(p) for p in PAGES if rewritten(p.read_text()) != p.read_text()]
    if old:
        sys.exit(f"Run `python benchmarks/page.py`: {', '.join(old)} differ.")


if __name__ == "__main__":
    main()
