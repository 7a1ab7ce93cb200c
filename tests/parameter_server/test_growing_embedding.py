"""Tables whose rows are given to ids as they come."""

from __future__ import annotations

import os
import signal

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.errors import ContextError
from keras_strategies.parameter_server.variables.initial_values import (
    shard_initializers,
)
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.training.id_table import IdTable, keys_of
from keras_strategies.training.row_initializer import RowInitializer, initial_rows
from parameter_server import clusters
from parameter_server.growing_tables import CAPACITY, IS_LINEAR, OneByOne, days

# Rows of ids


@pytest.mark.parametrize("admit", [1, 3])
@pytest.mark.parametrize(("rows", "rounds"), [(12, 60), (13, 60), (3000, 12)])
def test_rows_are_those_of_a_table_that_looks_at_one_id_at_a_time(
    admit, rows, rounds
) -> None:
    random = np.random.default_rng(rows)
    candidates = 0 if admit == 1 else rows
    expected = OneByOne(rows, candidates, admit)
    entries = np.zeros((rows + candidates, 4), np.int32)
    table = IdTable(entries, np.zeros(3, np.int32), rows)
    every = random.integers(-(2**62), 2**62, 3 * rows)
    for _ in range(rounds):
        ids = random.choice(every, random.integers(1, rows))
        keys, places = keys_of(ids)
        # As it is read again from its variables, too.
        again = IdTable(table.entries.copy(), table.state.copy(), rows)
        for each in (table, again):
            each.see(keys, np.bincount(places), admit)
        np.testing.assert_array_equal(table.entries, again.entries)
        expected.see(ids.tolist())
        if random.random() < 0.3:
            conditions = [(3, None), (None, 4), (5, 2)][random.integers(3)]
            table.expire(*conditions)
            expected.expire(*conditions)
        found = table.rows_of(every).tolist()
        assert found == [expected.row.get(each, 0) for each in every.tolist()]


def test_ids_are_integers_or_strings() -> None:
    texts, places = keys_of([["b", "a"], ["a", "c"]])
    assert places.shape == (2, 2) and len(texts) == 3
    of_bytes = keys_of(np.array([b"a", b"b", b"c"], object))[0]
    np.testing.assert_array_equal(texts, of_bytes)
    wide = keys_of(np.array([2**63 - 1, -(2**63), 2**32 + 1, 1]))[0]
    assert len(set(wide.tolist())) == 4
    for wrong in ([1.5], [None, "a"]):
        with pytest.raises(TypeError):
            keys_of(wrong)


def test_initial_values_follow_from_the_number_of_the_row() -> None:
    rows = np.arange(4000)
    uniform = keras.initializers.RandomUniform(-2.0, 1.0, seed=3)
    normal = keras.initializers.RandomNormal(1.0, 2.0, seed=3)
    values = initial_rows(uniform, rows, 8)
    np.testing.assert_array_equal(initial_rows(uniform, rows[5:6], 8), values[5:6])
    assert values.min() >= -2 and values.max() <= 1
    assert abs(values.mean() + 0.5) < 0.02 and abs(values.var() - 9 / 12) < 0.02
    assert len(np.unique(values)) > 31_000
    correlations = np.corrcoef(values.T) - np.eye(8)
    assert abs(correlations).max() < 0.07
    other = keras.initializers.RandomUniform(-2.0, 1.0, seed=4)
    assert not np.isclose(initial_rows(other, rows, 8), values).any(axis=1).all()
    values = initial_rows(normal, rows, 8)
    assert abs(values.mean() - 1) < 0.05 and abs(values.std() - 2) < 0.05
    with pytest.raises(ValueError, match="computes each row from its number"):
        ks.layers.GrowingEmbedding(9, 2, initializer="glorot_uniform")


def test_servers_compute_the_rows_of_one_process() -> None:
    initializer = RowInitializer(keras.initializers.RandomNormal(seed=3))
    whole = keras.ops.convert_to_numpy(initializer((300_007, 4), "float32"))
    shard = shard_initializers(initializer, (300_007, 4), "float32")
    found = [shard(a, b)() for a, b in ((0, 7), (7, 290_000), (290_000, 300_007))]
    np.testing.assert_array_equal(np.concatenate(found), whole)


# Training


def build():
    keras.utils.set_random_seed(2)
    table = ks.layers.GrowingEmbedding(CAPACITY, 3, admit=2, name="growing")
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            table,
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    momentum = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(momentum if IS_LINEAR else keras.optimizers.Adagrad(0.1), "mse")
    return model, table


def train(model, table, parts):
    for ids, y in parts:
        table.adapt(ids)
        table.expire(model.optimizer, unseen=2)
        model.fit(table.rows(ids), y, batch_size=8, shuffle=False, verbose=0)


def found(model, table, kind="integers"):
    ids = np.unique(np.concatenate([ids for ids, _ in days(kind)]))
    return table.rows(ids), [*clusters.values(model.weights)], table.export(ids)[1]


