"""Half precision: replicas round as one device that computes a batch in parts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
from harness.case import dtype_policy
from keras import layers, ops

import keras_strategies as ks

ROWS, BATCH = 32, 8
BACKEND = keras.backend.backend()
#: The step from one number to the next, relative: 10 and 7 bits of mantissa.
STEP = {"float16": 2**-10, "bfloat16": 2**-7}


# --- Training: the only differences are those of another order of summation ----


@dataclass(frozen=True)
class Trained:
    """Weights after each epoch, logged losses, and the loss scale at the end."""

    weights: list[np.ndarray]
    losses: list[float]
    scale: float

    def difference(self, other: Trained) -> float:
        """Largest difference of weights, relative to the largest of each weight."""
        pairs = zip(self.weights, other.weights, strict=True)
        return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in pairs)


class InHalves(layers.Layer):
    """Calls a model on both halves of a batch, on one device.

    Args:
        model: what is called.
        cast_once: bool. By default each call reads the variables and casts them for
            itself, so that gradients of casts are added in the variables' dtype. Else
            both calls read one cast, and its gradient is that of the sum, rounded.
    """

    def __init__(self, model: keras.Model, cast_once: bool) -> None:
        super().__init__()
        self.model = model
        self.cast_once = cast_once

    def call(self, x: Any) -> Any:
        parts = [x[: BATCH // 2], x[BATCH // 2 :]]
        if not self.cast_once:
            return ops.concatenate([self.model(part) for part in parts])
        variables, dtype = self.model.trainable_variables, self.compute_dtype
        casts = [(v, ops.cast(v, dtype)) for v in variables]
        with keras.StatelessScope(state_mapping=casts):
            return ops.concatenate([self.model(part) for part in parts])


def network() -> keras.Model:
    first = [layers.Conv2D(8, 3, activation="relu"), layers.Flatten()]
    last = [layers.Dense(8, "tanh"), layers.Dense(3)]
    return keras.Sequential([keras.Input((6, 6, 2)), *first, *last])


def train(
    policy: str,
    strategy: Any = None,
    order: int | None = None,
    parts: Callable[[keras.Model], layers.Layer] | None = None,
) -> Trained:
    """Trains for two epochs.

    Args:
        order: seed of the order of rows in each batch, None for that of the data.
        parts: makes the layer that calls the network.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 6, 6, 2)).astype("float32")
    y = random.integers(0, 3, ROWS)
    if order is not None:
        shuffle = np.random.default_rng(order).permutation
        rows = np.concatenate([s + shuffle(BATCH) for s in range(0, ROWS, BATCH)])
        x, y = x[rows], y[rows]
    keras.utils.set_random_seed(1)
    with dtype_policy(policy):
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = inner = network()
            if parts is not None:
                inputs = keras.Input((6, 6, 2))
                model = keras.Model(inputs, parts(inner)(inputs))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(0.1), loss)
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return Trained(
        [as_array(v) for v in inner.trainable_variables],
        history.history["loss"],
        float(as_array(getattr(model.optimizer, "dynamic_scale", 1.0))),
    )


def as_array(value: Any) -> np.ndarray:
    return np.array(ops.convert_to_numpy(ops.cast(value, "float32")))


@pytest.mark.one_backend("tensorflow")
@pytest.mark.nightly(unless=["mixed_bfloat16"])
@pytest.mark.parametrize(
    "policy", ["float16", "bfloat16", "mixed_float16", "mixed_bfloat16"]
)
def test_replicas_are_off_by_what_another_order_of_summation_is(policy: str) -> None:
    """Replicas compute the halves of a batch, as one device can, too.

    On Torch and TensorFlow every number is then the same. XLA chooses the order of
    sums for each program; there the difference is compared with those of one device
    that computes the halves, or has the rows of each batch in another order.
    """
    found = train(policy, ks.MirroredStrategy(["cpu:0", "cpu:1"]))
    cast_once = policy == "mixed_float16"
    halves = train(policy, parts=lambda model: InHalves(model, cast_once))
    assert found.scale == halves.scale
    if BACKEND != "jax":
        # A last bit that differs anywhere is more than a thousand times as much.
        assert found.difference(halves) <= 1e-6
        np.testing.assert_allclose(found.losses, halves.losses, rtol=1e-6)
        return
    alone = train(policy)
    others = [halves, *(train(policy, order=seed) for seed in (1, 2))]
    rounding = max(alone.difference(other) for other in others)
    assert rounding > 0
    assert found.difference(alone) <= 2 * rounding


# --- Sums over replicas are float32 and are rounded once -------------------------


@pytest.fixture(params=["bfloat16", "float16"])
def terms(request: pytest.FixtureRequest) -> tuple[str, list[float], float]:
    """A dtype, four numbers, and their sum as it is rounded once.

    Added one by one in the dtype, the sum stays at the first.
    """
    large = 2 / STEP[request.param]
    return request.param, [large, 1.0, 1.0, 1.0], large + 4


@pytest.fixture
def strategy() -> Any:
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(4)])


@pytest.mark.one_backend
def test_gradients_of_fit(strategy, terms, request) -> None:
    """Keras's own sum on one device is a matrix product of the dtype.

    Its kernels round in between, or not, as they divide the work among cores.
    """
    dtype, values, expected = terms
    if BACKEND == "jax" and dtype == "float16":
        reason = "XLA's partitioner makes an all-reduce in the dtype of the product"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    with strategy.scope(), dtype_policy(dtype):
        dense = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile(
            keras.optimizers.SGD(1.0), lambda _, outputs: outputs * len(values)
        )
        x = np.array(values, "float32")[:, None]
        model.fit(x, np.zeros_like(x), batch_size=4, verbose=0)
    assert float(as_array(dense.kernel)[0, 0]) == -expected


def test_gradients_of_loops(strategy, terms) -> None:
    dtype, _, expected = terms
    with strategy.scope():
        weight = keras.Variable([0.0], dtype=dtype)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])

    def step(x: Any) -> None:
        _, gradients = ks.value_and_grad(lambda: ops.sum(weight * x), [weight])()
        optimizer.apply(gradients, [weight])

    strategy.run(step, args=(per_replica(strategy, terms),))
    assert as_array(weight).tolist() == [-expected]


@pytest.mark.parametrize("op, share", [("sum", 1), ("mean", 4)])
def test_reductions(strategy, terms, op: str, share: int) -> None:
    dtype, _, expected = terms
    value = per_replica(strategy, terms)
    context = ks.get_replica_context
    ours = strategy.run(lambda x: context().all_reduce(op, x), args=(value,))
    every = strategy.experimental_local_results(ours)
    for found in (strategy.reduce(op, value), *every):
        assert keras.backend.standardize_dtype(found.dtype) == dtype
        assert as_array(found).tolist() == [expected / share]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_means_along_an_axis(strategy, dtype: str) -> None:
    """Neither sum nor number of these rows is a number of the dtype."""
    rows = ops.cast(np.full((301, 1), 300.0), dtype)
    found = strategy.reduce("mean", ks.PerReplica([rows] * 4), axis=0)
    assert as_array(found).tolist() == [300.0]


def per_replica(strategy: Any, terms: tuple[str, list[float], float]) -> Any:
    dtype, values, _ = terms
    pairs = zip(values, strategy.placement.replicas, strict=True)
    move = strategy.engine.to_device
    return ks.PerReplica([move(ops.cast(np.array([v]), dtype), d) for v, d in pairs])
