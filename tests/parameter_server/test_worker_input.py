"""Pipelines of a `DatasetCreator` are read by the workers, and rows count once."""

from __future__ import annotations

import os
import pickle
from collections import Counter

import keras
import numpy as np
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = pytest.mark.multiprocess

#: Rows of each batch.
SIZES = (8, 8, 5, 8, 8, 3, 8)


class Batches:
    """An iterable over batches, each read anew in each pass.

    Args:
        batches: list of batches.
        log: path of a file, for the process that reads a batch; None for none.
    """

    def __init__(self, batches, log=None):
        self.batches, self.log = batches, log

    def __len__(self):
        # Without it Keras on TensorFlow counts one step more in each epoch.
        return len(self.batches)

    def __iter__(self):
        for batch in self.batches:
            if self.log is not None:
                with open(self.log, "a") as file:
                    file.write(f"{os.getpid()}\n")
            yield batch


def cut(*arrays):
    ends = np.cumsum(SIZES)
    pairs = zip(ends - SIZES, ends, strict=True)
    return [tuple(array[a:b] for array in arrays) for a, b in pairs]


def creator(batches, log=None):
    """Batch `i` belongs to pipeline `i % n`."""

    def dataset_fn(context):
        every = context.num_input_pipelines
        return Batches(batches[context.input_pipeline_id :: every], log)

    return ks.DatasetCreator(dataset_fn)


def data():
    random = np.random.default_rng(2)
    x = random.normal(size=(sum(SIZES), 4)).astype("float32")
    y = (x.sum(1, keepdims=True) + 1).astype("float32")
    return x, y, random.uniform(size=len(x)).astype("float32")


def dense(is_built: bool = True):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)]
    if is_built:
        layers.insert(0, keras.Input((4,)))
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse", weighted_metrics=["mae"])
    return model


@pytest.fixture(scope="module")
def in_turn(forks):
    """Two workers that take one step after the other."""
    with clusters.start(workers=2, ps=1, max_staleness=0) as strategy:
        yield strategy


