"""The first step of large models: plain Keras, Mirrored, and Mirrored without proofs.

A process of its own measures the CPU seconds of `fit` of one batch, and of the next
batch. "Without proofs" takes each layer call to be split by rows, unproved: what the
first step would take if nothing had to be shown. It says nothing for experts with a
capacity, which run unsplit, and for the statistic of StyleGAN's critic, for which
replicas exchange a sum.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Results, Rounds, options_parser, ratio, run_script, use_cores
from page import write_page
from tables import markdown_table

TESTS = Path(__file__).parents[1] / "tests"
MODELS = ("ResNet50", "DenseNet121", "GPT-2 small", "switch transformer", "StyleGAN")
BACKENDS = ("torch", "tensorflow")
PLAIN, MIRRORED, UNPROVED = "plain Keras", "Mirrored", "Mirrored without proofs"
CONTESTANTS = (PLAIN, MIRRORED, UNPROVED)
MIXES_ROWS = ("switch transformer", "StyleGAN")
# Minutes that a process may take.
LIMIT = 20


# --- In the measuring processes -----------------------------------------------


def model_of(name: str) -> tuple[Any, Any, Any]:
    """A compiled model, and two batches of inputs and targets."""
    import keras
    import numpy as np
    from field.recipes.mixing import MinibatchDeviation, switch_transformer
    from keras import layers

    random = np.random.default_rng(0)
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if name in ("ResNet50", "DenseNet121"):
        make = getattr(keras.applications, name)
        model = make(
            weights=None,
            input_shape=(64, 64, 3),
            classes=10,
            classifier_activation=None,
        )
        model.compile(keras.optimizers.SGD(0.01), crossentropy)
        images = random.normal(size=(16, 64, 64, 3)).astype("float32")
        return model, images, random.integers(0, 10, 16)
    if name == "switch transformer":
        model = switch_transformer(
            vocabulary=20000, length=64, width=128, blocks=2, experts=8, tokens=512
        )
        ids = random.integers(0, 20000, (16, 64)).astype("int32")
        return model, ids, random.integers(0, 2, (16, 1)).astype("float32")
    if name == "StyleGAN":
        images = keras.Input((32, 32, 3))
        x = images
        for width in (64, 128, 256):
            x = layers.LeakyReLU()(layers.Conv2D(width, 3, padding="same")(x))
            x = layers.AveragePooling2D(2)(x)
        x = layers.Conv2D(256, 3, padding="same")(MinibatchDeviation()(x))
        model = keras.Model(images, layers.Dense(1)(layers.Flatten()(x)))
        model.compile(keras.optimizers.SGD(0.01), keras.losses.BinaryCrossentropy(True))
        pictures = random.normal(size=(32, 32, 32, 3)).astype("float32")
        return model, pictures, random.integers(0, 2, (32, 1)).astype("float32")
    from field.recipes.sequences import Block, Positions

    vocabulary, width, length = 50257, 768, 16
    ids = keras.Input((length,), dtype="int32")
    x = Positions()(layers.Embedding(vocabulary, width)(ids))
    for _ in range(12):
        x = Block(width, causal=True)(x)
    model = keras.Model(ids, layers.Dense(vocabulary)(x))
    model.compile(keras.optimizers.SGD(0.01), crossentropy)
    tokens = random.integers(0, vocabulary, (8, length)).astype("int32")
    return model, tokens, tokens


def without_proofs() -> None:
    """Takes every call of a model to be split by rows."""
    import keras

    from keras_strategies.rows.row_placements import MEAN, ROWS, SAME, RowProof
    from keras_strategies.rows.row_proofs import RowProofs

    original = RowProofs.of
    by_rows = RowProof(every_output=ROWS, every_loss=MEAN, every_update=SAME)

    def of(self: Any, call: Any, *args: Any) -> tuple[Any, bool]:
        if isinstance(call.layer, keras.Model):
            return by_rows, False
        return original(self, call, *args)

    RowProofs.of = of  # type: ignore[method-assign]


def work(backend: str, contestant: str, name: str) -> None:
    """Prints the CPU seconds of the first and of the next step as JSON."""
    use_cores(backend, 2)
    sys.path.insert(0, str(TESTS))
    import keras_strategies as ks

    if contestant == UNPROVED:
        without_proofs()
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with contextlib.nullcontext() if contestant == PLAIN else strategy.scope():
        model, x, y = model_of(name)
    half = len(x) // 2
    found = []
    for part in (slice(half), slice(half, None)):
        begin = time.process_time()
        model.fit(x[part], y[part], batch_size=half, epochs=1, verbose=0)
        found.append(round(time.process_time() - begin, 3))
    print(json.dumps(found))


# --- In the process that a person starts --------------------------------------


def compare(backend: str, name: str, rounds: int) -> dict[str, list[Rounds]]:
    """For each contestant the first and the next step of all rounds."""
    times: dict[str, list[Rounds]] = {
        each: []
        for each in CONTESTANTS
        if not (each == UNPROVED and name in MIXES_ROWS)
    }
    for _ in range(rounds):
        for contestant, found in times.items():
            arguments = ["--worker", contestant, "--model", f"{backend}/{name}"]
            found.append(
                run_script(__file__, *arguments, backend=backend, timeout=60 * LIMIT)
            )
    return times


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["backend", "model", "plain Keras, CPU s", "Mirrored, CPU s"]
    header += ["without proofs, CPU s", "Mirrored / plain", "Mirrored / without proofs"]
    header += ["next step, Mirrored / plain"]
    rows = []
    for key, found in results.items():
        backend, name = key.split("/")
        first = {each: [pair[0] for pair in found[each]] for each in found}
        cells = [
            f"{median(first[each]):.1f}" if each in first else "-"
            for each in CONTESTANTS
        ]
        unproved = first.get(UNPROVED)
        ratios = [
            ratio(first[MIRRORED], first[PLAIN]),
            "-" if unproved is None else ratio(first[MIRRORED], unproved),
            ratio(*([pair[1] for pair in found[each]] for each in (MIRRORED, PLAIN))),
        ]
        rows.append([backend, name, *cells, *ratios])
    return markdown_table(header, rows)


def main() -> None:
    parser = options_parser(__doc__, BACKENDS, MODELS, has_workers=True)
    options = parser.parse_args()
    if options.worker:
        backend, name = options.model.split("/")
        work(backend, options.worker, name)
        return
    results = Results(options.output / "first_step_large.json")
    for backend in options.backends:
        for name in options.models:
            print(f"measuring {backend}, {name} ...", file=sys.stderr, flush=True)
            results.put(f"{backend}/{name}", compare(backend, name, options.rounds))
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
