"""Each worker reads its own rows of arrays, on every backend."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from harness.training import assert_same, uncompared_rows
from harness.worker_pool import WorkerPool

import keras_strategies as ks
from keras_strategies.training.resume.snapshot_writer import SnapshotWriter

ALL = pytest.mark.parametrize(
    "cluster", ["two", "three", "two_by_two"], indirect=True, scope="session"
)
ROWS, WIDTH, BATCH, EPOCHS = 23, 3, 5, 2
_random = np.random.default_rng(4)
# Keras casts them to float32.
X = _random.normal(size=(ROWS, WIDTH))
Y = X.sum(1, keepdims=True)
CLASSES = (X[:, 0] > 0).astype("int32")
WEIGHTS = np.linspace(0.5, 2.0, ROWS).astype("float32")


class Counted(np.ndarray):
    """An array that counts the rows which are read from it."""

    count = 0

    def __getitem__(self, index: Any) -> Any:
        found = np.asarray(self)[index]
        Counted.count += len(found)
        return found


def counted_rows(strategy: Any) -> Any:
    """A context in which this worker's reads are counted, in its list."""

    @contextlib.contextmanager
    def counting() -> Any:
        found: list[int] = []
        if keras.backend.backend() != "tensorflow":
            Counted.count = 0
            with uncompared_rows():
                yield found
            found.append(Counted.count)
            return
        # TensorFlow's datasets have the arrays as tensors: what enters the steps.
        from keras_strategies.engines.tensorflow.data_parallel import step_function

        step_on = step_function.StepFunction._step_on

        def counted(self: Any, batch: Any, spec: Any) -> Any:
            parts = step_function.own_part(batch)
            found.append(len(keras.tree.flatten(parts)[0]))
            return step_on(self, batch, spec)

        with mock.patch.object(step_function.StepFunction, "_step_on", counted):
            yield found

    return counting()


def trained(strategy: Any, several: int, by_class: bool) -> Any:
    """Numbers of `fit`, `evaluate` and `predict`, and the rows of `x` read in each."""
    keras.utils.set_random_seed(5)
    y = CLASSES if by_class else Y
    loss = keras.losses.SparseCategoricalCrossentropy(True) if by_class else "mse"
    weights = (
        {"class_weight": {0: 0.5, 1: 2.0}} if by_class else {"sample_weight": WEIGHTS}
    )
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((WIDTH,)), keras.layers.Dense(2 if by_class else 1)]
        )
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            loss,
            metrics=["accuracy" if by_class else "mae"],
            steps_per_execution=several,
        )
    x = X.view(Counted)
    fitting, evaluating, predicting = (counted_rows(strategy) for _ in range(3))
    with fitting as fit:
        history = model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=EPOCHS,
            validation_data=(X[:9].view(Counted), y[:9]),
            verbose=0,
            **weights,
        )
    with evaluating as evaluate:
        values = model.evaluate(x, y, batch_size=7, verbose=0)
    with predicting as predict:
        outputs = model.predict(x, batch_size=8, verbose=0)
    numbers = {
        "history": {k: np.asarray(v) for k, v in history.history.items()},
        "weights": {i: np.asarray(w) for i, w in enumerate(model.get_weights())},
        "others": {"evaluate": np.asarray(values), "predict": np.asarray(outputs)},
    }
    return numbers, [sum(fit), sum(evaluate), sum(predict)]


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["1-False-three"])
@ALL
@pytest.mark.parametrize(("several", "by_class"), [(1, False), (2, True)])
def test_rows_of_arrays_are_read_by_their_worker(
    cluster: Any, several: int, by_class: bool
) -> None:
    expected, _ = trained(ks.OneDeviceStrategy("cpu:0"), several, by_class)
    every = cluster(trained, several, by_class)
    for index, (found, _) in enumerate(every):
        assert_same(expected, found, 1e-5, f"worker {index}")
    read = np.sum([own for _, own in every], 0)
    # On JAX, `fit` reads a batch more to make the variables. On the others, a batch of
    # which a worker has no row is read in full.
    rows = np.array([EPOCHS * (ROWS + 9), ROWS, ROWS])
    more = [BATCH, 0, 0] if keras.backend.backend() == "jax" else 0.25 * rows
    assert (read >= rows).all() and (read <= rows + more).all(), read


def predicted(strategy: Any, is_built: bool) -> Any:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        if is_built:
            model.build((None, WIDTH))
    count = strategy.workers.group.count
    x = X.astype("float32")

    def own(context: Any) -> Any:
        # Batches of 4 rows of the first worker beside 4 and 3 of the last one.
        return (
            [x[:4], x[4:8]] if context.input_pipeline_id < count - 1 else [x[:4], x[:3]]
        )

    found = model.predict(ks.DatasetCreator(own), steps=2, verbose=0)
    kernel, bias = model.get_weights()
    every = [x[:4]] * count + [x[4:8]] * (count - 1) + [x[:3]]
    return found, np.concatenate(every) @ kernel + bias


