"""One backend's process of `test_matrix.py`: it saves, or goes on with what all saved.

    python one_backend.py FOLDER save
    python one_backend.py FOLDER continue

leaves the results in `FOLDER/save-jax.json` and the like.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
from keras import layers, ops

import keras_strategies as ks

BACKENDS = ["jax", "tensorflow", "torch"]
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
OWN = [name for name in STRATEGIES if BACKEND == "jax" or "_" not in name]


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


def made(strategy):
    with strategy.scope():
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


def fit(model, **epochs):
    """Three batches that replicas do not share evenly, of one size: one program."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(27, 6)), random.integers(0, 4, 27)
    if BACKEND == "tensorflow":
        # Strategies run without XLA here; without one it would compile for seconds.
        model.jit_compile = False
    model.fit(x, y, batch_size=9, shuffle=False, verbose=0, **epochs)
    return state(model)


def state(model):
    """What a model has learned and how far it has come."""
    values = [*model.variables, *model.optimizer.variables]
    arrays = {v.path: np.asarray(ops.convert_to_numpy(v)) for v in values}
    return {
        "weights": [np.asarray(w).tolist() for w in model.get_weights()],
        "seeds": [a.tolist() for path, a in arrays.items() if "seed" in path],
        "iterations": int(ops.convert_to_numpy(model.optimizer.iterations)),
    }


def save(folder):
    """Trains and saves under each strategy."""
    results = {"uninterrupted": fit(made(ks.get_strategy()), epochs=EPOCHS)}
    for name in OWN:
        base = folder / f"{BACKEND}-{name}"
        model = made(STRATEGIES[name]())
        fit(model, epochs=SAVED_AFTER)
        model.save(f"{base}.keras")
        model.save_weights(f"{base}.weights.h5")
        ks.Checkpoint(model=model).save(f"{base}.ckpt")
        results[f"{BACKEND}-{name}"] = state(model)
    return results


def loaded(strategy, file):
    if file.suffix == ".keras":
        with strategy.scope():
            return keras.models.load_model(file)
    model = made(strategy)
    ks.Checkpoint(model=model).restore(file)
    return model


def continued(folder):
    """Each strategy goes on with the weights of all, and a file of each other kind."""
    options = {"initial_epoch": SAVED_AFTER, "epochs": EPOCHS}
    results = {}
    for number, name in enumerate(OWN):
        strategy = STRATEGIES[name]()
        model = made(strategy)
        for file in sorted(folder.glob("*.h5")):
            model.load_weights(file)
            results[f"{file.name} > {BACKEND}-{name}"] = fit(model, **options)
        for kind in ("keras", "ckpt"):
            # Keras 3.15 itself writes the class of Torch's optimizer to a file without
            # a strategy, which no other backend can train with.
            files = sorted(
                set(folder.glob(f"*.{kind}")) - {folder / "torch-default.keras"}
            )
            file = files[(3 * number + BACKENDS.index(BACKEND)) % len(files)]
            found = fit(loaded(strategy, file), **options)
            results[f"{file.name} > {BACKEND}-{name}"] = found
    return results


if __name__ == "__main__":
    ks.set_virtual_cpu_devices(4)
    directory = Path(sys.argv[1])
    found = save(directory) if sys.argv[2] == "save" else continued(directory)
    (directory / f"{sys.argv[2]}-{BACKEND}.json").write_text(json.dumps(found))
