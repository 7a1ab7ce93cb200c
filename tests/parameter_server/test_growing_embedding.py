"""Tables whose rows are given to ids as they come."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

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

CAPACITY = 40
#: Keras on TensorFlow squares the gradients of equal ids of a batch one by one.
IS_LINEAR = keras.backend.backend() == "tensorflow"


# Rows of ids


class OneByOne:
    """What a table of ids promises, with a dict and loops."""

    def __init__(self, rows: int, candidates: int, admit: int):
        self.rows, self.candidates, self.admit = rows, candidates, admit
        self.seen: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.row: dict[int, int] = {}
        self.now = 0

    def see(self, ids) -> None:
        self.now += 1
        for each, count in Counter(ids).items():
            self.seen[each] = self.seen.get(each, 0) + count
            self.last[each] = self.now
        wanted = [i for i in set(ids) - set(self.row) if self.seen[i] >= self.admit]
        taken = set(self.row.values())
        free = [row for row in range(1, self.rows) if row not in taken]
        wanted.sort(key=lambda i: (-self.seen[i], i))
        self.row.update(zip(wanted, free, strict=False))
        waiting = sorted(
            set(self.seen) - set(self.row),
            key=lambda i: (-self.last[i], -self.seen[i], i),
        )
        if len(waiting) <= self.candidates:
            return
        for each in waiting[self.candidates - self.candidates // 4 :]:
            del self.seen[each], self.last[each]

    def expire(self, unseen, fewer_than) -> None:
        for each in list(self.seen):
            is_old = unseen is not None and self.now - self.last[each] >= unseen
            is_rare = fewer_than is not None and self.seen[each] < fewer_than
            if is_old or (is_rare and each in self.row):
                del self.seen[each], self.last[each]
                self.row.pop(each, None)


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


def days(kind: str):
    """Parts of a stream whose ids change, with targets."""
    random = np.random.default_rng(1)
    for day in range(5):
        ids = day * 6 + np.minimum(random.geometric(0.15, (48, 2)), 30)
        y = (ids % 7).sum(axis=1, keepdims=True).astype("float32")
        if kind == "strings":
            yield np.char.add("item ", ids.astype(str)), y
        else:
            yield ids.astype("int64") * (2**40 + 3), y


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


# Within `fit`


def batches(count: int = 12):
    """Batches of a stream whose ids change, in two inputs."""
    random = np.random.default_rng(1)
    for i in range(count):
        first, second = i + np.minimum(random.geometric(0.15, (2, 8, 2)), 30)
        y = ((first + second) % 7).sum(axis=1, keepdims=True).astype("float32")
        yield {"a": first * (2**40 + 3), "b": second * (2**40 + 3)}, y


def two_inputs():
    keras.utils.set_random_seed(2)
    table = ks.layers.GrowingEmbedding(CAPACITY, 3, admit=2, name="growing")
    inputs = {name: keras.Input((2,), dtype="int32", name=name) for name in "ab"}
    joined = keras.layers.Concatenate(axis=1)([table(x) for x in inputs.values()])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(joined)))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model, ks.callbacks.AdmitIds(dict.fromkeys("ab", table))


def fit(model, admission, epochs: int = 2, steps: int = 4, callbacks=()):
    return model.fit(
        admission.read(batches()),
        steps_per_epoch=steps,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        callbacks=[admission, *callbacks],
    )


def weights_of(model):
    return clusters.values([*model.weights, *model.optimizer.variables])


def assert_same(model, expected) -> None:
    for ours, theirs in zip(weights_of(model), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def fitted():
    model, admission = two_inputs()
    fit(model, admission)
    return weights_of(model)


def test_ids_get_rows_in_the_batch_of_their_second_sight() -> None:
    model, admission = two_inputs()
    table = model.get_layer("growing")
    expected = OneByOne(CAPACITY, CAPACITY, 2)
    found = admission.read(batches())
    admission.on_train_begin()
    for (x, _), (rows, _) in zip(batches(), found, strict=True):
        expected.see(np.concatenate([x["a"], x["b"]]).reshape(-1).tolist())
        for name in "ab":
            ids = x[name].reshape(-1).tolist()
            own = [expected.row.get(each, 0) for each in ids]
            assert rows[name].dtype == np.int32
            np.testing.assert_array_equal(rows[name].reshape(-1), own)
    assert 0 < len(expected.row) < CAPACITY - 1
    # What was not trained is not counted.
    assert table.used == 0
    fit(model, admission)
    trained = OneByOne(CAPACITY, CAPACITY, 2)
    for x, _ in list(batches())[:8]:
        trained.see(np.concatenate([x["a"], x["b"]]).reshape(-1).tolist())
    every = np.array(list(expected.seen))
    own = [trained.row.get(each, 0) for each in every.tolist()]
    np.testing.assert_array_equal(table.rows(every), own)


def test_the_length_of_an_epoch_changes_no_number(fitted) -> None:
    model, admission = two_inputs()
    fit(model, admission, epochs=4, steps=2)
    assert_same(model, fitted)


@pytest.mark.one_backend
@pytest.mark.multiprocess
def test_two_servers_admit_what_one_device_admits(synchronous, fitted) -> None:
    with synchronous.scope():
        model, admission = two_inputs()
    fit(model, admission)
    assert_same(model, fitted)


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_steps_in_flight_have_the_rows_of_their_order(asynchronous) -> None:
    model, admission = two_inputs()
    fit(model, admission, epochs=3)
    expected = keras.ops.convert_to_numpy(model.get_layer("growing").entries)
    with asynchronous.scope():
        model, admission = two_inputs()
    fit(model, admission, epochs=3)
    found = keras.ops.convert_to_numpy(model.get_layer("growing").entries)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.one_backend
def test_two_replicas_admit_what_one_device_admits(fitted) -> None:
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model, admission = two_inputs()
    fit(model, admission)
    assert_same(model, fitted)


class Dies(keras.callbacks.Callback):
    """Ends training after a step."""

    def __init__(self, step: int):
        super().__init__()
        self.left = step

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            raise RuntimeError("died")


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["3"])
@pytest.mark.parametrize("step", [3, 6])
def test_resumed_training_counts_each_batch_once(fitted, tmp_path, step) -> None:
    """Within the first epoch, and after an epoch whose ids have been counted."""

    def resume():
        folder = str(tmp_path / "snapshots")
        return ks.callbacks.Resume(folder, every_steps=1, stream="skip")

    with ks.OneDeviceStrategy("cpu:0").scope():
        model, admission = two_inputs()
    with pytest.raises(RuntimeError, match="died"):
        fit(model, admission, callbacks=[resume(), Dies(step)])
    with ks.OneDeviceStrategy("cpu:0").scope():
        model, admission = two_inputs()
    steps = []
    counting = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    fit(model, admission, callbacks=[resume(), counting])
    assert 8 - step <= len(steps) < 8
    assert_same(model, fitted)


def test_batches_must_be_read_through_the_callback() -> None:
    model, admission = two_inputs()
    x, y = next(batches())
    rows = {name: np.zeros(ids.shape, "int32") for name, ids in x.items()}
    with pytest.raises(ContextError, match="AdmitIds` has read 0 batches, and 1 have"):
        model.fit(rows, y, batch_size=8, verbose=0, callbacks=[admission])
    # TensorFlow raises an error of its own, with the text.
    with pytest.raises(Exception, match="as one of the callbacks"):
        model.fit(admission.read(batches()), shuffle=False, verbose=0)


# Growth


def train_and_grow(first: int, second: int):
    keras.utils.set_random_seed(2)
    table = ks.layers.GrowingEmbedding(first, 3, admit=2, name="growing")
    layers = [keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((2,), dtype="int32"), table, *layers])
    momentum = keras.optimizers.SGD(0.01, momentum=0.9)
    model.compile(momentum if IS_LINEAR else keras.optimizers.Adam(0.1), "mse")
    for i, (ids, y) in enumerate(days("integers")):
        table.adapt(ids)
        model.fit(table.rows(ids), y, batch_size=8, shuffle=False, verbose=0)
        if i == 1 and first < second:
            table.grow(second, model)
    return model, table


@pytest.fixture(scope="module")
def large_from_the_begin():
    model, table = train_and_grow(60, 60)
    assert CAPACITY < table.used < 59
    return weights_of(model)


def test_a_table_grows_with_its_slots(large_from_the_begin, tmp_path) -> None:
    model, table = train_and_grow(CAPACITY, 60)
    assert_same(model, large_from_the_begin)
    assert table.capacity == 60
    model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert loaded.layers[0].capacity == 60
    assert_same(loaded, large_from_the_begin)
    for wrong in (60, 12):
        with pytest.raises(ValueError, match="makes a table larger"):
            table.grow(wrong, model)
    with pytest.raises(ValueError, match="does not have the layer"):
        table.grow(100, loaded)
    assert table.capacity == 60


@pytest.mark.one_backend
def test_a_table_grows_on_two_replicas(large_from_the_begin) -> None:
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model, _ = train_and_grow(CAPACITY, 60)
    assert_same(model, large_from_the_begin)


@pytest.mark.one_backend
@pytest.mark.multiprocess
def test_a_table_grows_on_two_servers(synchronous, large_from_the_begin) -> None:
    with synchronous.scope():
        model, table = train_and_grow(CAPACITY, 60)
    assert_same(model, large_from_the_begin)
    assert "shards on" in repr(table.embeddings)


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


class Kills(keras.callbacks.Callback):
    """Kills a process, some time after each of several steps."""

    def __init__(self, strategy, kind: str):
        super().__init__()
        self.strategy, self.kind = strategy, kind
        self.random = np.random.default_rng(1)
        self.at = set(self.random.choice(2000, 6, replace=False).tolist())
        self.steps, self.timers = 0, []

    def on_train_batch_end(self, batch, logs=None):
        if self.steps in self.at:
            self.soon()
        self.steps += 1

    def soon(self):
        delay = self.random.uniform(0, clusters.SNAPSHOT_SECONDS)
        self.timers.append(threading.Timer(delay, self.kill))
        self.timers[-1].start()

    def kill(self):
        clusters.wait_until_whole(self.strategy)
        clusters.kill(self.strategy, self.kind, 0)


@pytest.mark.nightly
@pytest.mark.slow(seconds=200)
@pytest.mark.one_backend
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["worker", "ps"])
def test_2000_steps_count_once_under_random_kills(recovered, kind) -> None:
    """During snapshots, admission and growth, too. A row counts its steps."""
    with recovered.scope():
        table = ks.layers.GrowingEmbedding(16, 1, initializer="zeros", name="counts")
        model = keras.Sequential([keras.Input((2,), dtype="int32"), table])
        model.compile(
            keras.optimizers.SGD(1.0), lambda y, p: -keras.ops.sum(p[:, :, 0])
        )
    admission, seen = ks.callbacks.AdmitIds(table), Counter()
    random = np.random.default_rng(0)

    def stream(first: int):
        for _ in range(1000):
            ids = first + random.choice(12, (1, 2), replace=False)
            seen.update(ids[0].tolist())
            yield ids, np.zeros(1)

    kills = Kills(recovered, kind)
    for first, capacity in ((0, 24), (8, 48)):
        model.fit(
            admission.read(stream(first)),
            shuffle=False,
            verbose=0,
            callbacks=[admission, kills],
        )
        kills.soon()
        table.grow(capacity, model)
    for timer in kills.timers:
        timer.join()
    clusters.wait_until_whole(recovered)
    assert len(kills.timers) == 8
    ids, vectors = table.export(np.array(sorted(seen)))
    assert len(set(table.rows(ids))) == len(ids) == 20 and table.rows(ids).min() > 0
    expected = np.array([seen[each] for each in ids.tolist()])
    steps = int(keras.ops.convert_to_numpy(model.optimizer.iterations))
    if kind == "worker":
        np.testing.assert_array_equal(vectors[:, 0], expected)
        assert steps == 2000
    else:
        # What is lost are whole steps, those since a snapshot.
        assert (vectors[:, 0] <= expected).all()
        assert vectors.sum() == 2 * steps
        assert steps > 1000


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
