"""Layer calls that cannot be split by rows are exact, and say so.

Each model is trained without a strategy and under `MirroredStrategy`. On JAX a step is
one program of the global batch: nothing is split, and only that is tested of which rows
do not correspond.
"""

from __future__ import annotations

import os
import warnings
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


def mirrored_model(*inner: Any) -> keras.Model:
    """A model of some layers, whose steps are eager, on two replicas."""
    with mirrored().scope():
        # Programs of TensorFlow take longer to trace than a few steps to run.
        model = keras.Sequential([keras.Input((6,)), *inner])
        model.compile("sgd", "mse", run_eagerly=True)
    return model


class CallCount(layers.Layer):
    """Rows that do not depend on each other."""

    calls = 0

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        return 2 * inputs


@SPLITS
def test_python_runs_as_often_as_on_one_device() -> None:
    layer = CallCount()
    model = mirrored_model(layer)
    layer.calls = 0
    with pytest.warns(
        UserWarning, match="split by rows.*'calls'|'calls'.*split by rows"
    ):
        model.predict_on_batch(X[:8])
    assert layer.calls == 1


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

    def make() -> keras.Model:
        parts = layers.LSTM(4, return_sequences=True), layers.BatchNormalization()
        noise = layers.GaussianNoise(0.1), layers.SpatialDropout1D(0.2)
        # Keras on TensorFlow cannot add a loss in 16 bits to one in 32.
        adds = BACKEND == "torch" or policy == "float32"
        dense = layers.Dense(3, activity_regularizer="l2" if adds else None)
        last = layers.GlobalAveragePooling1D(), dense
        embedding = layers.Embedding(11, 8, mask_zero=True)
        parts = keras.Input((3,), dtype="int32"), embedding, *parts, *noise, *last
        return keras.Sequential([*parts, layers.Softmax(dtype="float32")])

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*split by rows")
        with strategy.scope():
            case = Case("many", model=make, policy=policy)
            model = compiled(case, run_eagerly=True)
        model.train_on_batch(words, Y[:8])
        model.predict_on_batch(words)


@pytest.mark.one_backend("torch", "tensorflow")
@SPLITS
def test_quantized_layers_are_split() -> None:
    model = mirrored_model(layers.Dense(16), layers.Dense(3))
    model.quantize("int8")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*split by rows")
        model.predict_on_batch(X[:8])


@SPLITS
def test_random_numbers_are_those_without_checks() -> None:
    """A check draws nothing from the generators of the process and of layers."""
    model = mirrored_model(layers.Dense(6), layers.GaussianNoise(1.0))
    before = np.random.get_state()[1].copy()
    model.train_on_batch(X, X)
    np.testing.assert_array_equal(before, np.random.get_state()[1])
    (state,) = [v for v in model.non_trainable_variables if "seed" in v.path]
    assert int(ops.convert_to_numpy(state)[1]) == 1


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


def test_rows_that_do_not_correspond_are_exact() -> None:
    edges = np.random.default_rng(1).integers(0, 12, (30, 2)).astype("int32")
    batch = ops.convert_to_tensor(X[:12]), ops.convert_to_tensor(edges)

    def make() -> keras.Model:
        model = GraphConvolution()
        model.build(None)
        return model

    def script(case: Case, model: Any, data: Any) -> Any:
        y = ops.convert_to_tensor(Y[:12])
        return {"logs": [float(model.train_on_batch(batch, y)) for _ in range(3)]}

    eagerly = {"run_eagerly": True} if BACKEND == "tensorflow" else {}
    case = Case("graph", model=make, script=script, compile_alone=eagerly)
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
    model = mirrored_model(Large(file), layers.Dense(3))
    file.touch()
    with warnings.catch_warnings():
        # That it cannot be split.
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(MemoryError, match="cannot allocate 9 GiB"):
            model.predict_on_batch(X[:8])
        model.predict_on_batch(X[:8])
