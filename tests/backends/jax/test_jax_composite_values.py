"""Sparse arrays and registered classes in `run` and `ks.function`."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX backend", allow_module_level=True)

import jax
from jax import numpy as jnp
from jax.experimental import sparse

DENSE = np.array([[0.0, 2.0], [3.0, 0.0], [0.0, 5.0]], "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    """A user's class of two arrays."""

    first: Any
    second: Any


@pytest.fixture(params=[["cpu:0"], ["cpu:0", "cpu:1"]], ids=["one", "two"])
def strategy(request):
    return ks.MirroredStrategy(request.param)


@pytest.fixture(params=[False, True], ids=["eager", "function"])
def call(request, strategy):
    """Calls a function on each replica; returns the replicas' results."""

    def call(fn, *args):
        def step(*args):
            return strategy.run(fn, args)

        result = (ks.function(step) if request.param else step)(*args)
        return result, strategy.experimental_local_results(result)

    return call


def dense(value) -> np.ndarray:
    assert isinstance(value, sparse.JAXSparse), type(value)
    return np.asarray(value.todense())


@pytest.mark.nightly(unless=["one-eager", "two-eager", "two-function"])
def test_an_argument_and_a_result(strategy, call) -> None:
    x = sparse.BCOO.fromdense(DENSE)
    _, found = call(lambda x: {"double": x * 2, "pair": Pair(x @ jnp.ones(2), x)}, x)
    assert len(found) == strategy.num_replicas_in_sync
    for own in found:
        np.testing.assert_array_equal(dense(own["double"]), DENSE * 2)
        assert isinstance(own["pair"], Pair)
        np.testing.assert_array_equal(own["pair"].first, DENSE.sum(1))
        np.testing.assert_array_equal(dense(own["pair"].second), DENSE)


def test_what_is_the_same_on_all_replicas_is_one_object(call) -> None:
    rows = sparse.BCSR.fromdense(DENSE)
    result, _ = call(lambda x: x, rows)
    np.testing.assert_array_equal(dense(result), DENSE)


@pytest.mark.nightly(unless=["one-function"])
def test_each_replica_has_its_own(strategy, call) -> None:
    count = strategy.num_replicas_in_sync

    def values(shapes: bool) -> Any:
        """As many elements or rows as the number of the replica."""

        def own(context):
            i = context.replica_id_in_sync_group
            rows = DENSE[: 1 + i] if shapes else DENSE * (np.arange(3)[:, None] > 1 - i)
            return sparse.BCOO.fromdense(rows)

        return strategy.experimental_distribute_values_from_function(own)

    for shapes in (False, True):
        given = values(shapes)
        expected = [dense(x) for x in strategy.experimental_local_results(given)]
        assert len(expected) == count

        def fn(x):
            assert isinstance(x, sparse.BCOO)
            return x * 3, (x @ jnp.ones(2)).sum()

        _, found = call(fn, given)
        for (sparse_one, total), own in zip(found, expected, strict=True):
            np.testing.assert_array_equal(dense(sparse_one), own * 3)
            assert float(total) == own.sum()


def test_a_program_serves_other_values(strategy) -> None:
    traces = []

    @ks.function
    def step(x):
        traces.append(x)
        return strategy.reduce(
            "SUM", strategy.run(lambda x: (x @ jnp.ones(2)).sum(), (x,))
        )

    count = strategy.num_replicas_in_sync
    assert float(step(sparse.BCOO.fromdense(DENSE))) == 10 * count
    traced = len(traces)
    assert float(step(sparse.BCOO.fromdense(DENSE * 3))) == 30 * count
    assert len(traces) == traced


def test_merged_values(strategy, call) -> None:
    def merge(strategy, x):
        values = strategy.experimental_local_results(x)
        return sum(dense_of(value) for value in values)

    def dense_of(value):
        assert isinstance(value, sparse.BCOO)
        return value.todense()

    def fn(x):
        context = ks.get_replica_context()
        own = x * (1.0 + context.replica_id_in_sync_group)
        return context.merge_call(merge, (own,))

    factor = {1: 1, 2: 1 + 2}[strategy.num_replicas_in_sync]
    _, found = call(fn, sparse.BCOO.fromdense(DENSE))
    for own in found:
        np.testing.assert_array_equal(own, DENSE * factor)


def test_an_auxiliary_value_of_a_gradient(strategy, call) -> None:
    with strategy.scope():
        kernel = keras.Variable(np.array([1.0, 2.0], "float32"))

    def fn(x):
        def loss():
            y = x @ kernel.value
            return y.sum(), Pair(y, x * 2)

        (value, aux), gradients = ks.value_and_grad(loss, [kernel], has_aux=True)()
        return value, aux, gradients

    _, found = call(fn, sparse.BCOO.fromdense(DENSE))
    for value, aux, gradients in found:
        assert float(value) == (DENSE @ [1, 2]).sum()
        np.testing.assert_array_equal(aux.first, DENSE @ [1, 2])
        np.testing.assert_array_equal(dense(aux.second), DENSE * 2)
        np.testing.assert_array_equal(gradients[0], DENSE.sum(0))
