"""The first step on TensorFlow: tracing and the first execution of its program.

A program for two replicas is traced, optimized by TensorFlow and placed before it runs.
For each model a process of its own measures the first epoch of `fit`, of one batch:
plain Keras, `tf.distribute.MirroredStrategy` with two replicas, and our
MirroredStrategy with two replicas, in turn. Every number is the median over rounds of
the CPU seconds of the process, in which other work on the machine counts less than in
wall time; ratios have the range of the rounds. Models are tiny, so nearly all of it is
a fixed cost.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Results, Rounds, options_parser, ratio, use_cores
from page import write_page
from tables import markdown_table

TESTS = Path(__file__).parents[1] / "tests"
MODELS = ("gpt2", "bert", "vit", "resnet", "vae", "mixture_of_experts", "wgan_gp")
CONTESTANTS = ("plain Keras", "tf.distribute", "Mirrored")
ROWS = 8
# Minutes that a process may take: `tf.distribute` raises for some of the models.
LIMIT = 10


# --- In the measuring processes -----------------------------------------------


def scope_of(contestant: str) -> Any:
    """The scope in which a contestant makes its model."""
    import tensorflow as tf

    import keras_strategies as ks

    devices = ["cpu:0", "cpu:1"]
    if contestant == "tf.distribute":
        return tf.distribute.MirroredStrategy(devices).scope()
    if contestant == "Mirrored":
        return ks.MirroredStrategy(devices).scope()
    return contextlib.nullcontext()


def work(contestant: str, name: str) -> None:
    """Measures one first epoch and prints a line of JSON."""
    use_cores("tensorflow", 2)
    sys.path.insert(0, str(TESTS))
    from field import models, recipes

    cases = {case.name: case for case in (*models.CASES, *recipes.CASES)}
    case = cases[name]
    with scope_of(contestant):
        model = case.build()
    given = case.feed(case.data(ROWS), ROWS)
    given.pop("steps", None)
    begin = time.process_time()
    model.fit(**given, epochs=1, shuffle=False, verbose=0)
    print(json.dumps(time.process_time() - begin))


# --- In the process that a person starts --------------------------------------


def measured(contestant: str, name: str) -> float | None:
    """CPU seconds of a new process; None where it raises."""
    command = [sys.executable, __file__, "--worker", contestant, "--model", name]
    environment = {
        **os.environ,
        "KERAS_BACKEND": "tensorflow",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    process = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60 * LIMIT,
        check=False,
    )
    if process.returncode:
        error = process.stderr.strip().splitlines()[-1:]
        print(f"{contestant}, {name}: {error}", file=sys.stderr)
        return None
    return float(json.loads(process.stdout.splitlines()[-1]))


def compare(name: str, rounds: int) -> dict[str, Rounds | None]:
    """The times of all contestants in rounds in which they take turns."""
    times: dict[str, list[float | None]] = {each: [] for each in CONTESTANTS}
    for _ in range(rounds):
        for contestant, found in times.items():
            if None not in found:
                found.append(measured(contestant, name))
    return {
        contestant: None if None in found else [round(float(each), 3) for each in found]  # type: ignore[arg-type]
        for contestant, found in times.items()
    }


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["model", "plain Keras, CPU s", "`tf.distribute`, 2 replicas"]
    header += ["Mirrored, 2 replicas", "Mirrored / plain"]
    header += ["Mirrored / `tf.distribute`"]
    rows = []
    for name, found in results.items():
        plain, peer, ours = (found[each] for each in CONTESTANTS)
        shown = "raises" if peer is None else f"{median(peer):.2f}"
        beside_peer = "-" if peer is None else ratio(ours, peer)
        cells = [f"{median(plain):.2f}", shown, f"{median(ours):.2f}"]
        rows.append([name, *cells, ratio(ours, plain), beside_peer])
    return markdown_table(header, rows)


def main() -> None:
    options = options_parser(__doc__, models=MODELS, has_workers=True).parse_args()
    if options.worker:
        work(options.worker, options.model)
        return
    results = Results(options.output / "first_step.json")
    for name in options.models:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        results.put(name, compare(name, options.rounds))
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
