"""JAX: `run` with replicas of different numbers of rows, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

X = np.random.default_rng(3).normal(size=(13, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
CPUS = [f"cpu:{i}" for i in range(4)]


REFUSED = {
    "all_reduce": "the function calls `all_reduce`",
    "merge_call": "the function calls `merge_call`",
    "normalized": "the function calls `all_gather`, or a layer in it does",
    "read": "the function uses variables after their update",
    "assign": "the function assigns variables after an update",
    "two": "the function applies gradients more than once",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_uneven_replicas_that_need_each_other_are_refused(mirrored, kind: str) -> None:
    with mirrored.scope():
        weight = keras.Variable(np.ones(4, "float32"))
        normalization = layers.BatchNormalization()
        normalization.build((None, 4))
        optimizer = keras.optimizers.SGD(0.125)
        optimizer.build([weight])

    def replica_step(x: Any) -> Any:
        def loss_fn() -> Any:
            y = normalization(x, training=True) if kind == "normalized" else x
            return ops.sum(ops.square(y @ ops.reshape(weight, (4, 1))))

        replica = ks.get_replica_context()
        loss, gradients = ks.value_and_grad(loss_fn, [weight])()
        if kind == "all_reduce":
            loss = loss + 0 * replica.all_reduce("SUM", loss)
        if kind == "merge_call":
            replica.merge_call(lambda strategy, loss: loss, args=(loss,))
        optimizer.apply(gradients, [weight])
        if kind == "two":
            optimizer.apply(gradients, [weight])
        if kind == "assign":
            weight.assign(weight * 2)
        if kind == "read":
            loss = loss + 0 * ops.sum(weight)
        return loss

    dataset = mirrored.experimental_distribute_dataset([X[:5], X[:4]])
    uneven, even = dataset
    with pytest.raises(ks.errors.ReplicaMismatchError) as caught:
        mirrored.run(replica_step, args=(uneven,))
    text = str(caught.value)
    assert f"have 3, 2 rows, and {REFUSED[kind]}" in text
    assert "replica_step' (" in text
    assert Path(__file__).name in text
    assert "that 2 replicas divide" in text
    np.testing.assert_array_equal(np.asarray(weight), np.ones(4))
    # And the strategy can be used again.
    loss = mirrored.reduce("SUM", mirrored.run(replica_step, (even,)))
    assert np.isfinite(float(loss))


def branching(number: Any) -> Any:
    if number == 1:
        return ops.ones(())
    return ops.zeros(())


def shaping(number: Any) -> Any:
    return ops.ones((number + 1,))


@pytest.mark.parametrize("rows", [4, 5])
@pytest.mark.parametrize("use", [branching, shaping])
def test_python_that_depends_on_the_replica_is_refused(mirrored, use, rows) -> None:
    def replica_step(x: Any) -> Any:
        return use(ks.get_replica_context().replica_id_in_sync_group)

    [batch] = mirrored.experimental_distribute_dataset([X[:rows]])
    with pytest.raises(ks.errors.ReplicaMismatchError) as caught:
        mirrored.run(replica_step, args=(batch,))
    text = str(caught.value)
    line = use.__code__.co_firstlineno + 1
    assert f"replica_step' ({__file__}:{line}) depends on the replica" in text
    assert "`keras.ops.where`" in text


@pytest.mark.parametrize("compiled", [True, False])
def test_an_error_of_the_function_is_raised_as_it_is_and_once(
    mirrored, compiled
) -> None:
    calls = []

    def replica_step(x: Any) -> Any:
        calls.append(ks.get_replica_context().replica_id_in_sync_group)
        raise KeyError("boom")

    def step(x: Any) -> Any:
        return mirrored.run(replica_step, args=(x,))

    step = ks.function(step) if compiled else step
    with pytest.raises(KeyError, match="boom"):
        step(ks.PerReplica([X[:2], X[2:4]]))
    assert len(calls) == 1
    with pytest.raises(jax.errors.TracerBoolConversionError):
        mirrored.run(lambda x: 1 if x[0, 0] > 0 else 2, (ks.PerReplica([X, X]),))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ((X[:2], X[:2, :3]), "the arrays float32[2, 4], float32[2, 3]"),
        ((X[:2], X[:2].astype("int32")), "the arrays float32[2, 4], int32[2, 4]"),
        (("a", "b"), "the values 'a', 'b'"),
    ],
)
def test_arguments_that_differ_otherwise_are_refused(mirrored, parts, reason) -> None:
    with pytest.raises(ks.errors.ReplicaMismatchError) as caught:
        mirrored.run(lambda x: x, args=(ks.PerReplica(parts),))
    assert f"differ in more than their number of rows: {reason}" in str(caught.value)


def test_devices_of_a_replica_and_uneven_rows_of_several_are_refused(mirrored) -> None:
    with pytest.raises(ks.errors.ReplicaMismatchError, match="devices` differs"):
        mirrored.run(lambda: len(ks.get_replica_context().devices))
    strategy = ks.ModelParallelStrategy("auto", CPUS, 2)
    with pytest.raises(ks.errors.ReplicaMismatchError, match="has several devices"):
        strategy.run(lambda x: x, args=(ks.PerReplica([X[:2], X[:1]]),))


@pytest.mark.parametrize("compiled", [True, False])
def test_rows_are_on_the_device_of_their_replica_only(compiled: bool) -> None:
    strategy = ks.MirroredStrategy(CPUS)

    def step(batch: Any) -> Any:
        return strategy.run(lambda x, y: (2 * x[:, :1] + y, x.shape[0]), args=batch)

    if compiled:
        step = ks.function(step)
    dataset = strategy.experimental_distribute_dataset([(X[:10], Y[:10])])
    [(outputs, rows)] = [step(batch) for batch in dataset]
    assert strategy.experimental_local_results(rows) == (3, 3, 2, 2)
    parts = strategy.experimental_local_results(outputs)
    assert [part.shape for part in parts] == [(3, 1), (3, 1), (2, 1), (2, 1)]
    places = [str(*part.devices()) for part in parts]
    assert places == [str(device) for device in jax.devices("cpu")[:4]]
    np.testing.assert_allclose(np.concatenate(parts), 2 * X[:10, :1] + Y[:10], 1e-6)
