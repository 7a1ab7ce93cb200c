"""What `ks.callbacks.Verify` and `ks.verify` cost: processor time of checks and steps.

    python benchmarks/verify_costs.py

On each backend one process trains a model of convolutions on two replicas with `fit`,
and another one a small perceptron, whose steps are mostly calls in Python.
The processor time of all threads of the process is read around an epoch without the
callback, and around checks: the first of each layer, which a backend may compile, and
the next ones. Epochs and checks take turns; medians are given. A step that `ks.verify`
compares is the difference of two calls with more steps and fewer; for fewer, the steps
that it takes are counted, too.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

from measuring import BACKENDS, Results, options_parser, run_script
from models import WORKLOADS
from page import write_page
from tables import markdown_table

ROWS, STEPS, ROUNDS, EVERY = 64, 4, 2, 100
FEW = 4
#: The models, and more steps, which make up for how much compilation differs.
MODELS = {"convolutional": 12, "mlp": 100}


def work(name: str) -> None:
    """Trains a model, checks, and prints a line of JSON."""
    import keras
    import numpy as np

    import keras_strategies as ks
    from keras_strategies.verification.layer_outputs import observed_layers

    strategy, workload = ks.MirroredStrategy(["cpu:0", "cpu:1"]), WORKLOADS[name]

    def build() -> Any:
        model = workload.build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
        return model

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build()
    random = np.random.default_rng(0)
    x = workload.example(random, ROWS * STEPS)
    y = random.integers(0, workload.classes, len(x))

    def epoch() -> None:
        model.fit(x, y, batch_size=ROWS, verbose=0)

    epoch()
    verify = ks.callbacks.Verify(EVERY)
    verify.set_model(model)
    layers = len(observed_layers(model))
    first = [seconds(verify.check) for _ in range(layers)]
    steps, checks = [], []
    for _ in range(ROUNDS):
        steps.append(seconds(epoch) / STEPS)
        checks += [seconds(verify.check) for _ in range(layers)]
    data = {"x": x, "y": y, "batch_size": ROWS, "shuffle": False}

    taken: dict[int, int] = {}

    def verification(steps: int) -> None:
        report = ks.verify(build, data, strategy, steps).raise_if_different()
        taken[steps] = sum(report.steps_taken.values())

    few, more = (seconds(lambda n=n: verification(n)) for n in (FEW, MODELS[name]))
    found: dict[str, Any] = {
        "compared": (more - few) / (MODELS[name] - FEW),
        "taken": taken[FEW] / FEW,
        "step": statistics.median(steps),
        "first": statistics.mean(first),
        "check": statistics.mean(checks),
        "layers": layers,
    }
    print("\n" + json.dumps(found))


def seconds(call: Any) -> float:
    """Processor time of all threads of this process."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def table(results: dict[str, Any]) -> str:
    rows = []
    for name, each in results.items():
        share = each["check"] / (EVERY * each["step"])
        needed = each["first"] / (0.005 * each["step"])
        rows.append(
            [
                name,
                f"{1000 * each['step']:.0f} ms",
                f"{1000 * each['check']:.1f} ms",
                f"{100 * share:.2f} %",
                f"{1000 * each['first']:.0f} ms",
                f"{max(EVERY, round(needed))}",
                f"{each['taken']:.1f}",
                f"{each['compared'] / each['step']:.1f}",
            ]
        )
    header = ["", "step", "check", "share of 100 steps", "first check of a layer"]
    header += ["steps until the next", "steps that `ks.verify` takes for one of 4"]
    header += ["time for one, in steps"]
    return markdown_table(header, rows)


def main() -> None:
    options = options_parser(__doc__, BACKENDS, MODELS, has_workers=True).parse_args()
    if options.worker:
        work(options.model)
        return
    results = Results(options.output / "verify_costs.json")
    for backend in options.backends:
        for name in options.models:
            arguments = "--worker", "1", "--model", name
            found = run_script(__file__, *arguments, backend=backend)
            results.put(f"{backend}, {name}", found)
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
