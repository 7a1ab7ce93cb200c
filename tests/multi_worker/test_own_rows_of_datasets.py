"""Each worker reads its own rows of a `RowDataset`, on every backend."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from harness.training import assert_same, uncompared_rows
from harness.worker_pool import WorkerPool

import keras_strategies as ks
from keras_strategies.input.arrays import ArrayDataset
from keras_strategies.training.resume.snapshot_writer import SnapshotWriter

pytestmark = pytest.mark.one_backend

ALL = pytest.mark.parametrize(
    "cluster", ["two", "three", "two_by_two"], indirect=True, scope="session"
)
ROWS, WIDTH, EPOCHS = 23, 3, 2
_random = np.random.default_rng(4)
X = _random.normal(size=(ROWS, WIDTH)).astype("float32")
Y = X.sum(1, keepdims=True)
CLASSES = (X[:, 0] > 0).astype("int32")
WEIGHTS = np.linspace(0.5, 2.0, ROWS).astype("float32")


class Rows(ks.RowDataset):
    """Rows of arrays in an order that changes after each epoch, and counts of reads.

    Args:
        parts: the arrays of `x`, `y` and `sample_weight`.
        batch: int, rows of a batch.
    """

    def __init__(self, parts: Any, batch: int, **arguments: Any):
        super().__init__(**arguments)
        self.parts = parts
        self.batch = batch
        self.order = np.arange(ROWS)
        self.read = 0
        self.begun = self.ended = 0

    def __len__(self) -> int:
        return -(-ROWS // self.batch)

    def on_epoch_begin(self) -> None:
        self.begun += 1

    def on_epoch_end(self) -> None:
        self.ended += 1
        self.order = np.random.default_rng(self.ended).permutation(ROWS)

    def num_rows(self, index: int) -> int:
        return min(self.batch, ROWS - index * self.batch)

    def get_rows(self, index: int, start: int, stop: int) -> Any:
        assert 0 <= start < stop <= self.num_rows(index)
        self.read += stop - start
        first = index * self.batch
        own = self.order[first + start : first + stop]
        return keras.tree.map_structure(lambda part: part[own], self.parts)


def make_model(strategy: Any, by_class: bool, several: int, **arguments: Any) -> Any:
    keras.utils.set_random_seed(5)
    with strategy.scope():
        inputs = {"one": keras.Input((WIDTH,)), "two": keras.Input((WIDTH,))}
        hidden = keras.layers.Concatenate()(list(inputs.values()))
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Dropout(0.3)(hidden)
        outputs = keras.layers.Dense(2 if by_class else 1)(hidden)
        model = keras.Model(inputs, outputs)
        model.compile(
            keras.optimizers.SGD(0.01, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(True) if by_class else "mse",
            metrics=["accuracy" if by_class else "mae"],
            weighted_metrics=[],
            steps_per_execution=several,
            **arguments,
        )
    return model


def trained(
    strategy: Any,
    batch: int,
    by_class: bool,
    several: int,
    workers: int,
    distributed: bool,
) -> Any:
    """Numbers of `fit`, `evaluate` and `predict`, and rows that were read in each."""

    def given(dataset: Rows) -> Any:
        return (
            strategy.experimental_distribute_dataset(dataset)
            if distributed
            else (dataset)
        )

    model = make_model(strategy, by_class, several)
    random.seed(6)
    x = {"one": X, "two": 2 * X}
    parts = (x, CLASSES) if by_class else (x, Y, WEIGHTS)
    fitted, validated = Rows(parts, batch, workers=workers), Rows(parts, 8)
    weights = {"class_weight": {0: 0.5, 1: 2.0}} if by_class else {}
    history = model.fit(
        given(fitted),
        epochs=EPOCHS,
        validation_data=given(validated),
        verbose=0,
        **weights,
    )
    evaluated, predicted = Rows(parts, 7), Rows((x,), 9, workers=workers)
    values = model.evaluate(given(evaluated), verbose=0)
    outputs = model.predict(given(predicted), verbose=0)
    numbers = {
        "history": {k: np.asarray(v) for k, v in history.history.items()},
        "weights": {i: np.asarray(w) for i, w in enumerate(model.get_weights())},
        "others": {"evaluate": np.asarray(values), "predict": np.asarray(outputs)},
        "epochs": {
            "begun": np.asarray(fitted.begun),
            "ended": np.asarray(fitted.ended),
        },
    }
    every = [fitted, validated, evaluated, predicted]
    return numbers, [dataset.read for dataset in every]


@pytest.mark.nightly(unless=["7-True-1-1-True-two"])
@ALL
@pytest.mark.parametrize(
    ("batch", "by_class", "several", "workers", "distributed"),
    [(5, False, 1, 1, False), (11, True, 2, 2, False), (7, True, 1, 1, True)],
)
def test_rows_of_datasets_are_read_by_their_worker(
    cluster: Any,
    batch: int,
    by_class: bool,
    several: int,
    workers: int,
    distributed: bool,
) -> None:
    arguments = (batch, by_class, several, workers, distributed)
    alone, once = trained(ks.OneDeviceStrategy("cpu:0"), *arguments)
    every = cluster(trained, *arguments)
    for index, (found, _) in enumerate(every):
        assert_same(alone, found, 1e-5, f"worker {index}")
    read = np.sum([own for _, own in every], 0)
    # Batches of which a worker has no row, and of those one for each worker.
    few = 0.25 * np.asarray(once)
    assert (read <= once + few).all(), (read, once)
    # On JAX, the last of four devices has none of 5 rows.
    assert max(own[0] for _, own in every) < 0.85 * once[0], (read, once)


class OrderedRows(Rows):
    """Rows in one order: a pass that ends early may have been read further."""

    def on_epoch_end(self) -> None:
        self.ended += 1


class Stops(keras.callbacks.Callback):
    """Ends `fit` in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 1:
            self.model.stop_training = True


