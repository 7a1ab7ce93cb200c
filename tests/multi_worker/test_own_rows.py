"""Each worker reads its own rows of a global batch, where that changes no number."""

from __future__ import annotations

import collections
import itertools
import logging
import pickle
import random
from typing import Any

import keras
import numpy as np
import pytest
import torch
from harness.training import assert_same
from multi_worker.loaders import (
    BATCH,
    FORKS,
    ROWS,
    WEIGHTS,
    WIDTH,
    Noisy,
    Rows,
    X,
    Y,
    loader,
)
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import keras_strategies as ks

ALL = pytest.mark.parametrize(
    "cluster", ["two", "three", "two_by_two"], indirect=True, scope="session"
)
OF_TORCH = pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="the reads of arrays are Torch's"
)
KINDS = (
    "numpy",
    "python",
    "own python",
    "keras",
    "torch",
    "keras global",
    "generator",
    "made later",
    "of one row",
)


def make_model(strategy: Any) -> Any:
    keras.utils.set_random_seed(5)
    # Keras seeds it with the backend Torch only. Other workers get that of the chief.
    torch.manual_seed(
        5 if strategy.workers is None else 5 + strategy.workers.group.index
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9), "mse", weighted_metrics=["mae"]
        )
    return model


def summary(model: Any, history: Any, *others: Any) -> dict[str, Any]:
    return {
        "history": {k: np.asarray(v) for k, v in history.history.items()},
        "weights": {i: np.asarray(w) for i, w in enumerate(model.get_weights())},
        "others": {i: np.asarray(each) for i, each in enumerate(others)},
    }


def fitted(
    strategy: Any, kind: str, distributed: bool = False
) -> tuple[Any, list[int]]:
    """Numbers of `fit` with a loader, and the rows that were read."""
    model = make_model(strategy)
    dataset: Any = Rows() if kind == "rows" else Noisy(kind)
    batches = loader(dataset)
    if distributed:
        batches = strategy.experimental_distribute_dataset(batches)
    history = model.fit(batches, epochs=2, verbose=0)
    read = list(dataset.read)
    if kind == "rows" and not distributed:
        # It is the user's still: a copy has the rows, and connects nobody.
        copied = pickle.loads(pickle.dumps(batches))
        assert len(copied.dataset) == ROWS and len(copied) == len(batches)
    evaluated = model.evaluate(batches, verbose=0)
    # Equal draws after it: the generators of the process have moved alike.
    draws = [random.random(), np.random.rand(), float(torch.rand(()))]
    return summary(model, history, evaluated, draws), read


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["distributed-two"])
@ALL
@pytest.mark.parametrize("distributed", [False, True], ids=["given", "distributed"])
def test_rows_of_a_loader_are_read_by_their_worker(
    cluster: Any, distributed: bool
) -> None:
    expected, read = fitted(ks.OneDeviceStrategy("cpu:0"), "rows", distributed)
    every = cluster(fitted, "rows", distributed)
    for index, (found, _) in enumerate(every):
        assert_same(expected, found, 1e-5, f"worker {index}")
    # Each row by one of the workers. On TensorFlow, all of them read the last batch of
    # an epoch where it has fewer rows than there are replicas.
    again = collections.Counter(itertools.chain(*(own for _, own in every)))
    again.subtract(read)
    assert min(again.values()) == 0
    if keras.backend.backend() != "tensorflow":
        assert max(again.values()) == 0
    assert sum(again.values()) in (0, 2 * (ROWS % BATCH))
    assert max(len(own) for _, own in every) < len(read)


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["two-generator", "two-made later"])
@pytest.mark.parametrize(
    "kind",
    [
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[:-4]),
        *KINDS[-4:],
    ],
)
def test_samples_with_random_numbers_are_those_of_one_device(
    cluster: Any, kind: str
) -> None:
    expected, read = fitted(ks.OneDeviceStrategy("cpu:0"), kind)
    every = cluster(fitted, kind)
    for index, (found, _) in enumerate(every):
        assert_same(expected, found, 1e-5, f"worker {index}")
    # Own rows; the batch in which the dataset makes its generator is read again.
    assert max(len(own) for _, own in every) < 0.75 * len(read)


