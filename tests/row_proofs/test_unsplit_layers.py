"""Layer calls that cannot be split by rows are exact, and say so.

Each model is trained without a strategy and under `MirroredStrategy`. On JAX a step is
one program of the global batch: nothing is split, and only that is tested of which rows
do not correspond.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import Case, assert_same, compiled, train
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

BACKEND = keras.backend.backend()
SPLITS = pytest.mark.skipif(BACKEND == "jax", reason="JAX does not split layer calls")
RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(22, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 22)


def mirrored(**options: Any) -> ks.MirroredStrategy:
    return ks.MirroredStrategy(["cpu:0", "cpu:1"], **options)


def around(layer: Callable[[], layers.Layer]) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(6, activation="tanh"),
                layer(),
                layers.Dense(3, activation="softmax"),
            ]
        )

    return make


# To trace a program of TensorFlow takes longer than to take a few steps.
EAGERLY = {"run_eagerly": True}


class CallCount(layers.Layer):
    """Rows that do not depend on each other."""

    calls = 0

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        return 2 * inputs


def predicted(layer: layers.Layer, rows: int) -> list[str]:
    """The warnings of a call that predicts some rows, each on its own."""
    with mirrored().scope():
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile(run_eagerly=True)
    layer.calls = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.predict_on_batch(X[:rows])
    return [str(w.message) for w in caught if "split by rows" in str(w.message)]


@SPLITS
def test_python_runs_as_often_as_on_one_device() -> None:
    layer = CallCount()
    (said,) = predicted(layer, 8)
    assert "'calls'" in said
    assert layer.calls == 1


# Layers with independent rows, although parts round differently, draw other random
# numbers or exchange statistics.


class StochasticDepth(layers.Layer):
    """Drops a branch of each row."""

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(5)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if not training:
            return inputs
        shape = (ops.shape(inputs)[0], 1, 1)
        kept = keras.random.uniform(shape, seed=self.seeds) < 0.5
        return inputs * ops.cast(kept, inputs.dtype)


def many_kinds() -> keras.Model:
    words = keras.Input((3,), dtype="int32")
    hidden = layers.Embedding(11, 8, mask_zero=True)(words)
    hidden = layers.LSTM(4, return_sequences=True)(hidden)
    hidden = layers.GaussianNoise(0.1)(layers.Dropout(0.6)(hidden))
    hidden = layers.MultiHeadAttention(2, 4, dropout=0.3)(hidden, hidden)
    hidden = layers.BatchNormalization()(StochasticDepth()(hidden))
    hidden = layers.GaussianDropout(0.3)(layers.SpatialDropout1D(0.2)(hidden))
    hidden = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(hidden))
    hidden = layers.Dense(6, activity_regularizer="l2", dtype="float32")(hidden)
    return keras.Model(words, layers.Dense(3, "softmax", dtype="float32")(hidden))


# Parts differ most in bfloat16. With mixed_float16 replicas keep statistics of their
# own. Outside of the nightly run Torch, where it takes little, has all.
@pytest.mark.nightly(unless=["mixed_float16"])
@SPLITS
@pytest.mark.parametrize(
    "policy",
    [
        "mixed_bfloat16",
        *(
            pytest.param(name, marks=[pytest.mark.nightly] * (BACKEND != "torch"))
            for name in ("float32", "mixed_float16")
        ),
    ],
)
def test_layers_of_keras_are_split(policy: str) -> None:
    words = RANDOM.integers(0, 11, (8, 3)).astype("int32")
    strategy = mirrored(sync_batch_norm=policy != "mixed_float16")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*split by rows")
        with strategy.scope():
            case = Case("many", model=many_kinds, policy=policy)
            # To trace these layers for TensorFlow takes longer than to run them.
            model = compiled(case, run_eagerly=True)
        model.train_on_batch(words, Y[:8])
        model.predict_on_batch(words)


@pytest.mark.one_backend("torch", "tensorflow")
@SPLITS
def test_quantized_layers_are_split() -> None:
    with mirrored().scope():
        model = compiled(Case("quantized", model=around(lambda: layers.Dense(16))))
    model.quantize("int8")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*split by rows")
        model.predict_on_batch(X[:8])


@SPLITS
def test_random_numbers_are_those_without_checks() -> None:
    """A check draws nothing from the generators of the process and of layers."""
    with mirrored().scope():
        model = compiled(Case("noise", model=around(lambda: layers.GaussianNoise(1.0))))
    before = np.random.get_state()[1].copy()
    model.train_on_batch(X, Y)
    np.testing.assert_array_equal(before, np.random.get_state()[1])
    (state,) = [v for v in model.non_trainable_variables if "seed" in v.path]
    assert int(ops.convert_to_numpy(state)[1]) == 1


# State for each row of a batch; inputs with rows that do not correspond.


def stateful() -> keras.Model:
    inputs = keras.Input(batch_shape=(8, 3, 2))
    hidden = layers.LSTM(4, stateful=True)(inputs)
    return keras.Model(inputs, layers.Dense(3, activation="softmax")(hidden))


class GraphConvolution(keras.Model):
    """Nodes, and edges as pairs of indices into them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(5, "tanh"), layers.Dense(3, "softmax")

    def build(self, shapes: Any) -> None:
        self.first.build((None, 6))
        self.last.build((None, 5))
        self.built = True

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        sent = ops.take(self.first(nodes), edges[:, 0], axis=0)
        count = ops.shape(nodes)[0]
        return self.last(ops.segment_sum(sent, edges[:, 1], num_segments=count))


