"""The rows that each epoch reads, in the order that Keras has without a strategy."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
from harness.batches_ahead import prepare_ahead
from harness.strategies import STRATEGIES

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

tf = pytest.importorskip("tensorflow")

BACKEND = keras.backend.backend()
X = np.arange(40, dtype="float32")[:, None]
Y = np.cos(X)
EPOCHS = 3


class Recorded(keras.Sequential):
    """A model that records the rows of each step."""

    def __init__(self) -> None:
        super().__init__([keras.Input((1,)), keras.layers.Dense(1)])
        self.steps: list[tuple[str, list[int]]] = []

    def _record(self, kind: str, arguments: Any) -> None:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(arguments[-1])
        rows = np.asarray(keras.ops.convert_to_numpy(x)).ravel().round().astype(int)
        self.steps.append((kind, rows.tolist()))

    def train_step(self, *arguments: Any) -> Any:
        self._record("fit", arguments)
        return super().train_step(*arguments)

    def test_step(self, *arguments: Any) -> Any:
        self._record("evaluate", arguments)
        return super().test_step(*arguments)


def scope(strategy: Any) -> Any:
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def model_on(strategy: Any, steps_per_execution: int = 1) -> Recorded:
    with scope(strategy):
        model = Recorded()
        model.compile(
            "sgd", "mse", run_eagerly=True, steps_per_execution=steps_per_execution
        )
    return model


def slices() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def shuffled(**options: Any) -> Any:
    return slices().shuffle(40, **options).batch(8)


def endless() -> Any:
    """Passes without end, read only as far as `next` is called.

    By default tf.data prefetches at the end of a pipeline. After `fit` ends in a pass,
    the next pass, and with it another order, has begun or not, also in plain Keras.
    """
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return shuffled(seed=5).repeat().with_options(options)


def odd(x: Any, y: Any) -> Any:
    del y
    return x[0] % 2 == 1


class ShuffledRows(keras.utils.PyDataset):
    """Rows in an order that changes from epoch to epoch, as in Keras's guides."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order = np.arange(40)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = self.order[index * 8 : index * 8 + 8]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


#: Arguments of `fit`, by name.
INPUT: dict[str, Any] = {
    "seed": lambda: {"x": shuffled(seed=5)},
    "global seed": lambda: {"x": shuffled()},
    "one order": lambda: {"x": shuffled(seed=5, reshuffle_each_iteration=False)},
    "unknown length": lambda: {"x": slices().filter(odd).shuffle(40, seed=5).batch(8)},
    "endless": lambda: {"x": endless(), "steps_per_epoch": 3},
    "short epochs": lambda: {"x": shuffled(seed=5).repeat(2), "steps_per_epoch": 5},
    "random map": lambda: {
        "x": slices()
        .map(lambda x, y: (x + tf.random.uniform((), 0, 60, seed=3), y))
        .batch(8)
    },
    "class weights": lambda: {
        "x": shuffled(seed=5).map(lambda x, y: (x, tf.cast(y > 0, "int32"))),
        "class_weight": {0: 1.0, 1: 2.0},
    },
    "validation": lambda: {
        "x": slices().batch(8),
        "validation_data": shuffled(seed=5),
        "validation_freq": 2,
    },
    "validation on the same": lambda: dict.fromkeys(
        ["x", "validation_data"], shuffled(seed=5)
    ),
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 8},
    "arrays in batches": lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": "batch"},
    "PyDataset": lambda: {"x": ShuffledRows(workers=1), "shuffle": True},
}


def steps(strategy: Any, name: str, model: Any = None) -> list[Any]:
    keras.utils.set_random_seed(11)
    model = model or model_on(strategy)
    arguments = INPUT[name]()
    model.fit(**arguments, epochs=EPOCHS, verbose=0)
    # Keras has made one more iterator than it has read.
    model.evaluate(arguments["x"], arguments.get("y"), verbose=0, steps=2)
    return model.steps


@pytest.mark.nightly(unless=["endless"])
@pytest.mark.parametrize("name", INPUT)
def test_epochs_read_the_rows_of_keras(name: str) -> None:
    plain = steps(None, name)
    assert len(plain) >= 9 + 2
    assert steps(STRATEGIES["mirrored_2"].make(), name) == plain
    if name == "seed":
        assert steps(ks.OneDeviceStrategy("cpu:0"), name) == plain


