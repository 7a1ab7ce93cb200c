"""One process of the matrix of `test_matrix.py`: it saves, or it goes on.

    python one_backend.py save FOLDER
    python one_backend.py continue FOLDER

It runs on the backend that KERAS_BACKEND says, under all of its strategies, and leaves
what it has found in `FOLDER/save-jax.json` and the like.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import keras
import numpy as np
from keras import layers, ops

import keras_strategies as ks

BACKENDS = ("jax", "torch", "tensorflow")
BACKEND = keras.backend.backend()
DEVICES = [f"cpu:{i}" for i in range(4)]
SAVED_AFTER, EPOCHS = 2, 4

STRATEGIES = {
    "default": ks.get_strategy,
    "mirrored": lambda: ks.MirroredStrategy(DEVICES[:2], always_split=True),
    "central": lambda: ks.CentralStorageStrategy(
        DEVICES[1:3], "cpu:0", always_split=True
    ),
    "model_2x2": lambda: ks.ModelParallelStrategy(
        "auto", DEVICES, 2, min_shard_bytes=0
    ),
    "fsdp_4": lambda: ks.ModelParallelStrategy("fsdp", DEVICES, min_shard_bytes=0),
}


def strategies(backend: str) -> list[str]:
    """The strategies of a backend: only JAX cuts variables."""
    return list(STRATEGIES)[: 5 if backend == "jax" else 3]


SOURCES = [f"{backend}-{name}" for backend in BACKENDS for name in strategies(backend)]


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


def save(folder: Path) -> dict:
    results = {}
    reference = made(ks.get_strategy())
    results["uninterrupted"] = {
        "losses": fit(reference, epochs=EPOCHS),
        **state(reference),
    }
    for name in strategies(BACKEND):
        base = folder / f"{BACKEND}-{name}"
        model = made(STRATEGIES[name]())
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
        results[f"{BACKEND}-{name}"] = {"losses": losses, **state(model)}
    return results


def loaded(strategy, path):
    with strategy.scope():
        return keras.models.load_model(path)


def go_on(model):
    before = state(model)
    losses = fit(model, initial_epoch=SAVED_AFTER, epochs=EPOCHS)
    return {"losses": losses, "loaded": before, **state(model)}


def continued(folder: Path) -> dict:
    results = {}
    for number, name in enumerate(strategies(BACKEND)):
        strategy = STRATEGIES[name]()
        target = f"{BACKEND}-{name}"
        model = made(strategy)
        for source in SOURCES:
            model.load_weights(folder / f"{source}.weights.h5")
            results[f"{source} > {target}: weights"] = go_on(model)
        # These make a new model each time, so every target has a few sources.
        turn = (SOURCES.index(target) + 3 * number) % len(SOURCES)
        turned = SOURCES[turn:] + SOURCES[:turn]
        for source in turned[3:5]:
            model = loaded(strategy, folder / f"{source}.keras")
            results[f"{source} > {target}: keras"] = go_on(model)
        model, step = made(strategy), keras.Variable(0, trainable=False)
        ks.Checkpoint(model=model, step=step).restore(folder / f"{turned[6]}.ckpt")
        assert int(ops.convert_to_numpy(step)) == 6
        results[f"{turned[6]} > {target}: loop"] = go_on(model)
        model = loaded(strategy, folder / f"{turned[7]}-checkpoint.keras")
        results[f"{turned[7]} > {target}: checkpoint"] = go_on(model)
        backup = folder / f"{target}-own-backup"
        shutil.copytree(folder / f"{turned[9]}-backup", backup)
        model = made(strategy)
        losses = fit(model, [keras.callbacks.BackupAndRestore(backup)], epochs=EPOCHS)
        results[f"{turned[9]} > {target}: backup"] = {"losses": losses, **state(model)}
    return results


def main() -> None:
    ks.set_virtual_cpu_devices(4)
    phase, folder = sys.argv[1], Path(sys.argv[2])
    results = save(folder) if phase == "save" else continued(folder)
    (folder / f"{phase}-{BACKEND}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
