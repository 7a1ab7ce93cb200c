"""`fit` and its siblings, their input and results, against one device."""

from __future__ import annotations

import importlib.util
import json

import keras
import numpy as np
import pytest
from harness import data as feeds

import keras_strategies as ks
from parameter_server import clusters

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]

ROWS = 28  # In batches of 8, the last one has 4.


def data():
    random = np.random.default_rng(3)
    x = random.normal(size=(ROWS, 4)).astype("float32")
    return x, x.sum(1, keepdims=True) + 1


def dense(optimizer=None, **options):
    """A small model; regularized, so that its loss is not the error alone."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(1, kernel_regularizer="l2")]
    )
    optimizer = optimizer or keras.optimizers.SGD(0.05, momentum=0.5)
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    return model


def assert_alike(found, expected, tolerance: float = 1e-5) -> None:
    for ours, theirs in zip(
        clusters.values(found.weights), clusters.values(expected.weights), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def frames(x, y):
    import pandas as pd

    return {"x": pd.DataFrame(x), "y": pd.DataFrame(y), "batch_size": 8}


# Input that is read batch by batch: `test_streams.py` and `test_worker_input.py`.
KINDS = {
    "arrays": lambda s, x, y: feeds.arrays(feeds.Data(x, y), 8),
    "tensors": lambda s, x, y: feeds.tensors(feeds.Data(x, y), 8),
    "pandas": lambda s, x, y: frames(x, y),
    "distributed": lambda s, x, y: {
        "x": s.experimental_distribute_dataset(
            feeds.py_dataset(feeds.Data(x, y), 8)["x"]
        )
    },
}


@pytest.fixture(scope="module")
def pair(synchronous):
    """The same model on parameter servers and on one device, and its first weights."""
    with synchronous.scope():
        ours = dense(keras.optimizers.SGD(0.05))
    theirs = dense(keras.optimizers.SGD(0.05))
    return ours, theirs, theirs.get_weights()


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_input(synchronous, pair, kind) -> None:
    ours, theirs, weights = pair
    ours.set_weights(weights)
    theirs.set_weights(weights)
    x, y = data()
    expected = theirs.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    found = ours.fit(
        **KINDS[kind](synchronous, x, y), epochs=2, shuffle=False, verbose=0
    )
    assert_alike(ours, theirs)
    for name, numbers in expected.history.items():
        np.testing.assert_allclose(found.history[name], numbers, rtol=1e-5)


@pytest.mark.one_backend("jax")
def test_methods_on_batches_and_weights_of_rows(pair) -> None:
    ours, theirs, weights = pair
    x, y = data()
    rows = np.linspace(0, 2, ROWS).astype("float32")
    found, expected = [], []
    for model, into in ((ours, found), (theirs, expected)):
        model.set_weights(weights)
        into += model.train_on_batch(x, y, sample_weight=rows)
        into += model.train_on_batch(x, y, return_dict=True).values()
        into += model.test_on_batch(x, y, sample_weight=rows)
        into += list(np.ravel(model.predict_on_batch(x)))
        into += model.evaluate(x, y, sample_weight=rows, batch_size=8, verbose=0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


# Keras on Torch has no uint64.
WIDE = ["int64", "float64", *["uint64"][: keras.backend.backend() != "torch"]]


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["int64"])
@pytest.mark.parametrize("dtype", WIDE)
def test_arrays_of_64_bits_in_batches_and_in_fit(synchronous, dtype) -> None:
    """`fit` converts arrays as the backend does, a batch arrives as it is."""
    random = np.random.default_rng(3)
    x = random.integers(0, 9, (ROWS, 2)).astype(dtype)
    y = x.sum(1, keepdims=True)

    def numbers():
        keras.utils.set_random_seed(1)
        layers = [keras.Input((2,)), keras.layers.Embedding(9, 3)]
        layers += [keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        found = []
        for _ in range(2):
            found += model.train_on_batch(x[:8], y[:8])
            found += model.test_on_batch(x[:8], y[:8])
            found += list(np.ravel(model.predict_on_batch(x[:8])))
            history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
            found += [history["loss"], history["mae"]]
            found += model.evaluate(x, y, batch_size=8, verbose=0)
            found += list(np.ravel(model.predict(x, batch_size=8, verbose=0)))
        return np.hstack(found)

    expected = numbers()
    with synchronous.scope():
        np.testing.assert_allclose(numbers(), expected, rtol=1e-4)


def test_validation_class_weights_and_epochs(synchronous, pair, capsys) -> None:
    ours, theirs, weights = pair
    x, y = data()
    labels = (y > 1).astype("float32")
    logs = []
    for model in (ours, theirs):
        model.set_weights(weights)
        logs.append(
            model.fit(
                x,
                labels,
                batch_size=8,
                epochs=3,
                initial_epoch=1,
                shuffle=False,
                validation_split=0.25,
                validation_freq=2,
                class_weight={0: 1.0, 1: 3.0},
                verbose=1,
            ).history
        )
    assert len(logs[0]["loss"]) == 2 and len(logs[0]["val_loss"]) == 1
    for name, numbers in logs[1].items():
        np.testing.assert_allclose(logs[0][name], numbers, rtol=1e-5, err_msg=name)
    printed = capsys.readouterr().out
    assert "Epoch 3/3" in printed and "/step on 1 worker - " in printed


def test_arguments_that_it_does_not_take(synchronous) -> None:
    with synchronous.scope():
        model = dense()
    x, y = data()
    with pytest.raises(ValueError, match="unknown"):
        model.evaluate(x, y, unknown=3, verbose=0)
    with pytest.raises(ValueError, match="at the same time"):
        model.train_on_batch(x, y, sample_weight=y, class_weight={0: 1.0})


def test_several_steps_in_one_message(synchronous) -> None:
    x, y = data()
    seen = []
    ends = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: begun.append(batch),
        on_train_batch_end=lambda batch, logs: seen.append((begun.pop(0), batch)),
    )
    begun = []
    with synchronous.scope():
        ours = dense(steps_per_execution=3)
    theirs = dense()
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    found = ours.fit(x, y, callbacks=[ends], **options).history
    expected = theirs.fit(x, y, **options).history
    assert seen == [(0, 2), (3, 5)] * 2
    assert_alike(ours, theirs)
    for name, numbers in expected.items():
        np.testing.assert_allclose(found[name], numbers, rtol=1e-5)
    np.testing.assert_allclose(
        ours.predict(x, batch_size=8, verbose=0),
        theirs.predict(x, batch_size=8, verbose=0),
        rtol=1e-5,
        atol=1e-6,
    )


def test_callbacks_change_the_learning_rate_and_stop(synchronous) -> None:
    x, y = data()

    def callbacks():
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
            keras.callbacks.LambdaCallback(on_epoch_end=stop),
        ]

    def stop(epoch, logs):
        for model in models:
            model.stop_training = epoch == 2

    with synchronous.scope():
        models = [dense(keras.optimizers.SGD(0.5))]
    models.append(dense(keras.optimizers.SGD(0.5)))
    for model in models:
        history = model.fit(
            x, y, batch_size=8, epochs=9, verbose=0, shuffle=False,
            callbacks=callbacks(),
        )  # fmt: skip
        assert history.epoch == [0, 1, 2]
        np.testing.assert_allclose(
            history.history["learning_rate"], [0.1, 0.05, 0.1 / 3], rtol=1e-6
        )
    assert_alike(*models)


@pytest.mark.one_backend("torch")
def test_schedules_count_all_workers_steps(asynchronous) -> None:
    with asynchronous.scope():
        schedule = keras.optimizers.schedules.PiecewiseConstantDecay([20], [1.0, 0.0])
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(schedule), lambda y, p: -p)
    model.fit(np.ones((64, 1)), np.ones((64, 1)), batch_size=1, verbose=0)
    # Steps 0 to 20 have the rate 1, whichever worker makes them.
    assert float(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 64
    assert clusters.values(model.weights)[0].item() == 21.0


def test_mixed_precision(synchronous) -> None:
    x, y = data()

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(8, "relu", dtype="mixed_bfloat16"),
                keras.layers.Dense(1, dtype="float32"),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
        return model

    with synchronous.scope():
        ours = build()
    theirs = build()
    assert ours.layers[0].compute_dtype == "bfloat16"
    for model in (ours, theirs):
        model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    assert_alike(ours, theirs, tolerance=2e-2)


@pytest.mark.one_backend("jax")
def test_a_step_of_ones_own(synchronous) -> None:
    """`train_step` through the public `compute_loss` of each backend."""

    class Doubled(keras.Model):
        def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
            return 2 * super().compute_loss(x, y, y_pred, sample_weight, training)

    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        model = Doubled(inputs, keras.layers.Dense(1)(inputs))
        model.compile(keras.optimizers.SGD(0.02), "mse", metrics=["mae"])
        return model

    x, y = data()
    with synchronous.scope():
        ours = build()
    theirs = build()
    logs = [
        model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        for model in (ours, theirs)
    ]
    assert_alike(ours, theirs)
    np.testing.assert_allclose(logs[0]["loss"], logs[1]["loss"], rtol=1e-5)


def test_a_table_of_ones_own_is_looked_up_by_rows(synchronous) -> None:
    class Table(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(50, 2), initializer="ones")

        def call(self, ids):
            return keras.ops.sum(keras.ops.take(self.table, ids, axis=0), axis=(1, 2))

    with synchronous.scope():
        model = keras.Sequential([keras.Input((3,), dtype="int32"), Table()])
        model.compile(keras.optimizers.SGD(1.0), lambda y, p: p)
    ids = np.array([[1, 2, 2], [7, 7, 7]], "int32")
    model.fit(ids, np.zeros(2), batch_size=2, verbose=0)
    (table,) = clusters.values(model.weights)
    expected = np.ones((50, 2))
    expected[[1, 2, 7]] -= np.array([[0.5], [1.0], [1.5]])
    np.testing.assert_allclose(table, expected, rtol=1e-6)
    assert "shards on" in repr(model.weights[0])


def test_a_matrix_that_is_assigned_and_not_read(synchronous) -> None:
    class Last(keras.layers.Layer):
        """Has what the last batch was like."""

        def build(self, shape):
            options = {"initializer": "zeros", "trainable": False}
            self.last = self.add_weight(shape=(4, 3), **options)

        def call(self, x):
            self.last.assign(keras.ops.ones((4, 3)) * keras.ops.mean(x))
            return x

    def trained():
        model = keras.Sequential([keras.Input((3,)), Last(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        x = np.arange(24, dtype="float32").reshape(8, 3)
        model.fit(x, np.ones(8), batch_size=4, shuffle=False, verbose=0)
        return keras.ops.convert_to_numpy(model.layers[0].last)

    with synchronous.scope():
        found = trained()
    np.testing.assert_array_equal(found, trained())
    assert found.min() > 10


def test_thousands_of_lookups(synchronous) -> None:
    """Large gradients of lookups: XLA sums them on TensorFlow, `index_add` on Torch."""

    def build():
        keras.utils.set_random_seed(1)
        model = keras.Sequential(
            [
                keras.Input((8,), dtype="int32"),
                keras.layers.Embedding(300, 4),
                keras.layers.GlobalAveragePooling1D(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adagrad(0.5), "mse")
        return model

    random = np.random.default_rng(3)
    ids = random.integers(0, 300, (700, 8), dtype="int32")
    y = random.normal(size=(700, 1)).astype("float32")
    with synchronous.scope():
        ours = build()
    theirs = build()
    for model in (ours, theirs):
        model.fit(ids, y, batch_size=512, epochs=2, shuffle=False, verbose=0)
    assert_alike(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": -1}, "`max_staleness` must be an int"),
        ({"variable_partitioner": 3}, "`variable_partitioner` must be one of"),
        ({"silence_seconds": 0}, "`silence_seconds` must be a positive number"),
    ],
)
def test_options_that_cannot_be(options, message) -> None:
    with pytest.raises(ks.errors.InvalidArgumentError, match=message):
        ks.ParameterServerStrategy(**options)


def test_what_is_not_installed_is_named_at_once(monkeypatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "zmq" else found(name)
    )
    with pytest.raises(ImportError, match=r"needs zmq, .*keras-strategies\[ps\]"):
        ks.ParameterServerStrategy()


def test_staleness_is_bounded(asynchronous) -> None:
    """At most `max_staleness` + 1 steps are under way."""
    coordinator = ks.ClusterCoordinator(asynchronous)
    scheduler = asynchronous.cluster.scheduler
    with asynchronous.scope():
        in_flight = keras.Variable(0.0, name="under_way", trainable=False)
        most = keras.Variable(np.zeros(40, "float32"), name="most", trainable=False)

    def step(i):
        import time

        in_flight.assign_add(1.0)
        seen = np.zeros(40, "float32")
        seen[i] = in_flight.numpy()
        most.assign_add(seen)
        time.sleep(0.01)
        in_flight.assign_add(-1.0)

    def highest(bound):
        previous, scheduler.max_staleness = scheduler.max_staleness, bound
        try:
            most.assign(np.zeros(40, "float32"))
            for i in range(40):
                coordinator.schedule(step, args=(i,))
            coordinator.join(clusters.SECONDS)
        finally:
            scheduler.max_staleness = previous
        return float(most.numpy().max())

    assert highest(0) == 1.0
    assert highest(1) <= 2.0
    assert highest(None) >= 2.0


def test_the_model_is_told_as_text(synchronous) -> None:
    with synchronous.scope():
        model = clusters.two_inputs("adagrad")
    text = str(synchronous.describe(model))
    assert "ps:0" in text and "ps:1" in text
    status = ks.ClusterCoordinator(synchronous).status()
    json.dumps(status.rows)
    assert "<table>" in status._repr_html_()
    title, *_ = str(status).splitlines()
    assert title == "ParameterServerStrategy: 1 worker, 2 parameter servers"
    assert "sent and received per step" in str(status)
