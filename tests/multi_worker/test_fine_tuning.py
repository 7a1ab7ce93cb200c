"""Fine-tuning as people do it: adapters, quantized weights, tokens, accumulation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_arrays, assert_same
from keras import layers
from multi_worker.clusters import model_parallel, on_clusters, one_device, scope_of

import keras_strategies as ks
from keras_strategies.training.resume import resume_callback

#: A number of words that no number of workers divides.
WORDS, LENGTH, WIDTH, ROWS = 37, 5, 8, 13
_random = np.random.default_rng(11)
TOKENS = _random.integers(1, WORDS, (ROWS, LENGTH)).astype("int32")
NEXT = _random.integers(0, WORDS, (ROWS, LENGTH)).astype("int32")
#: Rows have from one token to all.
COUNTED = (np.arange(LENGTH) < _random.integers(1, LENGTH + 1, (ROWS, 1))).astype(
    "float32"
)


@keras.saving.register_keras_serializable("fine tuning")
class Twice(layers.Layer):
    """A layer that is called twice in one loss, once under rematerialization."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.inner = layers.Dense(WIDTH, "tanh")

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return self.inner(x) + keras.remat(self.inner)(0.5 * x)


def words(dtype: Any = None, middle: Callable[[], Any] | None = None) -> Any:
    """A model of the next word."""
    hidden = layers.Dense(WIDTH, "tanh", dtype=dtype) if middle is None else middle()
    return keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            layers.Embedding(WORDS, WIDTH),
            hidden,
            layers.Dense(WORDS, dtype="float32"),
        ]
    )


def adapters(mode: str | None, dtype: Any = None) -> Any:
    model = words(dtype)
    if mode is not None:
        model.quantize(mode, filters=lambda layer: isinstance(layer, layers.Dense))
    for layer in model.layers[1:]:
        layer.enable_lora(2)
    model.layers[0].trainable = False
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "tokens": words,
    "lora": lambda: adapters(None),
    "lora of int8": lambda: adapters("int8"),
    "lora of int4": lambda: adapters("int4"),
    "lora in bfloat16": lambda: adapters(None, "mixed_bfloat16"),
    "twice": lambda: words(middle=lambda: Twice(dtype="mixed_bfloat16")),
}
#: Sums of bfloat16 have another order.
TOLERANCES = {"lora in bfloat16": 2e-2, "twice": 2e-2}
IN_ORDER: dict[str, Any] = {"batch_size": 4, "shuffle": False, "verbose": 0}


def tuned(strategy: Any, kind: str, is_sharded: bool) -> dict[str, Any]:
    """Logs and weights of a training with unequal numbers of tokens."""
    keras.utils.set_random_seed(3)
    with scope_of(model_parallel() if is_sharded else strategy):
        model = MODELS[kind]()
        model.compile(
            keras.optimizers.SGD(0.2, 0.9, gradient_accumulation_steps=2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
        )
    fitted = model.fit(TOKENS, NEXT, sample_weight=COUNTED, epochs=2, **IN_ORDER)
    found = {name: np.array(values) for name, values in fitted.history.items()}
    for i, variable in enumerate(model.trainable_variables):
        value = keras.ops.convert_to_numpy(variable)
        found[f"weight {i}"] = np.asarray(value, "float32")
    return found


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["two-lora of int8-shards"])
@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("is_sharded", [False, True], ids=["copies", "shards"])
@pytest.mark.parametrize("kind", MODELS)
@on_clusters("two", "three")
def test_fine_tuning_is_that_of_one_device(cluster, kind, is_sharded) -> None:
    # Plain Keras on JAX does not train what a layer gives `keras.remat` as it is.
    expected = tuned(one_device(), kind, False)
    for found in cluster(tuned, kind, is_sharded):
        assert_same(expected, found, TOLERANCES.get(kind, 1e-5), "a worker")


DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
IN_ONE_PROCESS: dict[str, Callable[[], Any]] = {
    "copies": lambda: ks.MirroredStrategy(DEVICES[:2]),
}
if keras.backend.backend() != "torch":  # There a process has one device of a mesh.
    IN_ONE_PROCESS["shards"] = lambda: ks.ModelParallelStrategy(
        "fsdp", DEVICES, min_shard_bytes=0
    )


@pytest.mark.nightly
@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("make", IN_ONE_PROCESS.values(), ids=IN_ONE_PROCESS)
def test_fine_tuning_in_one_process_is_that_of_one_device(kind: str, make: Any) -> None:
    expected = tuned(one_device(), kind, False)
    found = tuned(make(), kind, False)
    assert_same(expected, found, TOLERANCES.get(kind, 1e-5), "several devices")


def judged(strategy: Any) -> list[float]:
    """Metrics of a last batch of one row: of three workers two have none."""
    x = np.random.default_rng(2).normal(size=(ROWS, 6)).astype("float32")
    y = (x + np.roll(x, 1, 1) > 0).astype("float32")
    keras.utils.set_random_seed(4)
    with scope_of(strategy):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(6, "sigmoid")])
        found = [keras.metrics.AUC(20), keras.metrics.PearsonCorrelation()]
        with contextlib.suppress(ImportError):
            import keras_rs

            found.append(keras_rs.metrics.NDCG(k=3))
        model.compile("sgd", "binary_crossentropy", metrics=found)
    results = model.evaluate(x, y, batch_size=6, verbose=0)
    return [float(value) for value in results]


@pytest.mark.nightly
@on_clusters("three")
def test_metrics_with_workers_without_rows(cluster: Any) -> None:
    expected = judged(None)
    for found in cluster(judged):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def word_model(seed: int) -> Any:
    keras.utils.set_random_seed(seed)
    model = words()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(True))
    return model


def saved_and_continued(scope: Any, folder: str, way: str) -> list[np.ndarray]:
    """Weights after an epoch, and those of another model that trains two more.

    It was saved and loaded, or has other weights, and `Resume` continues a snapshot.
    """
    given = dict(IN_ORDER)
    with scope():
        model = word_model(3)
    if way == "snapshot":
        given["callbacks"] = [ks.callbacks.Resume(folder)]
    model.fit(TOKENS, NEXT, epochs=1, **given)
    model.save(f"{folder}/model.keras")
    with scope():
        if way == "snapshot":
            other = word_model(4)
            # As in another process.
            resume_callback.finished_directories.clear()
            given["callbacks"] = [ks.callbacks.Resume(folder)]
        else:
            other = keras.models.load_model(f"{folder}/model.keras")
            given["initial_epoch"] = 1
    other.fit(TOKENS, NEXT, epochs=3, **given)
    return [np.array(v) for each in (model, other) for v in each.get_weights()]


@pytest.mark.nightly
@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("way", ["file", "snapshot"])
def test_words_that_do_not_divide_are_saved_and_continued(cluster, way, tmp_path):
    with one_device().scope():
        alone = word_model(3)
    expected: list[np.ndarray] = []
    for begin, end in ((0, 1), (1, 3)):
        alone.fit(TOKENS, NEXT, initial_epoch=begin, epochs=end, **IN_ORDER)
        expected += [np.array(v) for v in alone.get_weights()]
    own, workers = tmp_path / "process", tmp_path / "workers"
    own.mkdir()
    workers.mkdir()
    every = cluster(
        lambda _: saved_and_continued(model_parallel().scope, str(workers), way)
    )
    if make := IN_ONE_PROCESS.get("shards"):
        every.append(saved_and_continued(make().scope, str(own), way))
    for found in every:
        assert_arrays(found, expected, 1e-4, 1e-5)
