"""One backend's process of the matrix of `test_matrix.py`: it saves, or goes on.

    python one_backend.py FOLDER save jax-mirrored:keras,loop torch-default:backup ...
    python one_backend.py FOLDER continue jax-mirrored:keras,loop ...

The names are those of all sources, on every backend, and of the ways in which each
goes on, besides weights. It runs those of its own backend, KERAS_BACKEND, and leaves
the results in `FOLDER/save-jax.json` and the like.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import keras
import numpy as np
from keras import layers, ops

import keras_strategies as ks

BACKEND = keras.backend.backend()
DEVICES = [f"cpu:{i}" for i in range(4)]
SAVED_AFTER, EPOCHS = 2, 4

STRATEGIES = {
    "default": ks.get_strategy,
    "mirrored": lambda: ks.MirroredStrategy(DEVICES[:2]),
    "central": lambda: ks.CentralStorageStrategy(DEVICES[1:3], "cpu:0"),
    "model_2x2": lambda: ks.ModelParallelStrategy(
        "auto", DEVICES, 2, min_shard_bytes=0
    ),
    "fsdp_4": lambda: ks.ModelParallelStrategy("fsdp", DEVICES, min_shard_bytes=0),
}


FOLDER, PHASE = Path(sys.argv[1]), sys.argv[2]
WAYS = {pair: ways.split(",") for pair, ways in (a.split(":") for a in sys.argv[3:])}
SOURCES = list(WAYS)
OWN = [source for source in SOURCES if source.startswith(BACKEND)]


def strategy_of(source: str):
    return STRATEGIES[source.removeprefix(f"{BACKEND}-")]()


@keras.saving.register_keras_serializable("tests")
class Draws(layers.Layer):
    """Advances a seed generator and changes nothing: backends draw other numbers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(5)

    def call(self, inputs, training=False):
        if training:
            noise = keras.random.uniform((1,), seed=self.seed_generator)
            inputs = inputs + 0.0 * ops.cast(noise, inputs.dtype)
        return inputs


def network():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh"),
            layers.Dense(16, "relu"),
            layers.BatchNormalization(momentum=0.8),
            Draws(),
            layers.Dense(4, "softmax"),
        ]
    )
    random = np.random.default_rng(3)
    for variable in model.trainable_variables:
        variable.assign(random.normal(scale=0.3, size=variable.shape))
    schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 4, 0.8)
    model.compile(
        keras.optimizers.Adam(schedule, weight_decay=0.01),
        "sparse_categorical_crossentropy",
    )
    model.optimizer.build(model.trainable_variables)
    return model


def made(strategy):
    with strategy.scope():
        return network()


def rows():
    """Three batches that replicas do not share evenly, of one size: one program."""
    random = np.random.default_rng(0)
    return random.normal(size=(27, 6)), random.integers(0, 4, 27)


def fit(model, callbacks=(), **epochs):
    x, y = rows()
    if BACKEND == "tensorflow":
        # Strategies run without XLA here; without one it would compile for seconds.
        model.jit_compile = False
    given = {"batch_size": 9, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, callbacks=list(callbacks), **given, **epochs)
    return history.history["loss"]


def state(model):
    """What a model has learned and how far it has come."""
    values = [*model.variables, *model.optimizer.variables]
    values = [variable for variable in values if "seed" not in variable.path]
    return {
        "weights": [np.asarray(w).tolist() for w in model.get_weights()],
        "seeds": [
            np.asarray(ops.convert_to_numpy(v)).tolist()
            for v in model.non_trainable_variables
            if "seed" in v.path
        ],
        "slots": [float(np.abs(ops.convert_to_numpy(v)).sum()) for v in values],
        "iterations": int(ops.convert_to_numpy(model.optimizer.iterations)),
    }


def save() -> dict:
    results = {}
    reference = made(ks.get_strategy())
    results["uninterrupted"] = {
        "losses": fit(reference, epochs=EPOCHS),
        **state(reference),
    }
    for source in OWN:
        base = FOLDER / source
        model = made(strategy_of(source))
        callbacks = [
            keras.callbacks.ModelCheckpoint(f"{base}-checkpoint.keras"),
            keras.callbacks.BackupAndRestore(f"{base}-backup", delete_checkpoint=False),
        ]
        losses = fit(model, callbacks, epochs=SAVED_AFTER)
        model.save(f"{base}.keras")
        model.save_weights(f"{base}.weights.h5")
        ks.Checkpoint(model=model, step=keras.Variable(6, trainable=False)).save(
            f"{base}.ckpt"
        )
        results[source] = {"losses": losses, **state(model)}
    return results


def loaded(strategy, path):
    with strategy.scope():
        return keras.models.load_model(path)


def resume(model):
    before = state(model)
    losses = fit(model, initial_epoch=SAVED_AFTER, epochs=EPOCHS)
    return {"losses": losses, "loaded": before, **state(model)}


def from_keras_file(target: str, source: str) -> dict:
    return resume(loaded(strategy_of(target), FOLDER / f"{source}.keras"))


def from_checkpoint_callback(target: str, source: str) -> dict:
    return resume(loaded(strategy_of(target), FOLDER / f"{source}-checkpoint.keras"))


def from_loop(target: str, source: str) -> dict:
    model, step = made(strategy_of(target)), keras.Variable(0, trainable=False)
    ks.Checkpoint(model=model, step=step).restore(FOLDER / f"{source}.ckpt")
    assert int(ops.convert_to_numpy(step)) == 6
    return resume(model)


def from_backup(target: str, source: str) -> dict:
    backup = FOLDER / f"{target}-own-backup"
    shutil.copytree(FOLDER / f"{source}-backup", backup)
    model = made(strategy_of(target))
    losses = fit(model, [keras.callbacks.BackupAndRestore(backup)], epochs=EPOCHS)
    return {"losses": losses, **state(model)}


GO_ON = {
    "keras": from_keras_file,
    "checkpoint": from_checkpoint_callback,
    "loop": from_loop,
    "backup": from_backup,
}


def continued() -> dict:
    results = {}
    for number, target in enumerate(OWN):
        model = made(strategy_of(target))
        for source in SOURCES:
            model.load_weights(FOLDER / f"{source}.weights.h5")
            results[f"{source} > {target}: weights"] = resume(model)
        # These make a new model each time, so every target has one source for each.
        turn = SOURCES.index(target) + 3 * number + 1
        for step, way in enumerate(WAYS[target]):
            sources = SOURCES
            if way in ("keras", "checkpoint") and BACKEND != "torch":
                # Keras 3.15 itself writes the class of Torch's optimizer to a `.keras`
                # file, which no other backend can train with, in Keras alone neither.
                sources = [source for source in SOURCES if source != "torch-default"]
            source = sources[(turn + step) % len(sources)]
            results[f"{source} > {target}: {way}"] = GO_ON[way](target, source)
    return results


def main() -> None:
    ks.set_virtual_cpu_devices(4)
    results = save() if PHASE == "save" else continued()
    (FOLDER / f"{PHASE}-{BACKEND}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
