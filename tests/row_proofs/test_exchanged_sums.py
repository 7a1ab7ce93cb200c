"""Sums over rows that a layer uses further are exchanged by replicas.

Batches and weights are uneven. What needs rows of others themselves stays unsplit.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_same
from keras import layers, ops

from row_proofs import proofs
from row_proofs import test_attacks as attacks
from row_proofs.proofs import Function, Own, assert_equal, numbers

pytestmark = [pytest.mark.one_backend("torch", "tensorflow"), proofs.needs_split]

X = proofs.shifted(18)  # Three batches: 8, 8 and 2 rows.
Y = np.sin(X[:, :1])
WEIGHTS = np.random.default_rng(3).uniform(size=18).astype("float32")


def statistics(function: Function, dtype: str = "float32") -> Own:
    inner = layers.Dense(6, kernel_initializer="orthogonal", dtype=dtype)
    inner.build((None, 6))
    average = {"shape": (6,), "initializer": "ones", "trainable": False}
    return Own(function, inner, dtype=dtype, kernel=(6, 6), average=average)


def masked_mean(layer: Own, x: Any) -> Any:
    kept = ops.cast(x[:, 0] > 0, "float32")
    each = ops.sum(ops.square(x @ layer.kernel), axis=-1)
    layer.add_loss(0.1 * ops.sum(kept * each) / ops.maximum(ops.sum(kept), 1))
    return x


def vicreg(layer: Own, x: Any) -> Any:
    """Variance and covariance penalties of Bardes, Ponce and LeCun (2022)."""
    z = ops.matmul(x, layer.kernel)
    z = z - ops.mean(z, axis=0)
    count = ops.sum(ops.ones_like(z[:, 0]))
    covariance = ops.matmul(ops.transpose(z), z) / (count - 1)
    layer.add_loss(0.05 * ops.sum(ops.square(covariance * (1 - ops.eye(6)))))
    deviation = ops.sqrt(ops.mean(ops.square(z), axis=0) + 1e-4)
    layer.add_loss(0.1 * ops.mean(ops.relu(1 - deviation)))
    return z


def minibatch_deviation(layer: Own, x: Any) -> Any:
    """The last layer of StyleGAN's critic, with the batch as one group."""
    h = x @ layer.kernel
    feature = ops.mean(ops.sqrt(ops.var(h, axis=0) + 1e-8))
    return ops.concatenate([h, ops.ones_like(h[:, :1]) * feature], axis=1)


def codebook(layer: Own, x: Any) -> Any:
    """Codes that are averages of the rows that choose them, as in VQ-VAE."""
    distances = ops.square(x[:, :, None] - layer.kernel[None])
    chosen = ops.one_hot(ops.argmin(ops.sum(distances, axis=1), axis=-1), 6)
    counts, sums = ops.sum(chosen, axis=0), ops.matmul(ops.transpose(x), chosen)
    layer.average.assign(0.9 * layer.average + 0.1 * counts)
    moved = 0.9 * layer.kernel + 0.1 * sums / ops.maximum(counts, 1.0)
    layer.kernel.assign(ops.stop_gradient(moved))
    return x + ops.stop_gradient(chosen @ ops.transpose(layer.kernel) - x)


def balance(layer: Own, x: Any) -> Any:
    """The loss of a mixture of experts: a product of means."""
    chances = ops.softmax(x @ layer.kernel)
    chosen = ops.one_hot(ops.argmax(chances, axis=-1), 6)
    share = ops.mean(chances, axis=0) * ops.mean(chosen, axis=0)
    layer.add_loss(3 * ops.sum(share))
    return ops.concatenate([x, chances], axis=-1)


def stopped(layer: Own, x: Any) -> Any:
    h = x @ layer.kernel
    return h - ops.stop_gradient(ops.mean(h, axis=0))


def with_inner_layer(layer: Own, x: Any) -> Any:
    """A layer of Keras that contains sums, too, before and after."""
    h = layer.inner(x)
    return layer.inner(h - ops.mean(h, axis=0)) @ layer.kernel


_FUNCTIONS = masked_mean, vicreg, minibatch_deviation, codebook, balance, stopped
FUNCTIONS_OF_ROWS = {f.__name__: f for f in (*_FUNCTIONS, with_inner_layer)}


def model_of(function: Function, dtype: str = "float32") -> keras.Model:
    parts = layers.Dense(6, dtype=dtype), statistics(function, dtype), layers.Dense(1)
    return proofs.sequential(*parts)


def trained(function: Function, strategy: Any, eagerly: bool = True, *dtype: str):
    options = {"momentum": 0.9, "run_eagerly": eagerly}
    make = proofs.compiled(lambda: model_of(function, *dtype), 0.05, **options)
    fit = proofs.fits(X, Y, 8, epochs=2, sample_weight=WEIGHTS)
    return proofs.trained(make, fit, strategy)


def compared(function: Function, replicas: int, eagerly: bool) -> tuple[Any, bool]:
    """Warnings of replicas that train as one device, and whether they exchange sums."""
    expected, _ = trained(function, proofs.one_device(), eagerly)
    strategy = proofs.mirrored(replicas)
    found, said = trained(function, strategy, eagerly)
    assert_same(expected, found, 1e-5, f"{replicas} replicas")
    return said, exchanges(strategy)


def exchanges(strategy: Any, layer: Any = None) -> bool:
    every = strategy.drivers.fit._call._row_proofs._layers
    of_layers = every.values() if layer is None else [every[layer]]
    return any(each.events for of in of_layers for each in of.found.values())


