"""Each worker reads its own rows of arrays and of a `RowDataset`, on every backend."""

from __future__ import annotations

import contextlib
import random
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from harness.training import assert_workers, numbers, uncompared_rows
from multi_worker.clusters import ALL, assert_as_one_device, one_device, own_cluster
from multi_worker.loaders import BATCH, ROWS, WEIGHTS, WIDTH, X, Y

import keras_strategies as ks
from keras_strategies.input.arrays import ArrayDataset
from keras_strategies.training.resume.snapshot_writer import SnapshotWriter

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
EPOCHS = 2
CLASSES = (X[:, 0] > 0).astype("int32")


class Counted(np.ndarray):
    """An array that counts the rows that are taken from it."""

    taken = 0

    def __getitem__(self, index: Any) -> Any:
        found = np.asarray(self)[index]
        # Not rows of what was taken.
        Counted.taken += len(found) if len(self) == ROWS else 0
        return found


class Rows(ks.RowDataset):
    """Rows of arrays, in an order that changes after each epoch; counts its reads."""

    def __init__(
        self, parts: Any, batch: int, is_shuffled: bool = True, **arguments: Any
    ):
        super().__init__(**arguments)
        self.parts, self.batch, self.is_shuffled = parts, batch, is_shuffled
        self.order = np.arange(ROWS)
        self.read = self.begun = self.ended = 0

    def __len__(self) -> int:
        return -(-ROWS // self.batch)

    def on_epoch_begin(self) -> None:
        self.begun += 1

    def on_epoch_end(self) -> None:
        self.ended += 1
        if self.is_shuffled:
            self.order = np.random.default_rng(self.ended).permutation(ROWS)

    def num_rows(self, index: int) -> int:
        return min(self.batch, ROWS - index * self.batch)

    def get_rows(self, index: int, start: int, stop: int) -> Any:
        assert 0 <= start < stop <= self.num_rows(index)
        self.read += stop - start
        first = index * self.batch
        own = self.order[first + start : first + stop]
        return keras.tree.map_structure(lambda part: part[own], self.parts)


def parts_of(by_class: bool) -> Any:
    x = {"one": X, "two": 2 * X}
    return (x, CLASSES) if by_class else (x, Y, WEIGHTS)


def make_model(strategy: Any, by_class: bool = False, several: int = 1) -> Any:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        inputs = {"one": keras.Input((WIDTH,)), "two": keras.Input((WIDTH,))}
        hidden = keras.layers.Concatenate()(list(inputs.values()))
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Dropout(0.3)(hidden)
        model = keras.Model(inputs, keras.layers.Dense(2 if by_class else 1)(hidden))
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(True) if by_class else "mse",
            metrics=["accuracy" if by_class else "mae"],
            weighted_metrics=[],
            steps_per_execution=several,
        )
    return model


def class_weights(by_class: bool) -> dict[str, Any]:
    return {"class_weight": {0: 0.5, 1: 2.0}} if by_class else {}


def trained(
    strategy: Any, batch: int, by_class: bool, workers: int, distributed: bool
) -> Any:
    """Numbers of `fit`, `evaluate` and `predict`, and rows that were read in each."""

    def given(dataset: Rows) -> Any:
        if not distributed:
            return dataset
        return strategy.experimental_distribute_dataset(dataset)

    model = make_model(strategy, by_class, workers)
    random.seed(6)
    parts = parts_of(by_class)
    fitted, validated = Rows(parts, batch, workers=workers), Rows(parts, 8)
    history = model.fit(
        given(fitted),
        epochs=EPOCHS,
        validation_data=given(validated),
        verbose=0,
        **class_weights(by_class),
    )
    evaluated, predicted = Rows(parts, 7), Rows(parts[:1], 9, workers=workers)
    values = model.evaluate(given(evaluated), verbose=0)
    outputs = model.predict(given(predicted), verbose=0)
    found = numbers(model, history, values, outputs, fitted.begun, fitted.ended)
    every = [fitted, validated, evaluated, predicted]
    return found, np.array([dataset.read for dataset in every])


@pytest.mark.nightly(unless=["7-True-1-True-two"])
@ALL
@pytest.mark.parametrize(
    ("batch", "by_class", "workers", "distributed"),
    [(5, False, 1, False), (11, True, 2, False), (7, True, 1, True)],
)
def test_rows_of_datasets_are_read_by_their_worker(
    cluster: Any, batch: int, by_class: bool, workers: int, distributed: bool
) -> None:
    arguments = (batch, by_class, workers, distributed)
    alone, once = trained(one_device(), *arguments)
    every = cluster(trained, *arguments)
    assert_workers(alone, [found for found, _ in every])
    # Batches of which a worker has no row, and of those one for each worker.
    read = np.sum([own for _, own in every], 0)
    assert (read <= 1.25 * once).all(), (read, once)
    # On JAX, the last of four devices has none of 5 rows.
    assert max(own[0] for _, own in every) < 0.85 * once[0], (read, once)


