"""Growing tables: ids get rows within `fit`, and tables grow."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.errors import ContextError
from parameter_server import clusters
from parameter_server.growing_tables import CAPACITY, IS_LINEAR, OneByOne, days

# Within `fit`


def batches(count: int = 12):
    """Batches of a stream whose ids change, in two inputs."""
    random = np.random.default_rng(1)
    for i in range(count):
        first, second = i + np.minimum(random.geometric(0.15, (2, 8, 2)), 30)
        y = ((first + second) % 7).sum(axis=1, keepdims=True).astype("float32")
        yield {"a": first * (2**40 + 3), "b": second * (2**40 + 3)}, y


def two_inputs(capacity: int = CAPACITY, **options):
    keras.utils.set_random_seed(2)
    table = ks.layers.GrowingEmbedding(capacity, 3, admit=2, name="growing")
    inputs = {name: keras.Input((2,), dtype="int32", name=name) for name in "ab"}
    joined = keras.layers.Concatenate(axis=1)([table(x) for x in inputs.values()])
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(joined)))
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return model, ks.callbacks.AdmitIds(dict.fromkeys("ab", table), **options)


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


# At the end of an epoch

FEW, MOST, UNSEEN = 10, 30, 3


def changing():
    return two_inputs(FEW, max_capacity=MOST, unseen=UNSEEN)


def fit_changing(model, admission, callbacks=()):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* ids get no row")
        fit(model, admission, epochs=4, steps=3, callbacks=callbacks)
    return model.get_layer("growing")


@pytest.fixture(scope="module")
def by_hand():
    """The same with a call of `fit` for each epoch, and calls of the layer."""
    model, admission = two_inputs(FEW)
    table = model.get_layer("growing")
    every, capacities, freed = list(batches()), [], 0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* ids get no row")
        for epoch in range(4):
            part = admission.read(every[3 * epoch : 3 * epoch + 3])
            options = {"steps_per_epoch": 3, "shuffle": False, "verbose": 0}
            model.fit(part, callbacks=[admission], **options)
            freed += table.expire(model.optimizer, unseen=UNSEEN)
            if 4 * table.used > 3 * table.capacity and table.capacity < MOST:
                table.grow(min(2 * table.capacity, MOST), model)
            capacities.append(table.capacity)
    assert capacities == [2 * FEW, 2 * FEW, MOST, MOST] and freed
    return weights_of(model)


def test_tables_grow_and_rows_expire_within_fit(by_hand) -> None:
    model, admission = changing()
    table = fit_changing(model, admission)
    assert table.capacity == MOST
    assert_same(model, by_hand)
    found = model.predict({n: np.zeros((4, 2), "int32") for n in "ab"}, verbose=0)
    assert np.isfinite(found).all()


@pytest.mark.one_backend
@pytest.mark.multiprocess
def test_tables_on_two_servers_grow_within_fit(synchronous, by_hand) -> None:
    with synchronous.scope():
        model, admission = changing()
    fit_changing(model, admission)
    assert_same(model, by_hand)


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_tables_of_two_asynchronous_workers_grow_within_fit(asynchronous) -> None:
    """Each update counts, and the ids are those of one device."""
    model, admission = changing()
    expected = keras.ops.convert_to_numpy(fit_changing(model, admission).entries)
    with asynchronous.scope():
        model, admission = changing()
    table = fit_changing(model, admission)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(table.entries), expected)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 12


@pytest.mark.one_backend
def test_tables_of_two_replicas_grow_within_fit(by_hand) -> None:
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model, admission = changing()
    fit_changing(model, admission)
    assert_same(model, by_hand)


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["4"])
@pytest.mark.parametrize("step", [4, 6])
def test_resumed_tables_change_once_at_the_end_of_an_epoch(
    by_hand, tmp_path, step
) -> None:
    """Resumed within the second epoch, and at its end."""

    def resume():
        folder = str(tmp_path / "snapshots")
        return ks.callbacks.Resume(folder, every_steps=1, stream="skip")

    with ks.OneDeviceStrategy("cpu:0").scope():
        model, admission = changing()
    with pytest.raises(RuntimeError, match="died"):
        fit_changing(model, admission, [resume(), Dies(step)])
    capacity = model.get_layer("growing").capacity
    with ks.OneDeviceStrategy("cpu:0").scope():
        model, admission = two_inputs(capacity, max_capacity=MOST, unseen=UNSEEN)
    fit_changing(model, admission, [resume()])
    assert_same(model, by_hand)


def test_an_epoch_of_one_step_does_not_change_tables() -> None:
    model, admission = changing()
    with pytest.raises(ValueError, match="steps_per_epoch=1"):
        fit(model, admission, steps=1)


@pytest.mark.one_backend
def test_tables_change_after_the_last_execution_of_an_epoch() -> None:
    """An epoch of 3 steps has 4 with executions of 2."""
    expected = []
    for steps, steps_per_execution in ((4, 1), (3, 2)):
        with ks.OneDeviceStrategy("cpu:0").scope():
            model, admission = changing()
            sgd = keras.optimizers.SGD(0.01, momentum=0.9)
            model.compile(sgd, "mse", steps_per_execution=steps_per_execution)
        fit(model, admission, epochs=3, steps=steps)
        expected = expected or weights_of(model)
    assert_same(model, expected)


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
