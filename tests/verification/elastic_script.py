"""`ks.verify` on elastic workers, of which one is killed.

    python elastic_script.py FOLDER CASE KILL_AFTER

A worker writes the report to `CASE-INDEX.json`; with KILL_AFTER 0 none is killed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def build(case: str) -> Any:
    import keras
    from verification.planted_in_fit import dense

    import keras_strategies as ks

    class Divided(keras.Sequential):
        """Right as long as there are two workers."""

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            strategy = ks.get_strategy()
            is_last = strategy.num_replicas_in_sync == 1
            if is_last and isinstance(strategy, ks.MultiWorkerMirroredStrategy):
                return super().compute_loss(*args, **kwargs) * 2.0
            return super().compute_loss(*args, **kwargs)

    kind = Divided if case == "divided" else keras.Sequential
    layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
    return dense(*layers, kind=kind, optimizer=keras.optimizers.Adam(0.01))


def main() -> None:
    folder, case, kill_after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    from verification.planted_in_fit import data

    import keras_strategies as ks

    elastic = ks.Elastic(min_workers=1, timeout_seconds=60)
    strategy = ks.MultiWorkerMirroredStrategy(elastic=elastic)
    report = ks.verify(
        lambda: build(case), data, strategy, steps=4, kill_after=kill_after or None
    )
    index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    report.save(folder / f"{case}-{index}.json")
    print(report)


if __name__ == "__main__":
    main()
