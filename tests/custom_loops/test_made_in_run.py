"""Objects made in `run`: variables, layers, metrics, optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from custom_loops.helpers import numbers
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["run", "function"])
ROWS = np.ones((2, 3), "float32")


class Once:
    """Makes something in its first call, and uses it in all of them."""

    def __init__(self, make: Callable[[], Any], use: Callable[[Any], Any]):
        self._make = make
        self._use = use
        self.made: Any = None

    def __call__(self) -> Any:
        if self.made is None:
            self.made = self._make()
        return self._use(self.made)


def random_variable() -> keras.Variable:
    initializer = keras.initializers.RandomNormal()
    return keras.Variable(initializer, shape=(3,), dtype="float32")


def metric_of_two(metric: Any) -> Any:
    metric.update_state(2.0)
    return metric.result()


USES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "variable": (lambda: keras.Variable(3.0), lambda variable: variable + 0),
    "random variable": (random_variable, lambda variable: variable + 0),
    "dense": (lambda: layers.Dense(2), lambda layer: layer(ROWS)),
    "dropout": (
        lambda: layers.Dropout(0.5),
        lambda layer: ops.shape(layer(ROWS, training=True))[0] + ops.zeros(()),
    ),
    "metric": (lambda: keras.metrics.Mean(), metric_of_two),
}


@COMPILED
@pytest.mark.parametrize("kind", USES)
def test_what_the_first_run_makes_is_equal_on_all_replicas(mirrored, kind, compiled):
    once = Once(*USES[kind])

    def step() -> Any:
        return mirrored.run(once)

    step = ks.function(step) if compiled else step
    first, second = numbers(step()), numbers(step())
    made = once.made
    for found in (*first, *second):
        np.testing.assert_array_equal(found, first[0])
    step()
    assert once.made is made


@COMPILED
@pytest.mark.parametrize("kind", ["variable", "random variable", "dense", "metric"])
def test_what_each_call_makes_is_refused_at_once(mirrored, kind, compiled):
    make, use = USES[kind]
    calls = []

    def fn() -> Any:
        calls.append(1)
        return use(make())

    def step() -> Any:
        return mirrored.run(fn)

    with pytest.raises(ks.errors.ContextError, match=r"with strategy\.scope\(\)"):
        (ks.function(step) if compiled else step)()
    assert len(calls) < 10


@COMPILED
def test_an_optimizer_made_in_run_updates_as_one_made_in_the_scope(mirrored, compiled):
    gradient = np.array([1, -2, 3], "float32")
    once = Once(lambda: keras.optimizers.Adam(0.1), lambda optimizer: optimizer)
    with mirrored.scope():
        ready = keras.optimizers.Adam(0.1)
        variables = [keras.Variable(np.ones(3, "float32")) for _ in range(2)]

    def fn() -> None:
        ready.apply([ops.convert_to_tensor(gradient)], variables[:1])
        once().apply([ops.convert_to_tensor(gradient)], variables[1:])

    def step() -> None:
        mirrored.run(fn)

    step = ks.function(step) if compiled else step
    step()
    step()
    found = [variable.numpy() for variable in variables]
    assert not np.array_equal(found[0], np.ones(3))
    np.testing.assert_array_equal(found[0], found[1])
    assert int(once.made.iterations) == 2


def test_after_updates_a_later_run_may_make_a_variable(mirrored):
    once = Once(*USES["random variable"])
    with mirrored.scope():
        variable = keras.Variable(np.ones(3, "float32"))
        total = keras.Variable(0.0, aggregation="sum")
        optimizer = keras.optimizers.SGD(1.0)

    def fn(with_more: bool) -> Any:
        total.assign_add(1.0)
        optimizer.apply([ops.ones(3)], [variable])
        return once() if with_more else ops.zeros(())

    mirrored.run(fn, args=(False,))
    for _ in range(2):
        first, second = numbers(mirrored.run(fn, args=(True,)))
        np.testing.assert_array_equal(first, second)
    assert float(total.numpy()) == 6


def yields() -> Any:
    yield ops.ones(())


async def is_async() -> int:
    return 1


def test_functions_that_would_run_later_are_refused(mirrored):
    for fn in (yields, is_async, lambda: (x for x in (1, 2))):
        with pytest.raises(ValueError, match="would run later"):
            mirrored.run(fn)
    with pytest.raises(ValueError, match="would run later"):
        ks.function(yields)


def test_run_inside_merge_call_does_not_hang(mirrored):
    def fn() -> Any:
        return ks.get_replica_context().merge_call(
            lambda strategy: strategy.run(lambda: ops.ones(2))
        )

    refused = pytest.raises(ks.errors.ContextError, match="merge_call")
    is_jax = keras.backend.backend() == "jax"
    with refused if is_jax else contextlib.nullcontext():
        for value in numbers(mirrored.run(fn)):
            np.testing.assert_array_equal(value, np.ones(2))