@pytest.mark.slow(seconds=7)
@pytest.mark.parametrize("options", [{}, {"steps_per_epoch": 7}], ids=["pass", "steps"])
def test_batches_of_two_workers_equal_one_device(in_turn, tmp_path, options) -> None:
    batches = cut(*data())
    # With steps, one pass has the batches of both epochs.
    trained = batches * 2 if options else batches
    options = {"epochs": 2, "verbose": 0, **options}
    expected = dense()
    history = expected.fit(creator(trained), **options).history
    with in_turn.scope():
        model = dense(is_built=False)
    log = tmp_path / "readers"
    found = model.fit(
        creator(trained, log), validation_data=creator(batches, log), **options
    ).history
    for name, numbers in history.items():
        np.testing.assert_allclose(found[name], numbers, rtol=1e-5, err_msg=name)
    for ours, theirs in zip(
        clusters.values(model.weights), clusters.values(expected.weights), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    evaluated = expected.evaluate(creator(batches), verbose=0)
    np.testing.assert_allclose(
        [found["val_loss"][-1], found["val_mae"][-1]], evaluated, rtol=1e-5
    )
    np.testing.assert_allclose(
        model.evaluate(creator(batches), verbose=0), evaluated, rtol=1e-5
    )
    # In training and in evaluation, of two epochs each, a worker reads its own batches,
    # and the coordinator none.
    workers = in_turn.cluster.scheduler.workers
    own = {
        str(workers[i].pid): len(trained[i::2])
        * (1 if "steps_per_epoch" in options else 2)
        + len(batches[i::2]) * 2
        for i in range(2)
    }
    assert Counter(log.read_text().split()) == own


@pytest.mark.one_backend
def test_the_coordinator_carries_no_rows(in_turn, monkeypatch) -> None:
    def ones():
        return np.ones([64, 4096], "float32"), np.ones([64, 1], "float32")

    with in_turn.scope():
        model = keras.Sequential([keras.Input((4096,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    sent = []
    scheduler, send = in_turn.cluster.scheduler, in_turn.cluster.scheduler.send

    def count(receiver, message) -> None:
        sent.append(len(pickle.dumps(message)))
        send(receiver, message)

    monkeypatch.setattr(scheduler, "send", count)

    def dataset_fn(context):
        return [ones() for _ in range(6)]

    model.fit(ks.DatasetCreator(dataset_fn), verbose=0)
    through = sum(sent)
    sent.clear()
    model.fit((ones() for _ in range(12)), verbose=0)
    assert sum(sent) > 12 * ones()[0].nbytes
    assert through < sum(sent) / 100


@pytest.mark.one_backend
def test_predictions_have_the_order_of_one_pipeline(in_turn) -> None:
    batches = [batch[:1] for batch in cut(*data())]
    with in_turn.scope():
        model = dense()
    found = model.predict(creator(batches), verbose=0)
    expected = dense()
    np.testing.assert_allclose(
        found, expected.predict(creator(batches), verbose=0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.one_backend
def test_an_error_of_a_pipeline_is_raised(in_turn) -> None:
    batches = cut(*data())

    class Failing(Batches):
        def __iter__(self):
            yield from self.batches[:2]
            raise OSError("the disk is gone")

    with in_turn.scope():
        model = dense()
    with pytest.raises(OSError, match=r"the disk is gone"):
        model.fit(ks.DatasetCreator(lambda context: Failing(batches)), verbose=0)
    # The cluster goes on.
    model.fit(creator(batches), verbose=0)


@pytest.mark.one_backend
def test_empty_pipelines(in_turn) -> None:
    batches = cut(*data())[:1]
    with in_turn.scope():
        model, unbuilt = dense(), dense(is_built=False)
    model.fit(creator(batches), epochs=2, verbose=0)
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2
    with pytest.raises(ks.errors.InputError, match="input is empty"):
        unbuilt.fit(creator([]), verbose=0)


def counted():
    """A model with a table of how often each id was trained on, negative."""
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="int32"),
            keras.layers.Embedding(IDS, 1, embeddings_initializer="zeros"),
            keras.layers.Flatten(),
        ]
    )
    # The gradient of each row is one.
    model.compile(
        keras.optimizers.SGD(1.0),
        lambda y, found: keras.ops.sum(found) + 0 * keras.ops.sum(y),
        steps_per_execution=2,
    )
    return model


IDS = 400


def ids():
    """Batches of 4, each id once."""
    order = np.random.default_rng(4).permutation(IDS).reshape(-1, 4, 1).astype("int32")
    return [(batch, np.zeros([4, 1], "float32")) for batch in order]


class Killer(keras.callbacks.Callback):
    """Kills worker 0 at some steps, and waits for its return before the next."""

    def __init__(self, strategy, steps):
        super().__init__()
        self.strategy, self.steps, self.kills = strategy, steps, 0

    def on_batch(self, batch) -> None:
        if batch in self.steps:
            clusters.wait_until_whole(self.strategy)
            clusters.kill(self.strategy, "worker", self.kills % 2)
            self.kills += 1

    def on_train_batch_end(self, batch, logs=None):
        self.on_batch(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.on_batch(batch)


@pytest.mark.one_backend
@pytest.mark.slow(seconds=7)
def test_rows_count_once_while_workers_die(recovered) -> None:
    with recovered.scope():
        model = counted()
    killer = Killer(recovered, (11, 31, 61))
    model.fit(creator(ids()), epochs=2, verbose=0, callbacks=[killer])
    assert killer.kills == 6
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2 * 100
    np.testing.assert_array_equal(model.get_weights()[0], np.full([IDS, 1], -2.0))

    # Without `steps_per_epoch` evaluation has each row once, too.
    table = np.arange(IDS, dtype="float32")[:, None]
    model.set_weights([table])
    killer = Killer(recovered, (21, 41))
    loss = model.evaluate(creator(ids()), verbose=0, callbacks=[killer])
    assert killer.kills == 2
    np.testing.assert_allclose(loss, table.sum() / 100, rtol=1e-5)


@pytest.mark.one_backend
def test_steps_of_endless_pipelines_count_once_while_workers_die(recovered) -> None:
    """A new process begins its pipeline again; the number of updates is exact."""

    def endless(context):
        def batches():
            while True:
                yield from ids()

        return batches()

    with recovered.scope():
        model = counted()
    killer = Killer(recovered, (11, 31, 61))
    model.fit(
        ks.DatasetCreator(endless),
        steps_per_epoch=100,
        epochs=2,
        verbose=0,
        callbacks=[killer],
    )
    assert killer.kills == 6
    assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 200
    assert model.get_weights()[0].sum() == -200 * 4