def trained_in_parts(strategy: Any, arguments: dict[str, Any]) -> Any:
    """Numbers after passes that end early, of one dataset."""
    model = make_model(strategy, False, 1)
    parts = ({"one": X, "two": 2 * X}, Y, WEIGHTS)
    dataset = OrderedRows(parts, 4, **arguments)
    stopped = model.fit(dataset, callbacks=[Stops()], verbose=0)
    few = model.fit(dataset, epochs=2, steps_per_epoch=3, verbose=0)
    last = model.fit(dataset, epochs=2, verbose=0)
    values = model.evaluate(dataset, steps=2, verbose=0)
    predicted = OrderedRows(parts[:1], 9, **arguments)
    outputs = model.predict(predicted, steps=2, verbose=0)
    numbers: dict[str, dict[Any, Any]] = {
        f"history {i}": {k: np.asarray(v) for k, v in each.history.items()}
        for i, each in enumerate((stopped, few, last))
    }
    numbers["weights"] = {i: np.asarray(w) for i, w in enumerate(model.get_weights())}
    numbers["others"] = {"evaluate": np.asarray(values), "predict": np.asarray(outputs)}
    return numbers


@pytest.mark.nightly(unless=["two-serial"])
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize(
    "arguments",
    [{}, {"workers": 2}, {"workers": 2, "use_multiprocessing": True}],
    ids=["serial", "threads", "processes"],
)
def test_passes_that_end_early(cluster: Any, arguments: dict[str, Any]) -> None:
    alone = trained_in_parts(ks.OneDeviceStrategy("cpu:0"), arguments)
    for index, found in enumerate(cluster(trained_in_parts, arguments)):
        assert_same(alone, found, 5e-5, f"worker {index}")


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


def interrupted(strategy: Any, folder: str, after: int | None, workers: int) -> Any:
    """Numbers of `fit` with `Resume`, and how many steps and rows it took."""
    model = make_model(strategy, False, 1)
    dataset = Rows(({"one": X, "two": 2 * X}, Y, WEIGHTS), 5, workers=workers)
    interrupts = Interrupts(after)
    resume = ks.callbacks.Resume(folder, every_steps=1)
    # Each snapshot waits for the one before, so that steps are lost by rule.
    is_busy = mock.patch.object(SnapshotWriter, "is_busy", False)
    with is_busy, uncompared_rows(), contextlib.suppress(KeyError):
        model.fit(dataset, epochs=3, verbose=0, callbacks=[resume, interrupts])
    resume.wait()
    weights = {i: np.asarray(w) for i, w in enumerate(model.get_weights())}
    return {"weights": weights}, interrupts.steps, dataset.read


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["1"])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_fit_resumes(forker: Any, tmp_path: Path, workers: int) -> None:
    expected, whole, once = interrupted(
        ks.OneDeviceStrategy("cpu:0"), str(tmp_path / "whole"), None, workers
    )
    folder = str(tmp_path / "interrupted")
    # After an error the workers do not train together again.
    for after in (8, None):
        pool = WorkerPool(forker, 2)
        try:
            found = pool.cluster(1)(interrupted, folder, after, workers)
        finally:
            pool.close()
    for index, (numbers, steps, read) in enumerate(found):
        assert_same(expected, numbers, 1e-5, f"worker {index}")
        # A snapshot is written when the step after it has been taken.
        assert steps in (whole - 7, whole - 6)
        assert read < 0.75 * once