def on_arrays(strategy: Any, by_class: bool) -> Any:
    """Numbers of `fit`, `evaluate` and `predict`, and rows that were read in each."""
    model = make_model(strategy, by_class, 1 + by_class)
    # Keras casts them to float32.
    x = {"one": X.astype("float64").view(Counted), "two": 2 * X}
    y = CLASSES if by_class else Y
    weights = class_weights(by_class) or {"sample_weight": WEIGHTS}
    read, results = [], []
    for way in (
        lambda: model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=EPOCHS,
            validation_data=({"one": X[:9], "two": 2 * X[:9]}, y[:9]),
            verbose=0,
            **weights,
        ),
        lambda: model.evaluate(x, y, batch_size=7, verbose=0),
        lambda: model.predict(x, batch_size=8, verbose=0),
    ):
        Counted.taken = 0
        with uncompared_rows():
            results.append(way())
        read.append(Counted.taken)
    return numbers(model, *results), read


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["three-False"])
@pytest.mark.parametrize("by_class", [False, True])
@ALL
def test_rows_of_arrays_are_read_by_their_worker(cluster: Any, by_class: bool) -> None:
    expected, _ = on_arrays(one_device(), by_class)
    every = cluster(on_arrays, by_class)
    assert_workers(expected, [found for found, _ in every])
    if BACKEND == "tensorflow":
        return  # Its datasets have the arrays as tensors.
    read = np.sum([own for _, own in every], 0)
    # On JAX, `fit` reads a batch more to make the variables. On Torch, a batch of which
    # a worker has no row is read in full.
    rows = np.array([EPOCHS * ROWS, ROWS, ROWS])
    more = [BATCH, 0, 0] if BACKEND == "jax" else 0.25 * rows
    assert (read >= rows).all() and (read <= rows + more).all(), read


def predicted(strategy: Any, is_built: bool) -> Any:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        if is_built:
            model.build((None, WIDTH))
    count = strategy.workers.group.count

    def own(context: Any) -> Any:
        # Batches of 4 rows of the first worker beside 4 and 3 of the last one.
        is_last = context.input_pipeline_id == count - 1
        return [X[:4], X[:3] if is_last else X[4:8]]

    found = model.predict(ks.DatasetCreator(own), steps=2, verbose=0)
    kernel, bias = model.get_weights()
    every = [X[:4]] * count + [X[4:8]] * (count - 1) + [X[:3]]
    return found, np.concatenate(every) @ kernel + bias


@pytest.mark.parametrize("is_built", [True, False])
def test_predictions_of_separate_batches_of_several_sizes(cluster, is_built) -> None:
    for found, expected in cluster(predicted, is_built):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def trained_in_parts(strategy: Any, arguments: dict[str, Any]) -> Any:
    """Numbers after passes that end early, of one dataset."""
    model, parts = make_model(strategy), parts_of(False)
    dataset = Rows(parts, 4, is_shuffled=False, **arguments)

    def stop(batch: int, logs: Any) -> None:
        model.stop_training |= batch == 1

    stops = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    ways = ({"callbacks": [stops]}, {"epochs": 2, "steps_per_epoch": 3}, {"epochs": 2})
    histories = [model.fit(dataset, verbose=0, **way).history["loss"] for way in ways]
    values = model.evaluate(dataset, steps=2, verbose=0)
    predicted = Rows(parts[:1], 9, is_shuffled=False, **arguments)
    outputs = model.predict(predicted, steps=2, verbose=0)
    return numbers(model, None, *histories, values, outputs)


@pytest.mark.nightly(unless=["two-serial"])
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"workers": 2}, {"workers": 2, "use_multiprocessing": True}],
    ids=["serial", "threads", "processes"],
)
def test_passes_that_end_early(cluster: Any, arguments: dict[str, Any]) -> None:
    assert_as_one_device(cluster, trained_in_parts, arguments, tolerance=5e-5)


def distributed(strategy: Any, kind: str) -> Any:
    """The rows of this worker in each step of two passes, and how many were read."""
    import torch
    from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

    Counted.taken = 0
    x = np.arange(ROWS)
    given: Any = Rows((x, X), BATCH)
    if "arrays" in kind:
        given = ArrayDataset((x.view(Counted), X)).batch(BATCH)
        given = given.shuffle(seed=3) if kind == "shuffled arrays" else given
    if kind == "tensors":
        rows = TensorDataset(torch.tensor(x), torch.tensor(X))
        halves = ConcatDataset([Subset(rows, range(9)), Subset(rows, range(9, ROWS))])
        generator = torch.Generator().manual_seed(3)
        given = DataLoader(halves, BATCH, shuffle=True, generator=generator)
    dataset = strategy.experimental_distribute_dataset(given)
    steps = []
    for _ in range(2):
        for batch in dataset:
            local = strategy.experimental_local_results(batch)
            parts = zip(*[map(np.asarray, each) for each in local], strict=True)
            steps.append([np.concatenate(each) for each in parts])
    return steps, Counted.taken or getattr(given, "read", 0)


