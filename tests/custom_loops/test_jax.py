"""Custom loops on JAX: programs, their state, where it lies, and mixed rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from custom_loops.helpers import numbers, per_replica
from keras import layers, ops

import keras_strategies as ks

if keras.backend.backend() != "jax":
    pytest.skip("JAX only", allow_module_level=True)

import jax
import jax.experimental.sparse

ROWS = np.arange(10, dtype="float32")


# Datasets.


@pytest.mark.parametrize("use", ["for", "next", "optional", "run"])
def test_a_dataset_is_not_iterated_in_a_program(mirrored, use):
    dataset = mirrored.experimental_distribute_dataset([ROWS[:4], ROWS[4:]])
    iterator = iter(dataset)

    def ask() -> Any:
        if use == "for":
            return [mirrored.run(ops.sum, args=(batch,)) for batch in dataset]
        if use == "optional":
            return iterator.get_next_as_optional()
        return next(iterator)

    with pytest.raises(RuntimeError, match=r"constants of the program.*each batch"):
        mirrored.run(ask) if use == "run" else ks.function(ask)()
    assert len(list(iterator)) == 2


# Programs.


@pytest.mark.parametrize("where", ["argument", "distributed", "result", "aux"])
def test_objects_of_several_arrays_are_refused(mirrored, where):
    sparse = jax.experimental.sparse.BCOO.fromdense(np.eye(3, dtype="float32"))

    def differentiated():
        variable = keras.Variable(1.0)
        loss = ks.value_and_grad(lambda: (variable + 0, sparse), [variable], True)
        return loss()[0][0]

    calls = {
        "argument": lambda: mirrored.run(lambda x: x.todense(), (sparse,)),
        "distributed": lambda: mirrored.run(
            lambda x: x.todense(), (ks.PerReplica([sparse, sparse]),)
        ),
        "result": lambda: ks.function(lambda: sparse * 2)(),
        "aux": differentiated,
    }
    with pytest.raises(TypeError, match=r"type BCOO.*Pass the object's arrays"):
        calls[where]()


def trace_counter(strategy: Any) -> tuple[Any, list[Any]]:
    traces: list[Any] = []

    @ks.function
    def step(x: Any, scale: float = 1.0) -> Any:
        traces.append(x)
        return strategy.run(lambda x: x * scale, args=(x,))

    return step, traces


def test_a_function_is_compiled_once_for_each_shape(mirrored):
    step, traces = trace_counter(mirrored)
    step(per_replica([1, 2], [3, 4]))
    first = len(traces)
    for value in range(3):
        step(per_replica([value, 2], [3, 4]))
    assert len(traces) == first
    step(per_replica([1], [3]))
    second = len(traces)
    assert second > first
    for _ in range(2):
        step(per_replica([1], [3]))
        step(per_replica([1, 2], [3, 4]))
    assert len(traces) == second
    found = step(per_replica([1], [3]), scale=2.0)
    assert numbers(found) == [[2], [6]]
    assert len(traces) > second


def counting_step(strategy: Any) -> tuple[Any, Any]:
    with strategy.scope():
        variable = keras.Variable(np.zeros(4, "float32"), aggregation="mean")

    def replica_step(x: Any) -> None:
        variable.assign_add(x)

    return variable, ks.function(lambda x: strategy.run(replica_step, args=(x,)))


def test_state_that_is_assigned_is_donated():
    variable, step = counting_step(ks.OneDeviceStrategy("cpu:0"))
    step(np.ones(4, "float32"))
    where = variable.value.unsafe_buffer_pointer()
    for _ in range(3):
        step(np.ones(4, "float32"))
        assert variable.value.unsafe_buffer_pointer() == where
    np.testing.assert_array_equal(variable.numpy(), 4 * np.ones(4))


def test_state_that_somebody_holds_is_not_donated(mirrored):
    variable, step = counting_step(mirrored)
    x = per_replica(np.ones(4), np.ones(4))
    step(x)
    held = variable.value
    step(x)
    np.testing.assert_array_equal(np.asarray(held), np.ones(4))
    np.testing.assert_array_equal(variable.numpy(), 2 * np.ones(4))


def test_an_error_while_tracing_leaves_state_as_it_was(mirrored):
    variable, step = counting_step(mirrored)
    step(per_replica(np.ones(4), np.ones(4)))
    with pytest.raises(Exception, match=r"shape|broadcast"):
        step(per_replica(np.ones(3), np.ones(3)))
    np.testing.assert_array_equal(variable.numpy(), np.ones(4))
    step(per_replica(np.ones(4), np.ones(4)))
    np.testing.assert_array_equal(variable.numpy(), 2 * np.ones(4))


def test_a_callback_is_that_of_each_run(mirrored):
    """A program has the number of a callback, not its function."""
    shape = jax.ShapeDtypeStruct((), "float32")

    def step(factor: float) -> Any:
        def double(x: Any) -> Any:
            return np.float32(x * factor)

        return lambda x: jax.pure_callback(double, shape, x)

    x = per_replica(1.0, 2.0)
    for factor in (2.0, 3.0):
        found = mirrored.run(step(factor), args=(x,))
        assert numbers(found) == [factor, 2 * factor]


# Layers by which a replica's results depend on its other rows.

X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
DEVICES = ["cpu:0", "cpu:1"]
NAMED = "depends on which rows a replica has"


class Center(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0)


class CenterOfAll(layers.Layer):
    """Exact where replicas have equally many rows."""

    def call(self, x: Any) -> Any:
        mean = ops.mean(x, axis=0)
        replica = ks.get_replica_context()
        return x - (mean if replica is None else replica.all_reduce("MEAN", mean))


@ks.row_wise
class Declared(layers.Layer):
    def call(self, x: Any) -> Any:
        return x - ops.mean(x, axis=0) * 0.0


def results(strategy: Any, make: Any, rows: int, batch: int, compiled: bool) -> Any:
    """The outputs of a model with the layer, of all batches."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,))
        x = layers.Dense(4)(inputs)
        # Of uneven rows it is refused.
        x = x if rows % 2 else layers.BatchNormalization()(x)
        model = keras.Model(inputs, layers.Dense(2)(make()(x)))

    def step(x: Any) -> Any:
        return strategy.run(lambda x: model(x, training=True), args=(x,))

    step = ks.function(step) if compiled else step
    batches = strategy.experimental_distribute_dataset(X[:rows], batch_size=batch)
    return np.concatenate([np.asarray(strategy.gather(step(x), 0)) for x in batches])


def check(make: Any, rows: int, batch: int, compiled: bool = False) -> list[str]:
    """The warnings; fails unless these say whether one device computes the same."""
    alone = ks.OneDeviceStrategy("cpu:0")
    expected = results(alone, make, rows, batch, compiled)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = results(ks.MirroredStrategy(DEVICES), make, rows, batch, compiled)
    texts = [str(w.message) for w in caught if NAMED in str(w.message)]
    assert np.allclose(expected, found, atol=1e-5) == (not texts)
    return texts


# Of 7 rows replicas have 4 and 3.
@pytest.mark.parametrize("compiled", [False, True])
def test_layer_and_operation_are_named_once(compiled: bool) -> None:
    (text,) = check(lambda: Center(name="center"), 7, 7, compiled)
    assert "Layer 'functional" in text and "'Subtract' (in layer 'center'" in text
    assert "test_jax.py:" in text and "of 2 replicas" in text


@pytest.mark.parametrize("make", [CenterOfAll, Declared, lambda: layers.Dropout(0.5)])
def test_others_are_not_named(make: Callable[[], Any]) -> None:
    assert not check(make, 4, 4)