class Counted(np.ndarray):
    """An array that counts the rows that are taken from it."""

    taken = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        # Not rows of what was taken.
        Counted.taken += len(found) if len(self) == ROWS else 0
        return found.view(np.ndarray)


def distributed(strategy: Any, kind: str) -> Any:
    """The rows of this worker in each step of two passes, and how many were read."""
    parts = {"x": np.arange(ROWS), "y": X}
    Counted.taken = 0
    given = Rows(parts, 5)
    if kind == "rows":
        dataset = strategy.experimental_distribute_dataset(given)
    else:
        arrays = ArrayDataset({"x": parts["x"].view(Counted), "y": X}).batch(5)
        shuffled = arrays.shuffle(seed=3) if kind == "shuffled arrays" else arrays
        dataset = strategy.experimental_distribute_dataset(shuffled)
    steps = []
    for _ in range(2):
        for batch in dataset:
            local = strategy.experimental_local_results(batch)
            steps.append(
                {
                    name: np.concatenate([np.asarray(each[name]) for each in local])
                    for name in parts
                }
            )
    return steps, Counted.taken or given.read


@pytest.mark.parametrize("kind", ["rows", "arrays", "shuffled arrays"])
def test_distributed_datasets_read_own_rows(cluster: Any, kind: str) -> None:
    alone, once = distributed(ks.OneDeviceStrategy("cpu:0"), kind)
    every = cluster(distributed, kind)
    assert len(alone) == 10
    for step, whole in enumerate(alone):
        for name, expected in whole.items():
            parts = [found[step][name] for found, _ in every]
            np.testing.assert_array_equal(np.concatenate(parts), expected)
    assert sum(read for _, read in every) <= once + 10
    assert all(read < 0.65 * once for _, read in every)


def of_loader(strategy: Any, processes: int) -> Any:
    """The rows of this worker in each step of a loader, and how many were read."""
    import torch
    from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

    x, y = torch.arange(ROWS), torch.tensor(X)
    halves = [TensorDataset(x[:9], y[:9]), TensorDataset(x[9:], y[9:])]
    loader = DataLoader(
        Subset(ConcatDataset(halves), range(ROWS - 1, -1, -1)),
        batch_size=11,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
        num_workers=processes,
        multiprocessing_context="fork" if processes else None,
    )
    dataset = strategy.experimental_distribute_dataset(loader)
    steps, read = [], []
    original = TensorDataset.__getitem__

    def counted(dataset: Any, index: Any) -> Any:
        read.append(index)
        return original(dataset, index)

    with mock.patch.object(TensorDataset, "__getitem__", counted):
        for _ in range(2):
            for batch in dataset:
                local = strategy.experimental_local_results(batch)
                steps.append(
                    [
                        np.concatenate([np.asarray(each[i]) for each in local])
                        for i in (0, 1)
                    ]
                )
    return steps, len(read)


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["0-two", "0-three", "0-two_by_two", "2-two"])
@ALL
@pytest.mark.parametrize("processes", [0, 2])
def test_a_distributed_loader_of_tensors_reads_own_rows(
    cluster: Any, processes: int
) -> None:
    alone, once = of_loader(ks.OneDeviceStrategy("cpu:0"), processes)
    every = cluster(of_loader, processes)
    assert len(alone) == 6
    for step, whole in enumerate(alone):
        for i, expected in enumerate(whole):
            parts = [found[step][i] for found, _ in every]
            np.testing.assert_array_equal(np.concatenate(parts), expected)
    # In the last batch, of one row, a worker without rows reads one.
    assert all(read <= 0.65 * once for _, read in every)


