"""Callbacks, files and decisions of several workers."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from harness.training import assert_same

import keras_strategies as ks

pytestmark = pytest.mark.one_backend


def rows(count=22):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 4)).astype("float32")
    return x, x[:, :1] - x[:, 1:2]


def make_model(strategy, rate=0.05):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
    return model


def weights(model):
    return {i: np.asarray(value) for i, value in enumerate(model.get_weights())}


def every_file(folder) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def test_a_worker_loads_what_the_chief_has_saved(cluster, tmp_path):
    """`tf.distribute` saves on every worker, each to a path of its own."""

    def program(strategy, folder):
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
            path = Path(folder) / f"{turn}.keras"
            model.save(path)
            keras.models.load_model(path)
            path = Path(folder) / f"{turn}.weights.h5"
            model.save_weights(path)
            model.load_weights(path)
        if keras.backend.backend() == "tensorflow":
            model.export(Path(folder) / "export", verbose=False)
            assert (Path(folder) / "export" / "saved_model.pb").exists()
        return weights(model)

    cluster(program, str(tmp_path))


def test_a_worker_is_told_that_the_chief_could_not_save(cluster, tmp_path):
    def program(strategy, folder):
        model = make_model(strategy)
        path = Path(folder) / "missing" / "model.keras"
        try:
            model.save(path)
        except Exception as error:
            return np.array([isinstance(error, ks.errors.WorkerError)])
        raise AssertionError("saved")

    found = cluster(program, str(tmp_path))
    assert [bool(is_told[0]) for is_told in found] == [
        index > 0 for index in range(len(found))
    ]


def test_only_the_chief_writes_files(cluster, tmp_path):
    def program(strategy, folder):
        # Each worker has a folder of its own, as on machines of their own.
        own = Path(folder) / str(strategy.workers.group.index)
        own.mkdir()
        model = make_model(strategy)
        model.fit(
            *rows(),
            batch_size=8,
            epochs=2,
            verbose=0,
            validation_split=0.25,
            callbacks=[
                keras.callbacks.ModelCheckpoint(own / "{epoch}.keras"),
                keras.callbacks.ModelCheckpoint(
                    own / "best.weights.h5", save_best_only=True, save_weights_only=True
                ),
                keras.callbacks.CSVLogger(own / "log.csv"),
            ],
        )
        model.save(own / "last.keras")
        model.save_weights(own / "last.weights.h5")
        return weights(model)

    found = cluster(program, str(tmp_path))
    assert set(every_file(tmp_path / "0")) == {
        "1.keras",
        "2.keras",
        "best.weights.h5",
        "log.csv",
        "last.keras",
        "last.weights.h5",
    }
    assert every_file(tmp_path / "1") == {}
    # An ordinary file, which opens without a strategy.
    model = keras.saving.load_model(tmp_path / "0" / "last.keras")
    assert_same(found[1], weights(model), 0.0, "the file")
    assert len((tmp_path / "0" / "log.csv").read_text().splitlines()) == 3


def test_workers_may_write_to_one_folder(cluster, tmp_path):
    def program(strategy, folder):
        model = make_model(strategy)
        checkpoint = keras.callbacks.ModelCheckpoint(f"{folder}/model.keras")
        for _ in range(3):
            model.fit(*rows(), epochs=1, verbose=0, callbacks=[checkpoint])
        return weights(model)

    found = cluster(program, str(tmp_path))
    assert list(every_file(tmp_path)) == ["model.keras"]
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert_same(found[0], weights(model), 0.0, "the file")


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


def test_a_backup_is_resumed_by_all_workers(cluster, tmp_path):
    def program(strategy, folder):
        # Only the chief can see its folder.
        own = f"{folder}/{strategy.workers.group.index}"

        class Crash(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch == 2:
                    raise KeyboardInterrupt

        model = make_model(strategy)
        with contextlib.suppress(KeyboardInterrupt):
            model.fit(
                *rows(),
                epochs=5,
                shuffle=False,
                verbose=0,
                callbacks=[keras.callbacks.BackupAndRestore(own), Crash()],
            )
        keras.utils.set_random_seed(99)
        again = make_model(strategy)
        backup = keras.callbacks.BackupAndRestore(own)
        history = again.fit(
            *rows(), epochs=5, shuffle=False, verbose=0, callbacks=[backup]
        )
        return {"epochs": history.epoch, **weights(again)}

    found = cluster(program, str(tmp_path))
    whole = make_model(ks.OneDeviceStrategy("cpu:0"))
    whole.fit(*rows(), epochs=5, shuffle=False, verbose=0)
    for index, results in enumerate(found):
        assert results.pop("epochs") == [3, 4]
        assert_same(weights(whole), results, 1e-5, f"worker {index}")


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
        return len(history.epoch), rate, weights(model)

    found = cluster(program)
    for epochs, rate, values in found:
        assert epochs == 4
        assert np.isclose(rate, 0.007)
        assert_same(found[0][2], values, 0.0, "a worker")


def test_the_chief_can_stop_within_an_epoch(cluster):
    def program(strategy):
        seen = []

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(batch)
                if strategy.workers.group.is_chief and batch == 2:
                    self.model.stop_training = True

        make_model(strategy).fit(
            *rows(), batch_size=2, epochs=3, verbose=0, callbacks=[Stop()]
        )
        return seen

    assert cluster(program) == [[0, 1, 2]] * 2


def test_a_worker_alone_may_have_a_callback_of_batches(cluster):
    """On either worker; what it decides on another than the chief does not count."""

    def program(strategy, owner):
        index, seen = strategy.workers.group.index, []

        def end(batch, logs):
            seen.append(batch)
            if batch == 2:
                strategy_model.stop_training = True

        class Stop(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                end(batch, logs)

        strategy_model = make_model(strategy)
        kinds = [Stop(), keras.callbacks.LambdaCallback(on_train_batch_end=end)]
        callbacks = [kinds[owner]] if index == owner else []
        history = strategy_model.fit(
            *rows(), batch_size=2, epochs=2, verbose=0, callbacks=callbacks
        )
        return seen, len(history.epoch), weights(strategy_model)

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


def test_initial_weights_are_the_chiefs(cluster):
    def program(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        # Something that only one worker does, a file that only it has.
        model.set_weights([w + strategy.workers.group.index for w in weights_of(model)])
        before = weights_of(model)
        model.fit(*rows(), epochs=1, verbose=0)
        return before, weights(model)

    def weights_of(model):
        return [np.asarray(value) for value in model.get_weights()]

    (chief, after), (other, also_after) = cluster(program)
    assert not np.allclose(chief[0], other[0])
    assert_same(after, also_after, 0.0, "worker 1")


def test_an_error_of_every_worker_leaves_the_cluster_usable(cluster):
    def program(strategy):
        model = make_model(strategy)
        x, y = rows()
        try:
            model.fit(x, y[:5], verbose=0)
        except ValueError as error:
            first = str(error)
        return first, model.fit(x, y, epochs=1, verbose=0).history["loss"]

    (first, loss), (second, other_loss) = cluster(program)
    assert first and second
    assert loss == other_loss


def test_tensorboard_is_the_chiefs(cluster, tmp_path):
    def program(strategy, folder):
        own = f"{folder}/{strategy.workers.group.index}"
        board = keras.callbacks.TensorBoard(own)
        make_model(strategy).fit(*rows(), epochs=1, verbose=0, callbacks=[board])

    cluster(program, str(tmp_path))
    assert any("events" in name for name in every_file(tmp_path / "0"))
    assert every_file(tmp_path / "1") == {}
