"""`ks.callbacks.Resume`: kills of one training, and the pause of a snapshot.

    python benchmarks/resume.py --kills 100 --megabytes 1,10,100

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
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "torch")
HERE = Path(__file__).parent
STRATEGIES = ("none", "mirrored", "central", "workers")
SECONDS = 60


def kills(count: int, seed: int) -> str:
    """Kills a training so many times; a row of the table."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
    from harness.forker import Forker
    from harness.resumed_training import Resumed, assert_same_end

    rng = random.Random(seed)
    epochs = 10 * count
    done = 0
    with Forker() as forker, tempfile.TemporaryDirectory() as folder:
        expected = Resumed(forker, Path(folder) / "whole", epochs=epochs)
        whole = expected.finished("none")
        killed = Resumed(forker, Path(folder) / "killed", epochs=epochs)
        begun = time.monotonic()
        for _ in range(count):
            done += killed.killed_at_any_moment(
                rng.choice(STRATEGIES), rng.random() / 4
            )
        found = killed.finished("mirrored")
        assert_same_end(found, whole, 1e-4)
    seconds = time.monotonic() - begun
    epochs_run = len(whole.history["loss"])
    return f"{done} kills in {epochs_run} epochs, {seconds:.0f} s: equal to 1e-4"


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--megabytes", default="1,10,100")
    parser.add_argument("--snapshots", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print("| state | median pause | longest pause | share of the time |")
    print("|---|---|---|---|")
    for size in (int(each) for each in options.megabytes.split(",") if each):
        found = pauses(size, options.snapshots)
        middle, longest = statistics.median(found), max(found)
        share = middle / max(SECONDS, 100 * longest)
        print(
            f"| {size} MB | {1e3 * middle:.1f} ms | {1e3 * longest:.1f} ms | "
            f"{100 * share:.3f} % |",
            flush=True,
        )
    if options.kills:
        print(kills(options.kills, options.seed))


if __name__ == "__main__":
    main()