def graph() -> keras.Model:
    model = GraphConvolution()
    model.build(None)
    return model


def graphs() -> tuple[Any, Any]:
    edges = np.random.default_rng(1).integers(0, 12, (30, 2)).astype("int32")
    return (X[:12], edges), Y[:12]


BATCHES = {
    "stateful": (stateful, lambda: (X[:8].reshape(8, 3, 2), Y[:8])),
    "graph": (graph, graphs),
}


@pytest.mark.nightly(unless=["graph"])
@pytest.mark.parametrize("name", BATCHES)
def test_rows_that_do_not_correspond_are_exact(name: str) -> None:
    make, batch = BATCHES[name]

    def script(case: Case, model: Any, data: Any) -> Any:
        x, y = batch()
        x = keras.tree.map_structure(ops.convert_to_tensor, x)
        y = ops.convert_to_tensor(y)
        # Keras 3.15 cannot train a stateful layer on Torch, on one device either.
        only_tests = BACKEND == "torch" and name == "stateful"
        step = model.test_on_batch if only_tests else model.train_on_batch
        return {"logs": [float(step(x, y)) for _ in range(3)]}

    eagerly = EAGERLY if BACKEND == "tensorflow" else {}
    case = Case(name, model=make, script=script, compile_alone=eagerly)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = train(case, mirrored())
    assert_same(train(case), found, 1e-5, "MirroredStrategy")
    said = any("split by rows" in str(w.message) for w in caught)
    assert said == (BACKEND != "jax")


class Large(layers.Layer):
    """A layer of which one call runs out of memory: the first that finds a file."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = str(file)

    def call(self, inputs: Any) -> Any:
        if os.path.exists(self.file):
            os.remove(self.file)
            raise MemoryError("cannot allocate 9 GiB")
        return ops.tanh(inputs)


@SPLITS
def test_a_proof_without_memory_says_nothing_about_the_layer(tmp_path: Path) -> None:
    """A later call, with the memory, is split."""
    file = tmp_path / "memory_is_used"
    with mirrored().scope():
        model = keras.Sequential([keras.Input((6,)), Large(file), layers.Dense(3)])
        model.compile(run_eagerly=True)
    file.touch()
    with warnings.catch_warnings():
        # That it cannot be split.
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(MemoryError, match="cannot allocate 9 GiB"):
            model.predict_on_batch(X[:8])
        model.predict_on_batch(X[:8])