def trained_on_arrays(strategy: Any, shuffled: bool, by_class: bool) -> Any:
    """Numbers of training on distributed arrays, and how many rows it took."""
    model = make_model(strategy, by_class, 1)
    x = {"one": X.view(Counted), "two": 2 * X}
    parts = (x, CLASSES) if by_class else (x, Y, WEIGHTS)

    def given(parts: Any, batch: int) -> Any:
        rows = ArrayDataset(parts).batch(batch)
        rows = rows.shuffle() if shuffled else rows
        return strategy.experimental_distribute_dataset(rows)

    Counted.taken = 0
    weights = {"class_weight": {0: 0.5, 1: 2.0}} if by_class else {}
    with uncompared_rows():
        history = model.fit(
            given(parts, 5),
            epochs=EPOCHS,
            validation_data=given(parts, 8),
            verbose=0,
            **weights,
        )
        values = model.evaluate(given(parts, 7), verbose=0)
        outputs = model.predict(given((x,), 9), verbose=0)
    numbers = {
        "history": {k: np.asarray(v) for k, v in history.history.items()},
        "weights": {i: np.asarray(w) for i, w in enumerate(model.get_weights())},
        "others": {"evaluate": np.asarray(values), "predict": np.asarray(outputs)},
    }
    return numbers, Counted.taken


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["order-two_by_two"])
@ALL
@pytest.mark.parametrize(
    ("shuffled", "by_class"), [(False, True), (True, False)], ids=["order", "shuffled"]
)
def test_distributed_arrays_are_read_by_own_rows_in_fit(
    cluster: Any, shuffled: bool, by_class: bool
) -> None:
    alone, once = trained_on_arrays(ks.OneDeviceStrategy("cpu:0"), shuffled, by_class)
    every = cluster(trained_on_arrays, shuffled, by_class)
    for index, (found, _) in enumerate(every):
        assert_same(alone, found, 1e-5, f"worker {index}")
    assert max(taken for _, taken in every) < 0.85 * once, (every, once)


def trained_after_another_pass(strategy: Any) -> None:
    rows = ArrayDataset((X, Y)).batch(5).shuffle(seed=np.int64(3)).repeat(np.int64(1))
    if strategy.workers.group.is_chief:
        next(iter(rows))
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(strategy.experimental_distribute_dataset(rows), verbose=0)


def test_arrays_in_another_order_are_an_error(forker: Any) -> None:
    pool = WorkerPool(forker, 2)
    try:
        outcomes = pool.cluster(1).outcomes(trained_after_another_pass)
    finally:
        pool.close()
    errors = [error for error, _ in outcomes]
    assert all("passes before 0" in error for error in errors), errors
    assert all("iterate over them equally often" in error for error in errors), errors


class FewerRows(OrderedRows):
    """A dataset whose last batch has fewer rows than it says."""

    def num_rows(self, index: int) -> int:
        return self.batch


def trained_on_fewer_rows(strategy: Any) -> None:
    model = make_model(strategy, False, 1)
    model.fit(FewerRows(({"one": X, "two": 2 * X}, Y, WEIGHTS), 5), verbose=0)


def test_fewer_rows_than_asked_for_are_an_error(forker: Any) -> None:
    pool = WorkerPool(forker, 2)
    try:
        outcomes = pool.cluster(1).outcomes(trained_on_fewer_rows)
    finally:
        pool.close()
    text = "`FewerRows.get_rows(4, 3, 5)` must return 2 rows, and has returned an array"
    assert any(text in error for error, _ in outcomes), outcomes


class OtherRows(OrderedRows):
    """A dataset with other rows in the second batch of each worker."""

    index = 0

    def num_rows(self, index: int) -> int:
        return super().num_rows(index) + (self.index if index == 1 else 0)


def trained_on_other_rows(strategy: Any) -> None:
    model = make_model(strategy, False, 1)
    dataset = OtherRows(({"one": X, "two": 2 * X}, Y, WEIGHTS), 5)
    dataset.index = strategy.workers.group.index
    model.fit(dataset, verbose=0)


@pytest.mark.slow(seconds=7)
def test_other_numbers_of_rows_are_an_error(forker: Any) -> None:
    pool = WorkerPool(forker, 2)
    try:
        outcomes = pool.cluster(1).outcomes(trained_on_other_rows)
    finally:
        pool.close()
    assert any("numbers of rows are [5, 6]" in error for error, _ in outcomes), outcomes