# Keras on Torch has steps_per_execution=1 only.
@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.nightly(unless=["unknown length"])
@pytest.mark.parametrize(
    "name", ["seed", "unknown length"] if BACKEND != "torch" else []
)
def test_several_steps_per_execution(name: str) -> None:
    plain = steps(None, name, model_on(None, 2))
    strategy = STRATEGIES["mirrored_2"].make()
    assert steps(strategy, name, model_on(strategy, 2)) == plain


#: On each backend: what can be in another order if iterators are made at other times.
AHEAD = {
    "tensorflow": ["unknown length", "validation on the same"],
    "torch": ["arrays", "seed"],
    "jax": ["arrays", "PyDataset"],
}


@pytest.mark.nightly(
    unless=["PyDataset-mirrored_2", "seed-one_device", "unknown length-one_device"]
)
@pytest.mark.parametrize("device", ["one_device", "mirrored_2"])
@pytest.mark.parametrize("name", AHEAD[BACKEND])
def test_with_batches_ahead_on_a_device(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator."""
    if BACKEND == "torch":
        from keras_strategies.engines.torch import cuda_batches

        monkeypatch.setattr(cuda_batches, "pinned", cuda_batches.pinned)
    if device == "one_device":
        strategy = ks.OneDeviceStrategy("cpu:1")
    else:
        strategy = STRATEGIES[device].make()
    prepare_ahead(strategy)
    assert steps(strategy, name) == steps(None, name)


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["PER_WORKER"])
@pytest.mark.parametrize("replication", ["PER_WORKER", "PER_REPLICA"])
def test_datasets_from_a_function(replication: str) -> None:
    """The batches of two replicas, joined: those that the datasets have in Keras."""

    def dataset_fn(context: Any) -> Any:
        return slices().shuffle(40, seed=5).batch(context.get_per_replica_batch_size(8))

    strategy = STRATEGIES["mirrored_2"].make()
    options = ks.InputOptions(experimental_replication_mode=replication)
    keras.utils.set_random_seed(11)
    model = model_on(strategy)
    data = strategy.distribute_datasets_from_function(dataset_fn, options)
    model.fit(data, epochs=EPOCHS, verbose=0)

    keras.utils.set_random_seed(11)
    per_replica = dataset_fn(ks.InputContext(1, 0, 2))
    plain = model_on(None)
    plain.fit(per_replica, epochs=EPOCHS, verbose=0)
    parts = [rows for _, rows in plain.steps]
    if replication == "PER_WORKER":
        pairs = zip(parts[::2], parts[1::2], strict=True)
    else:
        pairs = zip(parts, parts, strict=True)
    joined = [first + second for first, second in pairs]
    assert [rows for _, rows in model.steps] == joined


class Interrupted(Exception):
    """An interruption of training."""


def test_resumed_epochs_read_the_rows_of_keras(tmp_path: Any) -> None:
    def interrupt(batch: int, logs: Any) -> None:
        del logs
        if len(model.steps) == 7:
            raise Interrupted

    strategy = STRATEGIES["mirrored_2"].make()
    plain = model_on(None)
    plain.fit(shuffled(seed=5), epochs=EPOCHS, verbose=0)
    found = []
    for callback in (
        [keras.callbacks.LambdaCallback(on_train_batch_begin=interrupt)],
        [],
    ):
        model = model_on(strategy)
        resume = ks.callbacks.Resume(tmp_path)
        with contextlib.suppress(Interrupted):
            model.fit(
                shuffled(seed=5),
                epochs=EPOCHS,
                verbose=0,
                callbacks=[resume, *callback],
            )
        resume.wait()
        found.append(model.steps)
    first, rest = found
    assert len(first) == 7
    assert first + rest[-8:] == plain.steps


def test_losses_and_the_last_epoch_of_early_stopping() -> None:
    """In programs: the losses of each epoch, and the epoch that training ends at."""

    def history(strategy: Any) -> list[float]:
        keras.utils.set_random_seed(11)
        with scope(strategy):
            model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(0.02, 0.9), "mse")
        stop = keras.callbacks.EarlyStopping("loss", min_delta=1e-3)
        data = tf.data.Dataset.from_tensor_slices((X / 40, Y))
        data = data.shuffle(40, seed=5).batch(8)
        result = model.fit(data, epochs=40, verbose=0, callbacks=[stop])
        return result.history["loss"]

    plain = history(None)
    found = history(STRATEGIES["mirrored_2"].make())
    assert 2 < len(plain) < 40
    assert len(found) == len(plain)
    np.testing.assert_allclose(found, plain, rtol=1e-4)
