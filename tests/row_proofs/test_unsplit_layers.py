"""Layer calls that cannot be split by rows are exact, and say so; others are split.

On JAX a step is one program of the global batch: nothing is split, and only that is
tested of which rows do not correspond.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import Case
from harness.training import compiled as of_case
from keras import layers, ops

from row_proofs import proofs
from row_proofs.proofs import Apply, Own

pytestmark = pytest.mark.one_backend("torch", "tensorflow")

BACKEND = proofs.BACKEND
X = proofs.shifted(25, np.linspace(0.3, 2, 25, dtype="float32")[:, None])
Y = np.sin(X[:, :1])
CLASSES = np.random.default_rng(3).integers(0, 3, 12)


def mirrored_model(*inner: Any) -> keras.Model:
    with proofs.mirrored().scope():
        # Programs of TensorFlow take longer to trace than a few steps to run.
        model = proofs.sequential(*inner)
        model.compile("sgd", "mse", run_eagerly=True)
    return model


class CallCount(layers.Layer):
    calls = 0

    def call(self, inputs: Any) -> Any:
        self.calls += 1
        return 2 * inputs


@proofs.needs_split
def test_python_runs_as_often_as_on_one_device() -> None:
    layer = CallCount()
    model = mirrored_model(layer)
    layer.calls = 0
    text = "split by rows.*'calls'|'calls'.*split by rows"
    with pytest.warns(UserWarning, match=text):
        model.predict_on_batch(X[:8])
    assert layer.calls == 1


_AT_NIGHT = [pytest.mark.nightly] * (BACKEND != "torch")
POLICIES = [pytest.param(p, marks=_AT_NIGHT) for p in ("float32", "mixed_float16")]


# Parts differ most in bfloat16. With mixed_float16 replicas keep statistics of their
# own. Outside of the nightly run Torch, where it takes little, has all.
@pytest.mark.nightly(unless=["mixed_float16"])
@pytest.mark.filterwarnings("error:.*split by rows")
@proofs.needs_split
@pytest.mark.parametrize("policy", ["mixed_bfloat16", *POLICIES])
def test_layers_of_keras_are_split(policy: str) -> None:
    words = np.random.default_rng(3).integers(0, 11, (8, 3)).astype("int32")

    def make() -> keras.Model:
        parts = layers.LSTM(4, return_sequences=True), layers.BatchNormalization()
        noise = layers.GaussianNoise(0.1), layers.SpatialDropout1D(0.2)
        # Keras on TensorFlow cannot add a loss in 16 bits to one in 32.
        adds = BACKEND == "torch" or policy == "float32"
        dense = layers.Dense(3, activity_regularizer="l2" if adds else None)
        last = layers.GlobalAveragePooling1D(), dense, layers.Softmax(dtype="float32")
        embedding = layers.Embedding(11, 8, mask_zero=True)
        first = keras.Input((3,), dtype="int32"), embedding
        return keras.Sequential([*first, *parts, *noise, *last])

    with proofs.mirrored(sync_batch_norm=policy != "mixed_float16").scope():
        model = of_case(Case("many", model=make, policy=policy), run_eagerly=True)
    model.train_on_batch(words, CLASSES[:8])
    model.predict_on_batch(words)


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.filterwarnings("error:.*split by rows")
@proofs.needs_split
def test_quantized_layers_are_split() -> None:
    model = mirrored_model(layers.Dense(16), layers.Dense(3))
    model.quantize("int8")
    model.predict_on_batch(X[:8])


@proofs.needs_split
def test_random_numbers_are_those_without_checks() -> None:
    """A check draws nothing from the generators of the process and of layers."""
    model = mirrored_model(layers.Dense(6), layers.GaussianNoise(1.0))
    before = np.random.get_state()[1].copy()
    model.train_on_batch(X[:22], X[:22])
    np.testing.assert_array_equal(before, np.random.get_state()[1])
    (state,) = [v for v in model.non_trainable_variables if "seed" in v.path]
    assert int(ops.convert_to_numpy(state)[1]) == 1


class GraphConvolution(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(5, "tanh"), layers.Dense(3, "softmax")
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
    classes = ops.convert_to_tensor(CLASSES)
    loss, eagerly = "sparse_categorical_crossentropy", BACKEND == "tensorflow"
    said = proofs.assert_exact(
        proofs.compiled(GraphConvolution, 0.1, loss, run_eagerly=eagerly),
        lambda model: [float(model.train_on_batch(batch, classes)) for _ in range(3)],
        tolerance=1e-5,
    )
    assert bool(said) == (BACKEND != "jax")


@proofs.needs_split
def test_a_proof_without_memory_says_nothing_about_the_layer(tmp_path: Path) -> None:
    """A later call, with the memory, is split."""
    file = str(tmp_path / "memory_is_used")

    def large(inputs: Any) -> Any:
        """The first call that finds a file runs out of memory."""
        if os.path.exists(file):
            os.remove(file)
            raise MemoryError("cannot allocate 9 GiB")
        return ops.tanh(inputs)

    model = mirrored_model(Apply(large), layers.Dense(3))
    Path(file).touch()
    # None says that it cannot be split.
    with warnings.catch_warnings(action="error", category=UserWarning):
        with pytest.raises(MemoryError, match="cannot allocate 9 GiB"):
            model.predict_on_batch(X[:8])
        model.predict_on_batch(X[:8])


class Squeeze(Apply):
    """Drops all axes with one entry, the rows too where there is one."""

    def compute_output_spec(self, x: Any) -> Any:
        return keras.KerasTensor(x.shape[:1], x.dtype)


def columns_before_rows(x: Any) -> Any:
    return x * ops.cast(ops.arange(6) < ops.shape(x)[0], x.dtype)


@pytest.mark.one_backend("torch", "tensorflow")
@proofs.needs_split
@pytest.mark.parametrize("name", ["Squeeze", "Mask"])
@pytest.mark.parametrize("batch", [2, 3])
def test_one_row_on_each_replica(name: str, batch: int) -> None:
    if BACKEND == "tensorflow" and name == "Mask":
        pytest.skip("tested with `run_eagerly`")

    def make() -> Any:
        last = [Apply(columns_before_rows), layers.Dense(1)]
        if name == "Squeeze":
            last = [layers.Dense(1), Squeeze(ops.squeeze)]
        return proofs.sequential(layers.Dense(6), *last)

    fit = proofs.fits(X[:12], Y[:12, 0] if name == "Squeeze" else Y[:12], batch)
    assert proofs.assert_exact(proofs.compiled(make, 0.003), fit)


@proofs.needs_split
def test_classes_along_the_rows_of_a_metric() -> None:
    def make() -> Any:
        metric = keras.metrics.OneHotMeanIoU(8, axis=0, name="iou")
        model = proofs.sequential(layers.Dense(3))
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=[metric])
        return model

    assert not proofs.assert_exact(make, proofs.fits(X[:24], X[:24, :3], 8))


@pytest.mark.one_backend("tensorflow")
@proofs.of_tensorflow
def test_warning_does_not_promise_numbers_of_tensorflow() -> None:
    import tensorflow as tf

    noise = Apply(lambda x: x * (1 + tf.random.normal(()) / 5))
    parts = layers.Dense(6), noise, layers.Dense(1)
    make = proofs.compiled(lambda: proofs.sequential(*parts), 0.003)
    _, said = proofs.trained(make, proofs.fits(X, Y, 8), proofs.mirrored())
    assert len(said) == 1
    assert "exact but for numbers that the code draws by `tf.random`" in said[0]


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.filterwarnings("error:.*cannot be split")
@proofs.needs_split
def test_numbers_that_another_thread_draws_are_not_drawn_again() -> None:
    # Such as the thread of a dataset that reads ahead from a generator.
    drawn: list[Any] = []
    another, ends = threading.Condition(), threading.Event()

    def draw() -> None:
        while not ends.wait(0.005):
            drawn.append((random.random(), np.random.normal(), random.randrange(100)))
            with another:
                another.notify_all()

    def after_a_draw(layer: Any, x: Any) -> Any:
        with layer.another:
            layer.another.wait(0.1)
        return ops.tanh(x @ layer.kernel)

    def model() -> keras.Model:
        layer = Own(after_a_draw, kernel=(6, 2))
        # Not the numbers, whose changes a proof would follow.
        layer.another = another
        return proofs.sequential(layer)

    thread = threading.Thread(target=draw)
    with proofs.mirrored().scope():
        made = proofs.compiled(model, 0.1)()
    random.seed(5)
    np.random.seed(5)
    thread.start()
    try:
        made.fit(X[:7], np.ones((7, 2)), batch_size=7, verbose=0)
    finally:
        ends.set()
        thread.join()
    python, numpy = random.Random(5), np.random.RandomState(5)
    for numbers in drawn:
        assert numbers == (python.random(), numpy.normal(), python.randrange(100))
    assert drawn
