"""Callbacks, files and decisions of several workers."""

from __future__ import annotations

import contextlib
import io
import time

import keras
import numpy as np
import pytest
from harness.training import assert_same, numbers
from multi_worker.clusters import assert_as_one_device, dense

import keras_strategies as ks

pytestmark = pytest.mark.one_backend


def rows(count=22):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 4)).astype("float32")
    return x, x[:, :1] - x[:, 1:2]


def make_model(strategy):
    return dense(
        *(strategy, 4, lambda: [keras.layers.Dense(3), keras.layers.Dense(1)]),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    )


def test_a_worker_loads_what_the_chief_has_saved(cluster, tmp_path):
    """`tf.distribute` saves on every worker, each to a path of its own."""

    def program(strategy):
        model = make_model(strategy)
        model.fit(*rows(), batch_size=8, verbose=0)
        if strategy.workers.is_chief:
            # The others have to wait for it.
            save_own_variables = model.layers[0].save_own_variables

            def slowly(store):
                time.sleep(0.5)
                save_own_variables(store)

            model.layers[0].save_own_variables = slowly
        for turn in range(2):
            path = tmp_path / f"{turn}.keras"
            model.save(path)
            keras.models.load_model(path)
            path = tmp_path / f"{turn}.weights.h5"
            model.save_weights(path)
            model.load_weights(path)
        if keras.backend.backend() == "tensorflow":
            model.export(tmp_path / "export", verbose=False)
            assert (tmp_path / "export" / "saved_model.pb").exists()
        # A worker is told that the chief could not save.
        kind = OSError if strategy.workers.is_chief else ks.errors.WorkerError
        with pytest.raises(kind):
            model.save(tmp_path / "missing" / "model.keras")

    cluster(program)


def test_only_the_chief_writes_files(cluster, tmp_path):
    def program(strategy):
        # Each worker has a folder of its own, as on machines of their own.
        own = tmp_path / str(strategy.workers.group.index)
        own.mkdir()
        model = make_model(strategy)
        kinds = keras.callbacks
        callbacks = [
            kinds.ModelCheckpoint(own / "{epoch}.keras"),
            kinds.ModelCheckpoint(
                own / "best.weights.h5", save_best_only=True, save_weights_only=True
            ),
            kinds.CSVLogger(own / "log.csv"),
            kinds.TensorBoard(own / "board"),
        ]
        options = {"batch_size": 8, "epochs": 2, "validation_split": 0.25, "verbose": 0}
        model.fit(*rows(), **options, callbacks=callbacks)
        model.save(own / "last.keras")
        model.save_weights(own / "last.weights.h5")
        return numbers(model)

    found = cluster(program)
    files = {path.name for path in (tmp_path / "0").iterdir()}
    assert files == {
        *("1.keras", "2.keras", "best.weights.h5", "log.csv"),
        *("board", "last.keras", "last.weights.h5"),
    }
    assert any("events" in path.name for path in tmp_path.rglob("0/board/*/*"))
    assert not [path for path in (tmp_path / "1").rglob("*") if path.is_file()]
    # An ordinary file, which opens without a strategy.
    model = keras.saving.load_model(tmp_path / "0" / "last.keras")
    assert_same(found[1], numbers(model), 0.0, "the file")
    assert len((tmp_path / "0" / "log.csv").read_text().splitlines()) == 3


def test_only_the_chief_prints(cluster):
    def program(strategy):
        model = make_model(strategy)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            stop = keras.callbacks.EarlyStopping("loss", patience=0, verbose=1)
            model.fit(*rows(), epochs=2, verbose=2, callbacks=[stop])
            model.evaluate(*rows(), verbose=2)
            model.predict(rows()[0], verbose=2)
        return printed.getvalue()

    chief, other = cluster(program)
    assert "Epoch 2/2" in chief and "loss" in chief
    # Two epochs, `evaluate` and `predict`.
    assert chief.count("/step on 2 workers") == 4
    assert other == ""


