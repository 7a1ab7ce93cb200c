"""Models whose layer calls are compiled, and their trainings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np

layers = keras.layers
#: Batches of 7, 7, 7 and 5 rows, twice: those of 7 are compiled when the third begins.
ROWS, BATCH, EPOCHS = 26, 7, 2
#: The training steps of a program.
COMPILED = 4
_random = np.random.default_rng(0)
TOKENS = _random.integers(1, 11, (ROWS, 4)).astype("int32")
TOKENS[::3, 2:] = 0
IMAGES = _random.normal(size=(ROWS, 4, 4, 2)).astype("float32")
VECTORS = _random.normal(size=(ROWS, 6)).astype("float32")
LABELS = _random.integers(0, 3, ROWS)
SAMPLE_WEIGHT = _random.uniform(0.2, 2.0, ROWS).astype("float32")


def gpt() -> keras.Model:
    """A block of a transformer with dropout, of tokens with a mask."""
    tokens = keras.Input((4,), dtype="int32")
    x = layers.Embedding(11, 8, mask_zero=True)(tokens)
    h = layers.LayerNormalization()(x)
    h = layers.MultiHeadAttention(2, 4, dropout=0.2)(h, h, use_causal_mask=True)
    x = x + layers.Dropout(0.3)(h)
    h = layers.Dense(16, activation="gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(8)(h)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(3)(x), name="gpt")


def residual() -> keras.Model:
    """Batch normalization of all rows, in two branches."""
    images = keras.Input((4, 4, 2))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(images)
    a = layers.BatchNormalization()(x)
    b = layers.BatchNormalization(momentum=0.5)(layers.Conv2D(4, 1)(x))
    x = layers.ReLU()(a + layers.Conv2D(4, 3, padding="same")(layers.ReLU()(b)))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(3)(x), name="residual")


def noisy() -> keras.Model:
    """Draws with and without a generator, and losses that layers add."""
    vectors = keras.Input((6,))
    penalty = keras.regularizers.L2(0.1)
    x = layers.Dense(8, "tanh", activity_regularizer=penalty)(vectors)
    x = layers.GaussianNoise(0.1, seed=3)(layers.Dropout(0.3)(x))
    x = layers.Dropout(0.3, seed=5, noise_shape=(None, 1))(x)
    return keras.Model(vectors, layers.Dense(3)(x), name="noisy")


class SumOfRows(layers.Layer):
    """A layer of which replicas exchange a sum over rows."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * self.scale - 0.5 * keras.ops.mean(x, axis=0)


def exchanging() -> keras.Model:
    vectors = keras.Input((6,))
    x = SumOfRows()(layers.Dense(8, "tanh")(vectors))
    return keras.Model(vectors, layers.Dense(3)(x), name="exchanging")


class Again(layers.Layer):
    """A layer that is called twice, once as the backward pass computes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(8, "tanh")
        self.again = keras.remat(self.inner)

    def build(self, shape: Any) -> None:
        self.inner.build(shape)

    def call(self, x: Any) -> Any:
        return self.inner(x) + self.again(0.5 * x)


def rematerialized(mode: str | None = "full") -> keras.Model:
    """Layers that the backward pass computes again."""
    vectors = keras.Input((6,))
    x = Again()(layers.Dropout(0.3)(vectors))
    with keras.RematScope(mode):
        h = layers.Dense(8, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(8, "tanh")(h)
    return keras.Model(vectors, layers.Dense(3)(x), name="rematerialized")


def product() -> keras.Model:
    """A program of library calls, for which no C++ is compiled."""
    vectors = keras.Input((6,))
    outputs = layers.Dense(3, use_bias=False)(vectors)
    return keras.Model(vectors, outputs, name="product")


MODELS: dict[str, tuple[Callable[[], keras.Model], Any]] = {
    "gpt": (gpt, TOKENS),
    "residual": (residual, IMAGES),
    "noisy": (noisy, VECTORS),
    "exchanging": (exchanging, VECTORS),
    "rematerialized": (rematerialized, VECTORS),
    "product": (product, VECTORS),
}


def made(make: Callable[[], keras.Model], **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    model = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, weight_decay=0.1), loss, **options)
    return model


def trained(strategy: Any, name: str, is_compiled: bool) -> dict[str, Any]:
    """Losses and weights after a training, and what `evaluate` and `predict` return."""
    make, x = MODELS[name]
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = made(make, weighted_metrics=["accuracy"], jit_compile=is_compiled)
    given = {"batch_size": BATCH, "verbose": 0}
    history = model.fit(
        *(x, LABELS), sample_weight=SAMPLE_WEIGHT, epochs=EPOCHS, shuffle=False, **given
    )
    return {
        "loss": history.history["loss"],
        "accuracy": history.history["accuracy"],
        "evaluated": model.evaluate(x, LABELS, **given),
        "predicted": model.predict(x, **given),
        **{f"{i} {v.path}": np.array(v) for i, v in enumerate(model.variables)},
    }


def assert_equal(
    found: dict[str, Any], expected: dict[str, Any], tolerance: float = 2e-5
) -> None:
    for (name, value), other in zip(found.items(), expected.values(), strict=True):
        np.testing.assert_allclose(
            value, other, rtol=tolerance, atol=tolerance, err_msg=name
        )


@contextlib.contextmanager
def counted_programs() -> Iterator[list[Any]]:
    """The numbers of rows of which programs are called, those of training."""
    import torch

    from keras_strategies.engines.torch.data_parallel.call_programs import CallProgram

    found, call = [], CallProgram.call

    def counted(self: Any, plan: Any, collectives: Any, *rest: Any) -> Any:
        if torch.is_grad_enabled():
            found.append(plan.row_split.every)
        return call(self, plan, collectives, *rest)

    with mock.patch.object(CallProgram, "call", counted):
        yield found


@contextlib.contextmanager
def graphs_without_compiler() -> Iterator[list[Any]]:
    """Programs are the graphs that a compiler would get, which are called as they are.

    A compiler of C++ takes a minute for each.
    """
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx

    graphs: list[Any] = []

    def lowered(module: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    with mock.patch.object(compile_fx, "compile_fx_inner", lowered):
        yield graphs