def assert_equal(one, other) -> None:
    np.testing.assert_array_equal(one[0], other[0])
    for a, b in zip([*one[1], one[2]], [*other[1], other[2]], strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def on_one_device():
    model, table = build()
    train(model, table, days("integers"))
    return found(model, table)


def test_rows_come_and_expire(on_one_device) -> None:
    rows = on_one_device[0]
    assert 0 < (rows > 0).sum() < CAPACITY and (rows == 0).any()
    assert len(set(rows[rows > 0])) == (rows > 0).sum()


@pytest.mark.multiprocess
def test_two_servers_train_what_one_device_trains(synchronous, on_one_device) -> None:
    with synchronous.scope():
        model, table = build()
    train(model, table, days("integers"))
    assert_equal(found(model, table), on_one_device)


@pytest.mark.multiprocess
def test_one_server_trains_what_one_device_trains(synchronous, on_one_device) -> None:
    with clusters.parts(synchronous, 1), synchronous.scope():
        model, table = build()
    train(model, table, days("integers"))
    assert_equal(found(model, table), on_one_device)


def test_two_replicas_train_what_one_device_trains(on_one_device) -> None:
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model, table = build()
    train(model, table, days("integers"))
    assert_equal(found(model, table), on_one_device)


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", ["model", "weights", "checkpoint"])
def test_saved_tables_go_on_under_another_strategy(synchronous, tmp_path, way) -> None:
    """Strings; saved by servers, and expired rows are not those of another run."""
    first, *rest = days("strings")
    with synchronous.scope():
        model, table = build()
    train(model, table, [first])
    other, other_table = build()
    train(other, other_table, rest[:1])
    if way == "model":
        model.save(tmp_path / "m.keras")
        other = keras.saving.load_model(tmp_path / "m.keras")
        other_table = other.layers[0]
    elif way == "weights":
        model.save_weights(tmp_path / "m.weights.h5")
        other.load_weights(tmp_path / "m.weights.h5")
        # `load_weights` has slots, too.
    else:
        ks.Checkpoint(model=model).save(tmp_path / "m.ckpt")
        ks.Checkpoint(model=other).restore(tmp_path / "m.ckpt")
    train(model, table, rest)
    train(other, other_table, rest)
    assert_equal(found(other, other_table, "strings"), found(model, table, "strings"))


def test_an_expired_row_begins_again_with_its_slots() -> None:
    model, table = build()
    train(model, table, days("integers"))
    used = table.rows(next(iter(days("integers")))[0])
    table.expire(model.optimizer, unseen=0)
    assert used.max() == 0 or table.rows(np.array([2**41])).max() == 0
    values = clusters.values([table.embeddings, model.optimizer.variables[2]])
    expected = initial_rows(table.initializer, np.arange(1, CAPACITY), 3)
    np.testing.assert_array_equal(values[0][1:], expected)
    initial = 0.0 if IS_LINEAR else 0.1
    np.testing.assert_allclose(values[1][1:], initial)
    assert (abs(values[1][0]) > initial).any()


def bytes_moved(strategy) -> float:
    status = ks.ClusterCoordinator(strategy).status()
    return status.bytes_per_step * status.steps


@pytest.mark.multiprocess
def test_steps_move_the_rows_of_a_batch_only(synchronous) -> None:
    """Neither what is known of ids nor other rows."""
    moved = []
    for capacity in (CAPACITY, 40_000):
        with synchronous.scope():
            table = ks.layers.GrowingEmbedding(capacity, 3)
            model = keras.Sequential([keras.Input((2,), dtype="int32"), table])
            model.compile("sgd", "mse")
        ids = np.arange(16).reshape(8, 2)
        table.adapt(ids)
        x, y = table.rows(ids), np.zeros((8, 2, 3))
        model.fit(x, y, batch_size=8, verbose=0)
        before = bytes_moved(synchronous)
        model.fit(x, y, batch_size=8, verbose=0, epochs=3)
        moved.append(bytes_moved(synchronous) - before)
    assert moved[1] < 1.5 * moved[0]


@pytest.mark.multiprocess
@pytest.mark.parametrize("writes", [1, 2, 9])
def test_a_server_that_is_killed_has_what_was_adapted(
    recovered, monkeypatch, writes
) -> None:
    """Between two writes, and right after all of them."""
    with recovered.scope():
        table = ks.layers.GrowingEmbedding(CAPACITY, 3, name="durable")
        table.build()
    table.adapt(np.arange(5))
    calls = []
    write_pieces = VariableRegistry.write_pieces

    def killing(self, variable, pieces):
        write_pieces(self, variable, pieces)
        calls.append(variable.name)
        if len(calls) == writes:
            kill()

    def kill():
        os.kill(recovered.cluster.scheduler.servers[0].pid, signal.SIGKILL)
        clusters.wait_until(lambda: not clusters.is_whole(recovered), "it is dead")

    monkeypatch.setattr(VariableRegistry, "write_pieces", killing)
    table.adapt(np.arange(3, 12))
    if len(calls) < writes:
        kill()
    clusters.wait_until_whole(recovered)
    entries = keras.ops.convert_to_numpy(table.entries)
    again = IdTable(entries, keras.ops.convert_to_numpy(table.state), CAPACITY)
    rows = again.rows_of(np.arange(12))
    np.testing.assert_array_equal(rows, np.arange(1, 13))
    values = keras.ops.convert_to_numpy(table.embeddings)[rows]
    expected = initial_rows(table.initializer, rows, 3)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.multiprocess
def test_a_worker_looks_up_and_does_not_adapt(synchronous) -> None:
    with synchronous.scope():
        table = ks.layers.GrowingEmbedding(CAPACITY, 3)
        table.build()
    table.adapt(["a", "b"])
    coordinator = ks.ClusterCoordinator(synchronous)
    result = coordinator.schedule(lambda: table.rows(["b", "c", "a"]))
    assert sorted(result.fetch().tolist()) == [0, 1, 2]
    coordinator.schedule(lambda: table.adapt(["c"]))
    with pytest.raises(ContextError, match="on the coordinator"):
        coordinator.join()


def test_rows_that_are_scarce_go_to_the_most_frequent_ids() -> None:
    table = ks.layers.GrowingEmbedding(3, 2)
    with pytest.warns(UserWarning, match="2 ids get no row in"):
        assert table.adapt([7, 8, 8, 9, 9, 9, 1]) == 2
    assert table.rows([9, 8, 7, 1]).tolist() == [1, 2, 0, 0]