def test_decisions_are_the_chiefs(cluster):
    def program(strategy):
        chief = strategy.workers.group.is_chief

        class Decide(keras.callbacks.Callback):
            """What only the chief knows: a clock, a file, a person."""

            def on_epoch_end(self, epoch, logs=None):
                if chief and epoch == 1:
                    self.model.optimizer.learning_rate = 0.007
                if chief and epoch == 3:
                    self.model.stop_training = True

        model = make_model(strategy)
        history = model.fit(*rows(), epochs=9, verbose=0, callbacks=[Decide()])
        rate = float(np.asarray(model.optimizer.learning_rate))
        return len(history.epoch), rate, numbers(model)

    found = cluster(program)
    for epochs, rate, values in found:
        assert epochs == 4
        assert np.isclose(rate, 0.007)
        assert_same(found[0][2], values, 0.0, "a worker")


def test_a_worker_alone_may_have_a_callback_of_batches(cluster):
    """On either worker; what it decides on another than the chief does not count."""

    def program(strategy, owner):
        model, seen = make_model(strategy), []

        def end(batch, logs):
            seen.append(batch)
            if batch == 2:
                model.stop_training = True

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                end(batch, logs)

        kinds = [Stop(), keras.callbacks.LambdaCallback(on_train_batch_end=end)]
        callbacks = [kinds[owner]] if strategy.workers.group.index == owner else []
        options = {"batch_size": 2, "epochs": 2, "verbose": 0}
        history = model.fit(*rows(), **options, callbacks=callbacks)
        return seen, len(history.epoch), numbers(model)

    (seen, epochs, chief), (_, others_epochs, other) = cluster(program, 0)
    assert (seen, epochs, others_epochs) == ([0, 1, 2], 1, 1)
    assert_same(chief, other, 0.0, "worker 1")
    (_, epochs, chief), (seen, others_epochs, other) = cluster(program, 1)
    assert (seen, epochs, others_epochs) == ([*range(11)] * 2, 2, 2)
    assert_same(chief, other, 0.0, "worker 1")


def test_callbacks_may_evaluate_and_predict_on_every_worker(cluster):
    def program(strategy):
        found = []
        model = make_model(strategy)

        def look(epoch, logs):
            found.append(model.evaluate(*rows(), batch_size=8, verbose=0))
            found.append(float(model.predict(rows()[0], verbose=0).sum()))

        callback = keras.callbacks.LambdaCallback(on_epoch_end=look)
        model.fit(*rows(), epochs=2, batch_size=8, verbose=0, callbacks=[callback])
        return np.asarray(found)

    first, second = cluster(program)
    assert first.shape == (4,)
    assert_same(first, second, 0.0, "worker 1")


def test_a_step_that_a_callback_makes_again_trains_on_the_next_batch(cluster):
    """Another step function continues with what the one before has read ahead."""

    def program(strategy):
        model = make_model(strategy)

        def make_again(batch, logs):
            if batch == 1:
                model.make_train_function(force=True)

        again = keras.callbacks.LambdaCallback(on_train_batch_end=make_again)
        x, y = rows()
        batches = ((x[i : i + 6], y[i : i + 6]) for i in range(0, 22, 6))
        options = {"steps_per_epoch": 4, "shuffle": False, "verbose": 0}
        model.fit(batches, **options, callbacks=[again])
        return numbers(model)

    assert_as_one_device(cluster, program)


def test_initial_weights_are_the_chiefs(cluster):
    def program(strategy):
        model = make_model(strategy)
        # Something that only one worker does, a file that only it has.
        index = strategy.workers.group.index
        model.set_weights([np.asarray(w) + index for w in model.get_weights()])
        before = numbers(model)
        # An error of every worker leaves the cluster usable.
        x, y = rows()
        with pytest.raises(ValueError, match="cardinality"):
            model.fit(x, y[:5], verbose=0)
        model.fit(x, y, epochs=1, verbose=0)
        return before, numbers(model)

    (chief, after), (other, also_after) = cluster(program)
    assert not np.allclose(chief["weights"][0], other["weights"][0])
    assert_same(after, also_after, 0.0, "worker 1")


def test_the_time_of_a_callback_is_that_of_its_worker(cluster):
    def program(strategy):
        slow = keras.callbacks.LambdaCallback()
        if not strategy.workers.is_chief:
            slow.on_train_batch_end = lambda batch, logs: time.sleep(0.1)
        model = make_model(strategy)
        model.fit(*rows(80), batch_size=4, verbose=0, callbacks=[slow])
        return strategy.workers.group.clock.times

    chief, late = cluster(program)
    # Where waits are not seen, those of the chief are no time of its own, either.
    assert late.own > 0.09 and late.waits < 0.05
    assert chief.waits > 0.05
