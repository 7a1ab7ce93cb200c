"""`ks.callbacks.Resume`: kills of one training, and the pause of a snapshot.

    python benchmarks/snapshots.py --kills 100 --megabytes 1,10,100

All processes of a training are killed at random moments, one time after the other, with
a strategy and a number of workers that are drawn again. At the end weights, `History`,
log and best checkpoint are compared with those of a training without interruption.

A pause is the time in which a snapshot stops training. Its share is that of the default
interval of 60 seconds, or of 100 pauses, whichever is longer.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from measuring import RESULTS, Results
from page import write_page
from tables import markdown_table

os.environ.setdefault("KERAS_BACKEND", "torch")
HERE = Path(__file__).parent
STRATEGIES = ("none", "mirrored", "central", "workers", "three workers")
SECONDS = 60
#: Seconds between the first step of a process and its end.
SPAN = 0.6
#: Of weights, losses and metrics at the end.
TOLERANCE = 1e-4


def kills(count: int, seed: int) -> dict[str, Any]:
    """Kills a training so many times, and compares its end with another one's."""
    # After this folder: packages of the tests have names of its modules.
    sys.path += [str(HERE.parent), str(HERE.parent / "tests")]
    from harness.forker import Forker
    from resume.resumed_training import Resumed, assert_same_end

    rng = random.Random(seed)
    epochs = 5 * count
    done: Counter[str] = Counter()
    with Forker() as forker, tempfile.TemporaryDirectory() as folder:
        expected = Resumed(forker, Path(folder) / "whole", epochs=epochs)
        whole = expected.finished("none")
        killed = Resumed(forker, Path(folder) / "killed", epochs=epochs)
        begun = time.monotonic()
        while sum(done.values()) < count:
            strategy = rng.choice(STRATEGIES)
            # Until the next process, so that all of them train.
            if not killed.killed_at_any_moment(strategy, SPAN * rng.random()):
                break
            done[strategy] += 1
        found = killed.finished("mirrored")
        assert found.trained < whole.trained, "no snapshot was written in time"
        assert_same_end(found, whole, TOLERANCE)
    return {
        "kills": dict(done),
        "seconds": time.monotonic() - begun,
        "epochs": len(whole.history["loss"]),
        "steps": whole.trained,
        "steps before the last kill": whole.trained - found.trained,
        "tolerance": TOLERANCE,
    }


def pauses(megabytes: int, count: int) -> list[float]:
    """Seconds of each pause, for a model of a size in MB with Adam's two slots."""
    import keras
    import numpy as np

    import keras_strategies as ks

    units = max(1, megabytes * 2**20 // 4 // 3 // 1024)
    model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(units)])
    model.compile("adam", "mse")
    x = np.zeros((8, 1024), "float32")
    y = np.zeros((8, units), "float32")
    with tempfile.TemporaryDirectory() as folder:
        resume = ks.callbacks.Resume(folder, every_steps=5)
        model.fit(x, y, batch_size=1, epochs=count, verbose=0, callbacks=[resume])
    return list(resume.pauses)


def pauses_table(results: dict[str, list[float]]) -> str:
    """Pauses by the size of the state, as a Markdown table."""
    header = ["state", "median pause", "longest pause", "share of the time"]
    rows = []
    for size, found in results.items():
        middle, longest = statistics.median(found), max(found)
        share = middle / max(SECONDS, 100 * longest)
        times = [f"{1e3 * seconds:.1f} ms" for seconds in (middle, longest)]
        rows.append([f"{size} MB", *times, f"{100 * share:.3f} %"])
    return markdown_table(header, rows)


def kills_table(found: dict[str, Any]) -> str:
    """Kills of one training by strategy, as a Markdown table."""
    names = {"none": "without a strategy"}
    kills = found["kills"]
    rows = [[names.get(name, name), str(count)] for name, count in kills.items()]
    rows.append(["all", str(sum(kills.values()))])
    return markdown_table(["killed under", "kills"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--megabytes", default="1,10,100")
    parser.add_argument("--snapshots", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    known = Results(options.output / "snapshots.json")
    sizes = [int(each) for each in options.megabytes.split(",") if each]
    if sizes:
        found = {str(size): pauses(size, options.snapshots) for size in sizes}
        known.put("pauses", found)
        print(pauses_table(found), flush=True)
    if options.kills:
        known.put("kills", kills(options.kills, options.seed))
        print(kills_table(known.values["kills"]))
    write_page(options.output)


if __name__ == "__main__":
    main()