PROGRAMS = [True] if proofs.BACKEND == "torch" else [True, False]
_BY_DAY = ("minibatch_deviation", "codebook", "balance", "stopped")


@pytest.mark.nightly(unless=[f"{name}-3-True" for name in _BY_DAY])
@pytest.mark.parametrize("eagerly", PROGRAMS)
@pytest.mark.parametrize("replicas", [3, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", FUNCTIONS_OF_ROWS)
def test_numbers_are_those_of_one_device(
    name: str, replicas: int, eagerly: Any
) -> None:
    said, is_exchanged = compared(FUNCTIONS_OF_ROWS[name], replicas, eagerly)
    assert is_exchanged and not said, said


#: What stays unsplit, besides many of the attacks below.
UNSPLIT: dict[str, Function] = {
    "as_index": lambda o, x: x * ops.take(o.kernel, ops.argmax(ops.max(x, 0)), 0),
    "before_the_sum": lambda layer, x: x * ops.sum(x / ops.norm(x, axis=0), axis=0),
    "in_a_branch": lambda layer, x: ops.cond(
        layer.average[0] > 0, lambda: x - ops.mean(x, axis=0), lambda: x * 1.0
    ),
    # A number of rows that is that of a replica.
    "by_hand": lambda o, x: x * ops.square(ops.sum(x, axis=0) / proofs.row_count(x)),
}


@pytest.mark.nightly(unless=["before_the_sum", "in_a_branch"])
@pytest.mark.parametrize("name", UNSPLIT)
def test_what_needs_the_rows_of_others_is_unsplit(name: str) -> None:
    said, is_exchanged = compared(UNSPLIT[name], 2, eagerly=True)
    assert said and not is_exchanged


def test_sums_in_16_bits_are_those_of_all_rows() -> None:
    strategy = proofs.mirrored()
    _, said = trained(stopped, strategy, True, "mixed_bfloat16")
    assert said and not exchanges(strategy)


#: The rows of the calls of `changing`, and the call that differs.
ROWS: list[int] = []
CHANGED = [0]


def changing(layer: Own, x: Any) -> Any:
    ROWS.append(x.shape[0])
    h = x @ layer.kernel
    return h if len(ROWS) == CHANGED[0] else h - ops.mean(h, axis=0)


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("replica", [0, 1])
def test_replica_that_computes_other_sums(replica: int) -> None:
    """No replica waits for it: the call is proved and made again."""
    ROWS.clear()
    CHANGED[0], strategy = 0, proofs.mirrored()
    expected, _ = trained(changing, proofs.mirrored())
    # The traces for 4 and 8 rows, then two replicas in each step; the second changes.
    before, last = len(ROWS), max(i for i, rows in enumerate(ROWS) if rows == 8)
    ROWS.clear()
    CHANGED[0] = last + 4 + replica
    found, said = trained(changing, strategy)
    assert exchanges(strategy) and not said and len(ROWS) > before
    assert_same(expected, found, 1e-6, "two replicas")


_TENSORFLOW = ("inverse", "cumsum of a sum", "mean by NumPy's number")
OF_BACKEND = {"torch": ("in place", "dtype"), "tensorflow": _TENSORFLOW}
_LAYERS = (
    *("activation", "activation that is a layer", "activation that is set", "lambda"),
    *("call that is set", "subclass with the name of Keras's", "model", "einsum"),
    *("sequential model", "model in a model", "layer of a model", "time distributed"),
    *("integer state of a mean", "state of a sum", "state of a square"),
    "spectral norm",
)
#: Those with sums over rows that replicas exchange.
EXCHANGED = {
    *(*attacks.SUMS, *OF_BACKEND.get(proofs.BACKEND, ())),
    *(f"loss: {name}" for name in attacks.SUM_LOSSES),
    *(f"layer: {name}" for name in _LAYERS),
}
#: Arguments that mix rows, code of the framework, and numbers of rows.
BY_DAY = [
    *("softmax of rank 1", "chunks", "compared", "layer: activation that is a layer"),
    *("layer: attention", "layer: softmax of all axes", "layer: framework by its name"),
]


@pytest.mark.nightly(unless=BY_DAY)
@pytest.mark.parametrize("name", attacks.ATTACKS)
def test_attacks(name: str) -> None:
    counts = name.startswith(("layer: coin", "layer: counter"))
    if counts or name in attacks.NOT_IN_KERAS.get(proofs.BACKEND, ()):
        pytest.skip("it cannot be called twice with the same result")
    keras.utils.set_random_seed(1)
    make, shape = attacks.ATTACKS[name]
    strategy = proofs.mirrored(3)

    def call(*args: Any, **kwargs: Any) -> Any:
        return strategy.drivers.fit._call(layer, layer.__call__, args, kwargs)

    with strategy.scope(), warnings.catch_warnings(action="ignore"):
        layer = make()
        layer(ops.convert_to_tensor(attacks.batch(8, 1.0, shape)), training=True)
        count, calls = len(layer.losses), 0
        for rows, factor in (8, 1.0), (8, 3.0), (7, 3.0):
            values = [attacks.batch(rows, factor, shape)]
            try:
                expected = numbers(layer, values, count)
            except Exception:
                # It has no gradient, or takes an even number of rows.
                continue
            found = numbers(layer, values, count, call=call)
            assert_equal(expected, found)
            calls += 1
    assert calls == 0 or exchanges(strategy, layer) == (name in EXCHANGED)