@pytest.mark.one_backend
@pytest.mark.parametrize("is_built", [True, False])
def test_predictions_of_separate_batches_of_several_sizes(
    cluster: Any, is_built: bool
) -> None:
    for found, expected in cluster(predicted, is_built):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def with_custom_step(strategy: Any) -> Any:
    """Numbers of a step that computes with all rows, and the rows of each epoch."""

    class Centered(keras.Sequential):
        def compute_loss(self, x: Any, *others: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(x, *others, **kwargs)
            return loss + keras.ops.mean(keras.ops.square(x - keras.ops.mean(x, 0)))

    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = Centered([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    epochs, losses = [], []
    x = X.view(Counted)
    with counted_rows(strategy) as fit:
        history = model.fit(x, Y, batch_size=BATCH, epochs=2, verbose=0)
        losses += history.history["loss"]
    epochs.append(sum(fit))
    for _ in range(2):
        with counted_rows(strategy) as evaluate:
            losses.append(model.evaluate(x, Y, batch_size=7, verbose=0))
        epochs.append(sum(evaluate))
    weights = {i: np.asarray(w) for i, w in enumerate(model.get_weights())}
    return {"losses": {"all": np.asarray(losses)}, "weights": weights}, epochs


@pytest.mark.one_backend
def test_a_step_that_computes_with_all_rows(cluster: Any) -> None:
    expected, _ = with_custom_step(ks.OneDeviceStrategy("cpu:0"))
    every = cluster(with_custom_step)
    for index, (found, _) in enumerate(every):
        assert_same(expected, found, 1e-5, f"worker {index}")
    read = np.sum([own for _, own in every], 0).tolist()
    if keras.backend.backend() == "jax":
        assert read == [2 * ROWS + BATCH, ROWS, ROWS]
    else:
        # In full from the second epoch on, as each worker has all rows.
        assert read[0] >= 3 * ROWS


class Interrupts(keras.callbacks.Callback):
    """Ends `fit` with an error after some steps, and counts them."""

    def __init__(self, after: int | None):
        super().__init__()
        self.after = after
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == self.after:
            raise KeyError("interrupted")


def resumed(
    strategy: Any, folder: str, after: int | None, by_class: bool, several: int
) -> Any:
    """Numbers of `fit` with `Resume`, its steps, and the rows of `x` read in it."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(2 if by_class else 1),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(True) if by_class else "mse",
            steps_per_execution=several,
        )
    weights = (
        {"class_weight": {0: 0.5, 1: 2.0}} if by_class else {"sample_weight": WEIGHTS}
    )
    resume = ks.callbacks.Resume(folder, every_steps=several)
    interrupts = Interrupts(after)
    Counted.count = 0
    # Each snapshot waits for the one before, so that steps are lost by rule.
    is_busy = mock.patch.object(SnapshotWriter, "is_busy", False)
    with is_busy, uncompared_rows(), contextlib.suppress(KeyError):
        model.fit(
            X.view(Counted),
            CLASSES if by_class else Y,
            batch_size=BATCH,
            epochs=3,
            verbose=0,
            callbacks=[resume, interrupts],
            **weights,
        )
    resume.wait()
    found = {"weights": {i: np.asarray(w) for i, w in enumerate(model.get_weights())}}
    return found, interrupts.steps, Counted.count


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["False-1"])
@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize(("by_class", "several"), [(False, 1), (True, 2)])
def test_shuffled_rows_with_resume_are_read_by_their_worker(
    forker: Any, tmp_path: Path, by_class: bool, several: int
) -> None:
    alone = ks.OneDeviceStrategy("cpu:0")
    expected, whole, once = resumed(
        alone, str(tmp_path / "whole"), None, by_class, several
    )
    assert once >= 3 * ROWS
    folder = str(tmp_path / "interrupted")
    read = []
    # After an error the workers do not train together again.
    for after in (8 // several, None):
        pool = WorkerPool(forker, 2)
        try:
            found = pool.cluster(1)(resumed, folder, after, by_class, several)
        finally:
            pool.close()
        read.append([each[2] for each in found])
    for index, (numbers, steps, _) in enumerate(found):
        assert_same(expected, numbers, 5e-5, f"worker {index}")
        assert steps < whole
    # Batches for the variables and the specification, and those of lost steps.
    assert np.sum(read) <= once + 8 * BATCH, (read, once)
    assert np.max(np.sum(read, 0)) <= 0.6 * (once + 7 * BATCH), (read, once)
