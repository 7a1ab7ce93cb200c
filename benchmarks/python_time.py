"""Time of Python in a step on Torch: replicas as threads, and as processes.

A transformer of six blocks with dropout, so narrow that arithmetic takes little, trains
with `fit` under `MirroredStrategy` on 1, 2, 4 and 8 virtual CPU devices, each with 4
rows. Measured is the processor time of the first process in a step: the time that its
replicas, which have one interpreter, take at least, however fast the devices are. It
does not depend on how many cores there are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from measuring import (
    Results,
    Rounds,
    measure,
    names,
    numbers_of,
    options_parser,
    ratio,
)
from page import write_page
from tables import markdown_table

REPLICAS = (1, 2, 4, 8)
KINDS = ("threads", "processes")
#: Rows of each replica, and steps of an epoch.
ROWS, STEPS = 4, 10
BLOCKS, WIDTH, WORDS, LENGTH = 6, 16, 100, 8


def transformer() -> Any:
    from keras import Input, Model, layers

    inputs = Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(inputs)
    for _ in range(BLOCKS):
        attended = layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(attended))
        wide = layers.Dense(2 * WIDTH, "gelu")(x)
        hidden = layers.Dropout(0.1)(layers.Dense(WIDTH)(wide))
        x = layers.LayerNormalization()(x + hidden)
    return Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


def train(kind: str, replicas: int, rounds: int) -> Rounds:
    """Milliseconds of the processor time of this process in a step, by round."""
    import keras
    import numpy as np
    import torch

    import keras_strategies as ks

    torch.set_num_threads(1)
    strategy = ks.MirroredStrategy(
        [f"cpu:{i}" for i in range(replicas)],
        processes=kind == "processes" and replicas > 1,
    )
    with strategy.scope():
        model = transformer()
        model.compile(
            keras.optimizers.SGD(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    rows = ROWS * replicas * STEPS
    x = np.random.default_rng(0).integers(0, WORDS, (rows, LENGTH))

    def epoch() -> float:
        began = time.process_time()
        model.fit(x, x[:, 0] % 2, batch_size=ROWS * replicas, verbose=0)
        return (time.process_time() - began) / STEPS * 1000

    return measure({kind: epoch}, rounds)[kind]


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["replicas", "threads", "processes", "threads / processes"]
    rows = []
    for replicas, found in results.items():
        cells = [f"{sorted(found[k])[len(found[k]) // 2]:.0f} ms" for k in KINDS]
        rows.append([replicas, *cells, ratio(found["threads"], found["processes"])])
    return markdown_table(header, rows)


def main() -> None:
    parser = options_parser(__doc__)
    parser.add_argument("--replicas", type=names, default=list(map(str, REPLICAS)))
    parser.add_argument("--kind", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.kind:
        [replicas] = options.replicas
        print(json.dumps(train(options.kind, int(replicas), options.rounds)))
        return
    known = Results(options.output / "python_time.json")
    for replicas in options.replicas:
        found = {}
        for kind in KINDS:
            print(f"{replicas} replicas, {kind} ...", file=sys.stderr, flush=True)
            arguments = ["--kind", kind, "--replicas", replicas]
            found[kind] = numbers_of(
                __file__, [*arguments, "--rounds", str(options.rounds)]
            )
        known.put(replicas, found)
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
