"""What the ring of events costs: a share of a step of the perceptron.

    python benchmarks/recording_costs.py

On each backend one process trains on two replicas, and two workers train on one each,
with `fit`. Events of a step are counted in the ring of worker 0. What they cost is
measured in the same process after training: the least CPU time of a thousand events,
in rounds, by kind, the counts of rows and of the worker's position included. The step
is one of the shortest, the 5th percentile of its time in training, as other work on
the machine makes steps longer. Not included: the look at the script's line twice a
second (`places.py`, some microseconds).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from measuring import BACKENDS, Results, options_parser, run_script
from models import perceptron
from page import write_page
from tables import markdown_table

ROWS, STEPS, EPOCHS = 64, 200, 3
_EVENTS = 1000


def work(workers: int) -> None:
    """Trains, and prints a line of JSON on worker 0."""
    import keras
    import numpy as np

    import keras_strategies as ks

    strategy: Any
    if workers > 1:
        strategy = ks.MultiWorkerMirroredStrategy()
    else:
        strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = perceptron()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    x = np.random.rand(ROWS * STEPS, 64).astype("float32")
    y = np.random.randint(0, 10, len(x))
    model.fit(x, y, batch_size=ROWS, epochs=EPOCHS, verbose=0)
    found = counted(len(x))
    if workers == 1 or strategy.cluster_resolver.task_id == 0:
        print("\n" + json.dumps(found))


def counted(rows: int) -> dict[str, Any]:
    """The events of the last epoch's steps, and what they cost."""
    from keras_strategies.timeline import recording, ring

    recorder = recording.start()
    records = recorder.ring.records()
    last = max(step for *_, step in records)
    since = last - STEPS // 2
    begun = sorted(s for s, _, kind, _, n in records if kind == ring.STEP and n > since)
    gaps = [after - before for before, after in itertools.pairwise(begun)]
    kinds = [kind for *_, kind, _, step in records if since < step <= last]
    events = {
        name: kinds.count(kind) / (STEPS // 2)
        for kind, name in ((ring.STEP, "compute"), (ring.DATA, "data"))
    }
    events["wait"] = kinds.count(ring.WAIT) / (STEPS // 2)
    costs = costs_of(recorder)
    micro = sum(events[name] * costs[name] for name in events) + costs["counts"]
    step = sorted(gaps)[len(gaps) // 20] / 1e3
    return {"events": events, "costs": costs, "cost": micro, "step": step}


def costs_of(recorder: Any) -> dict[str, float]:
    """Microseconds of an event of each kind, and of the counts of a step."""
    import numpy as np

    from keras_strategies.timeline import recording

    step = recording.recorded_step(lambda: None)
    batch = (np.zeros([ROWS, 1]), np.zeros([ROWS]))

    def data() -> None:
        with recording.DATA:
            pass

    def wait() -> None:
        recorder.waiting()
        recorder.waited()

    def counts() -> None:
        recording.count_rows(batch)
        recorder.position(1, 2)
        recorder.position(1, 3)

    calls = {"compute": step, "data": data, "wait": wait, "counts": counts}
    return {name: _microseconds(call) for name, call in calls.items()}


def _microseconds(call: Callable[[], Any]) -> float:
    found = []
    for _ in range(20):
        begin = time.thread_time()
        for _ in range(_EVENTS):
            call()
        found.append(time.thread_time() - begin)
    return 1e6 * min(found) / _EVENTS


def of_workers(backend: str) -> dict[str, Any]:
    """What two workers print."""
    command = [sys.executable, "-m", "keras_strategies", "launch", "--workers", "2"]
    command += [__file__, "--worker", "2"]
    environment = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    output = subprocess.run(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    line = next(line for line in output.splitlines() if '"events"' in line)
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    return found


def table(results: dict[str, Any]) -> str:
    rows = []
    for name, each in results.items():
        events = each["events"]
        rows.append(
            [
                name,
                f"{each['step'] / 1000:.2f} ms",
                " + ".join(f"{events[kind]:.1f}" for kind in ("compute", "data")),
                f"{events['wait']:.1f}",
                f"{each['cost']:.1f} us",
                f"{100 * each['cost'] / each['step']:.2f} %",
            ]
        )
    header = ["", "step", "events: steps, reads", "waits", "cost", "share"]
    return markdown_table(header, rows)


def main() -> None:
    options = options_parser(__doc__, BACKENDS, has_workers=True).parse_args()
    if options.worker:
        work(int(options.worker))
        return
    results = Results(options.output / "recording_costs.json")
    for backend in options.backends:
        found = run_script(__file__, "--worker", "1", backend=backend)
        results.put(f"{backend}, 2 replicas", found)
        results.put(f"{backend}, 2 workers", of_workers(backend))
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