def with_processes(strategy: Any, kind: str, persistent: bool) -> Any:
    model = make_model(strategy)
    dataset: Any = Rows() if kind == "rows" else Noisy(kind)
    batches = loader(dataset, num_workers=2, persistent_workers=persistent)
    history = model.fit(batches, epochs=2, verbose=0)
    draws = [random.random(), np.random.rand(), float(torch.rand(()))]
    if batches._iterator is not None:
        # The dataset that Keras makes on TensorFlow refers to it.
        batches._iterator._shutdown_workers()
    return summary(model, history, draws)


@pytest.mark.nightly(unless=["two-of one row-False"])
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize(
    ("kind", "persistent"),
    [
        pytest.param("rows", False, marks=pytest.mark.nightly),
        pytest.param("rows", True, marks=FORKS),
        pytest.param("torch", False, marks=pytest.mark.nightly),
        pytest.param("torch", True, marks=pytest.mark.nightly),
        pytest.param("of one row", False, marks=FORKS),
        pytest.param("of one row", True, marks=pytest.mark.nightly),
        pytest.param("made later", False, marks=pytest.mark.nightly),
    ],
)
def test_processes_of_a_loader(cluster: Any, kind: str, persistent: bool) -> None:
    expected = with_processes(ks.OneDeviceStrategy("cpu:0"), kind, persistent)
    for index, found in enumerate(cluster(with_processes, kind, persistent)):
        assert_same(expected, found, 1e-5, f"worker {index}")


def stacked(samples: Any) -> Any:
    return tuple(torch.tensor(np.stack(each)) for each in zip(*samples, strict=True))


def collated(strategy: Any, is_declared: bool) -> tuple[Any, int, str]:
    """Numbers of `fit`, how many rows were read, and what is said of it."""
    model = make_model(strategy)
    dataset = Noisy("numpy")
    batches = loader(
        dataset, collate_fn=ks.row_wise(stacked) if is_declared else stacked
    )
    said: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: Any) -> None:
            said.append(record.getMessage())

    logger, handler = logging.getLogger("keras_strategies.own_rows"), Handler()
    logger.addHandler(handler)
    try:
        history = model.fit(batches, epochs=2, verbose=0)
        model.evaluate(batches, verbose=0)
    finally:
        logger.removeHandler(handler)
    return summary(model, history), len(dataset.read), "\n".join(said)


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("is_declared", [False, True])
def test_a_collate_fn_gets_own_rows_if_it_is_declared(
    cluster: Any, is_declared: bool
) -> None:
    expected, read, said = collated(ks.OneDeviceStrategy("cpu:0"), is_declared)
    assert not said
    every = cluster(collated, is_declared)
    for index, (found, own, text) in enumerate(every):
        assert_same(expected, found, 1e-5, f"worker {index}")
        if is_declared:
            assert own < 0.75 * read and not text
        else:
            assert own == read
            assert text.count("2 times the reads") == 1 and "ks.row_wise" in text


def pairs_of(samples: Any) -> Any:
    return stacked([*samples, *samples])


def wrongly_declared(strategy: Any) -> str:
    try:
        make_model(strategy).fit(
            loader(Rows(), collate_fn=ks.row_wise(pairs_of)), verbose=0
        )
    except ks.errors.InputError as error:
        return str(error)
    return ""


def test_a_wrong_declaration_of_a_collate_fn_is_an_error(cluster: Any) -> None:
    for text in cluster(wrongly_declared):
        assert "Its `collate_fn` made" in text