@pytest.mark.parametrize("kind", ["rows", "arrays", "shuffled arrays", "tensors"])
def test_distributed_datasets_read_own_rows(cluster: Any, kind: str) -> None:
    alone, once = distributed(one_device(), kind)
    every = cluster(distributed, kind)
    assert len(alone) == 10
    for step, whole in enumerate(alone):
        for i, expected in enumerate(whole):
            parts = [found[step][i] for found, _ in every]
            np.testing.assert_array_equal(np.concatenate(parts), expected)
    assert sum(read for _, read in every) <= once + 10
    assert all(read < 0.65 * once for _, read in every) or kind == "tensors"


class Interrupts(keras.callbacks.Callback):
    """Ends `fit` with an error after some steps, and counts them."""

    def __init__(self, after: int | None):
        super().__init__()
        self.after, self.steps = after, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == self.after:
            raise KeyError("interrupted")


def resumed(strategy: Any, folder: str, after: int | None, kind: str) -> Any:
    """Numbers of `fit` with `Resume`, its steps, and the rows that it has read."""
    model = make_model(strategy)
    resume, interrupts = ks.callbacks.Resume(folder, every_steps=1), Interrupts(after)
    given: dict[str, Any] = {"x": Rows(parts_of(False), BATCH)}
    if kind == "arrays":
        x = {"one": X.astype("float64").view(Counted), "two": 2 * X}
        given = {"x": x, "y": Y, "sample_weight": WEIGHTS, "batch_size": BATCH}
    Counted.taken = 0
    # Each snapshot waits for the one before, so that steps are lost by rule.
    is_busy = mock.patch.object(SnapshotWriter, "is_busy", False)
    with is_busy, uncompared_rows(), contextlib.suppress(KeyError):
        model.fit(**given, epochs=3, verbose=0, callbacks=[resume, interrupts])
    resume.wait()
    read = Counted.taken if kind == "arrays" else given["x"].read
    return numbers(model), interrupts.steps, read


@pytest.mark.nightly(unless=["arrays"])
@pytest.mark.slow(seconds=10)
@pytest.mark.parametrize("kind", ["arrays", "rows"])
def test_shuffled_rows_with_resume_are_read_by_their_worker(forker, tmp_path, kind):
    whole = str(tmp_path / "whole")
    expected, steps, once = resumed(one_device(), whole, None, kind)
    read = []
    # After an error the workers do not train together again.
    for after in (8, None):
        with own_cluster(forker) as cluster:
            found = cluster(resumed, str(tmp_path / "interrupted"), after, kind)
        read.append([own for *_, own in found])
    assert_workers(expected, [own for own, *_ in found], 5e-5)
    # A snapshot is written when the step after it has been taken.
    assert {taken for _, taken, _ in found} <= {steps - 7, steps - 6}
    if BACKEND == "tensorflow" and kind == "arrays":
        return  # Its datasets have the arrays as tensors.
    # Batches for the variables and the specification, and those of lost steps.
    assert np.sum(read) <= once + 8 * BATCH, (read, once)
    assert np.max(np.sum(read, 0)) <= 0.6 * (once + 7 * BATCH), (read, once)


class FewerRows(Rows):
    """A dataset whose last batch has fewer rows than it says."""

    def num_rows(self, index: int) -> int:
        return self.batch


class OtherRows(Rows):
    """A dataset with other rows in the second batch of each worker."""

    worker = 0

    def num_rows(self, index: int) -> int:
        return super().num_rows(index) + (self.worker if index == 1 else 0)


def trained_wrongly(strategy: Any, kind: str) -> None:
    model = make_model(strategy)
    if kind == "another order":
        rows = ArrayDataset(parts_of(False)).batch(BATCH)
        rows = rows.shuffle(seed=np.int64(3)).repeat(np.int64(1))
        if strategy.workers.group.is_chief:
            next(iter(rows))
        dataset = strategy.experimental_distribute_dataset(rows)
    elif kind == "fewer rows":
        dataset = FewerRows(parts_of(False), BATCH, is_shuffled=False)
    else:
        dataset = OtherRows(parts_of(False), BATCH, is_shuffled=False)
        dataset.worker = strategy.workers.group.index
    model.fit(dataset, verbose=0)


@pytest.mark.slow(seconds=7)
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("another order", "iterate over them equally often"),
        (
            "fewer rows",
            "`FewerRows.get_rows(4, 3, 5)` must return 2 rows, and has returned an",
        ),
        ("other rows", "numbers of rows are [5, 6]"),
    ],
)
def test_wrong_datasets_are_errors(forker: Any, kind: str, text: str) -> None:
    with own_cluster(forker) as cluster:
        outcomes = cluster.outcomes(trained_wrongly, kind)
    assert any(text in error for error, _ in outcomes), outcomes
