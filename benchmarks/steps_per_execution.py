"""`compile(steps_per_execution=k)` on JAX: one call of Keras's loop for k steps.

A process pinned to one core trains plain Keras and OneDeviceStrategy in turn, and one
with two cores `keras.distribution.DataParallel` and MirroredStrategy on two CPU
replicas, for k of 1, 10 and 100. Keras 3.15 calls a program for each step from Python,
3.16 one `lax.scan` for all k. Run it with each version; results of both are kept:

    python benchmarks/steps_per_execution.py
    .venv-nightly/bin/python benchmarks/steps_per_execution.py

Milliseconds per step of an epoch, medians over rounds in which the contestants take
turns. Ratios above 1 mean that ours is faster.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from fit import keras_contestant, no_scope
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
from models import WORKLOADS, Workload
from page import write_page
from tables import markdown_table

STEPS = (1, 10, 100)
MODELS = ("mlp",)
_STEPS_OF_EPOCH = 300
_BATCH = 64


@dataclasses.dataclass(frozen=True)
class _Several(Workload):
    """A workload with a model that runs several steps for each call."""

    steps_per_execution: int = 1

    def compiled(self) -> Any:
        model = super().compiled()
        model.compile(
            model.optimizer, model.loss, steps_per_execution=self.steps_per_execution
        )
        return model


def workload(name: str, per_call: int) -> Workload:
    known = WORKLOADS[name]
    return _Several(
        name,
        known.build,
        known.example,
        _BATCH,
        _STEPS_OF_EPOCH,
        per_call,
    )


def work(cores: int, name: str, rounds: int) -> None:
    """Measures on one or two cores and prints a line of JSON."""
    use_cores("jax", cores)
    import keras

    import keras_strategies as ks

    scopes: dict[str, Callable[[], Any]]
    if cores == 1:
        scopes = {"plain": no_scope, "one_device": ks.OneDeviceStrategy("cpu:0").scope}
    else:
        devices = ["cpu:0", "cpu:1"]
        peer = keras.distribution.DataParallel(devices=devices)
        scopes = {
            "DataParallel": peer.scope,
            "mirrored": ks.MirroredStrategy(devices).scope,
        }
    contestants: Contestants = {
        f"{contestant} {k}": keras_contestant(workload(name, k), scope)
        for k in STEPS
        for contestant, scope in scopes.items()
    }
    print(json.dumps(measure(contestants, rounds)))


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["Keras", "model", "steps per call", "plain Keras, 1 core", "OneDevice"]
    header += ["plain / ours", "DataParallel, 2 cores", "Mirrored"]
    header += ["DataParallel / ours"]
    rows = []
    for version, models in results.items():
        for name, rounds in models.items():
            ms = medians(rounds)
            for k in STEPS:
                cells = [version, name, str(k)]
                for peer, ours in (
                    ("plain", "one_device"),
                    ("DataParallel", "mirrored"),
                ):
                    cells += [f"{ms[f'{each} {k}']:.2f} ms" for each in (peer, ours)]
                    cells.append(ratio(rounds[f"{peer} {k}"], rounds[f"{ours} {k}"]))
                rows.append(cells)
    return markdown_table(header, rows)


def main() -> None:
    options = options_parser(__doc__, models=MODELS, has_workers=True).parse_args()
    if options.worker:
        work(options.cores, options.model, options.rounds)
        return
    import keras

    results = Results(options.output / "steps_per_execution.json")
    print(f"measuring Keras {keras.__version__} ...", file=sys.stderr, flush=True)
    found = {
        name: run_worker(__file__, "jax", 1, name, options.rounds)
        | run_worker(__file__, "jax", 2, name, options.rounds)
        for name in options.models
    }
    results.put(".".join(keras.__version__.split(".")[:2]), found)
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