def in_other_ways(strategy: Any, is_eager: bool = False) -> Any:
    """Several steps in one call, validation, nested input, and predictions."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        inputs = {name: keras.Input((WIDTH,), name=name) for name in ("one", "two")}
        both = keras.layers.Concatenate()(list(inputs.values()))
        model = keras.Model(inputs, keras.layers.Dense(1)(both))
        model.compile(
            "sgd",
            "mse",
            metrics=["mae"],
            steps_per_execution=1 if is_eager else 2,
            run_eagerly=is_eager,
        )

    class Nested(Rows):
        def __getitem__(self, i: int) -> Any:
            x, y, _ = super().__getitem__(i)
            return {"one": x, "two": 2 * x}, y

    class Alone(Rows):
        def __getitem__(self, i: int) -> Any:
            return ({"one": X[i], "two": X[i]},)

    history = model.fit(
        loader(Nested(), shuffle=False),
        validation_data=loader(Nested(), shuffle=False, batch_size=4),
        epochs=2,
        verbose=0,
    )
    predicted = model.predict(loader(Alone(), shuffle=False), verbose=0)
    return summary(model, history, predicted)


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["two"])
@ALL
def test_loaders_in_other_ways(cluster: Any) -> None:
    expected = in_other_ways(ks.OneDeviceStrategy("cpu:0"))
    for index, found in enumerate(cluster(in_other_ways)):
        assert_same(expected, found, 1e-5, f"worker {index}")


@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="only TensorFlow has eager steps"
)
def test_loaders_of_eager_steps(cluster: Any) -> None:
    expected = in_other_ways(ks.OneDeviceStrategy("cpu:0"), is_eager=True)
    for index, found in enumerate(cluster(in_other_ways, True)):
        assert_same(expected, found, 1e-5, f"worker {index}")


def of_arrays(strategy: Any, is_custom: bool) -> Any:
    """Numbers of `fit` with arrays, the rows on this worker, and of the last steps."""
    from keras_strategies.runtime.data_parallel.row_parts import RowParts

    found: list[int] = []

    class Custom(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x = data[0]
            own = x.parts if isinstance(x, RowParts) else [x]
            found.append(sum(len(part) for part in own))
            if is_custom:
                x = x + 0.5 * x.mean(0)
            return super().train_step((x, *data[1:]))

    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = Custom([keras.Input((WIDTH,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    history = model.fit(
        X, Y, sample_weight=WEIGHTS, batch_size=BATCH, epochs=2, verbose=0
    )
    predicted = model.predict(X, batch_size=7, verbose=0)
    evaluated = model.evaluate(X, Y, batch_size=2, verbose=0)
    return summary(model, history, predicted, evaluated), found


@pytest.mark.nightly(unless=["two_by_two"])
@ALL
@OF_TORCH
def test_rows_of_arrays(cluster: Any) -> None:
    expected, sizes = of_arrays(ks.OneDeviceStrategy("cpu:0"), False)
    every = cluster(of_arrays, False)
    for index, (found, _) in enumerate(every):
        assert_same(expected, found, 1e-5, f"worker {index}")
    assert np.sum([own for _, own in every], 0).tolist() == sizes


@OF_TORCH
def test_arrays_of_a_step_that_joins_them_are_read_in_full(cluster: Any) -> None:
    expected, sizes = of_arrays(ks.OneDeviceStrategy("cpu:0"), True)
    for index, (found, own) in enumerate(cluster(of_arrays, True)):
        assert_same(expected, found, 1e-5, f"worker {index}")
        assert own[0] < sizes[0] and own[1:] == sizes[1:]


def of_other_orders(strategy: Any) -> str:
    batches = DataLoader(
        TensorDataset(torch.tensor(X), torch.tensor(Y)),
        BATCH,
        sampler=RandomSampler(
            X, generator=torch.Generator().manual_seed(strategy.workers.group.index)
        ),
    )
    try:
        make_model(strategy).fit(batches, verbose=0)
    except ks.errors.WorkerError as error:
        return str(error)
    return ""


def test_orders_that_differ_are_an_error(cluster: Any) -> None:
    for text in cluster(of_other_orders):
        assert "have different batches" in text and "`generator`" in text


def steps_of_other_orders(strategy: Any) -> list[str]:
    """What steps say of equal rows in equal, and in other orders."""
    found = []
    for order in (7, strategy.workers.group.index):
        try:
            strategy.workers.steps.check_rows(4, (4, order))
            strategy.workers.steps.await_checks()
            found.append("")
        except ks.errors.WorkerError as error:
            found.append(str(error))
    return found


def test_steps_compare_orders(cluster: Any) -> None:
    for equal, other in cluster(steps_of_other_orders):
        assert equal == "" and "have different batches" in other
