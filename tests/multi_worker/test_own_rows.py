"""Each worker reads its own rows of a loader, with the numbers of one device."""

from __future__ import annotations

import collections
import itertools
import pickle
from typing import Any

import keras
import numpy as np
import pytest
import torch
from harness.training import assert_workers, numbers
from multi_worker import loaders
from multi_worker.clusters import ALL, assert_as_one_device, dense, logged, one_device
from multi_worker.loaders import BATCH, FORKS, ROWS, WIDTH, Rows, X, Y, loader
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import keras_strategies as ks


def make_model(strategy: Any) -> Any:
    model = dense(
        *(strategy, WIDTH, lambda: [keras.layers.Dense(1)]),
        lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        weighted_metrics=["mae"],
    )
    # Keras seeds it with the backend Torch only. Other workers get that of the chief.
    torch.manual_seed(5 + loaders.index_of(strategy))
    return model


def fitted(strategy: Any, kind: str, distributed: bool = False) -> Any:
    """Numbers of `fit` with a loader, and the rows that were read."""
    model, dataset = make_model(strategy), loaders.dataset_of(kind)
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
    return numbers(model, history, evaluated, loaders.draws()), read


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["distributed-two"])
@ALL
@pytest.mark.parametrize("distributed", [False, True], ids=["given", "distributed"])
def test_rows_of_a_loader_are_read_by_their_worker(cluster, distributed) -> None:
    expected, read = fitted(one_device(), "rows", distributed)
    every = cluster(fitted, "rows", distributed)
    assert_workers(expected, [found for found, _ in every])
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
    "kind", ["numpy", "own python", "keras global", "generator", "made later"]
)
def test_samples_with_random_numbers_are_those_of_one_device(cluster, kind) -> None:
    expected, read = fitted(one_device(), kind)
    every = cluster(fitted, kind)
    assert_workers(expected, [found for found, _ in every])
    # Own rows; the batch in which the dataset makes its generator is read again.
    assert max(len(own) for _, own in every) < 0.75 * len(read)


def with_processes(strategy: Any, kind: str, persistent: bool) -> Any:
    model = make_model(strategy)
    options = {"num_workers": 2, "persistent_workers": persistent}
    batches = loader(loaders.dataset_of(kind), **options)
    history = model.fit(batches, epochs=2, verbose=0)
    if batches._iterator is not None:
        # The dataset that Keras makes on TensorFlow refers to it.
        batches._iterator._shutdown_workers()
    return numbers(model, history, loaders.draws())


@pytest.mark.nightly(unless=["two-of one row-False"])
@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize(
    ("kind", "persistent"),
    [
        pytest.param("rows", True, marks=FORKS),
        pytest.param("torch", True, marks=pytest.mark.nightly),
        pytest.param("of one row", False, marks=FORKS),
        pytest.param("made later", False, marks=pytest.mark.nightly),
    ],
)
def test_processes_of_a_loader(cluster: Any, kind: str, persistent: bool) -> None:
    assert_as_one_device(cluster, with_processes, kind, persistent)


def stacked(samples: Any) -> Any:
    return tuple(torch.tensor(np.stack(each)) for each in zip(*samples, strict=True))


def collated(strategy: Any, is_declared: bool) -> tuple[Any, int, str]:
    """Numbers of `fit`, how many rows were read, and what is said of it."""
    model, dataset = make_model(strategy), loaders.Noisy("numpy")
    collate_fn = ks.row_wise(stacked) if is_declared else stacked
    batches = loader(dataset, collate_fn=collate_fn)
    with logged() as said:
        history = model.fit(batches, epochs=2, verbose=0)
        model.evaluate(batches, verbose=0)
    return numbers(model, history), len(dataset.read), "\n".join(said)


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("is_declared", [False, True])
def test_a_collate_fn_gets_own_rows_if_it_is_declared(cluster, is_declared) -> None:
    expected, read, said = collated(one_device(), is_declared)
    assert not said
    every = cluster(collated, is_declared)
    assert_workers(expected, [found for found, *_ in every])
    for _, own, text in every:
        if is_declared:
            assert own < 0.75 * read and not text
        else:
            assert own == read
            assert text.count("2 times the reads") == 1 and "ks.row_wise" in text


def pairs_of(samples: Any) -> Any:
    return stacked([*samples, *samples])


def wrongly_declared(strategy: Any) -> None:
    batches = loader(Rows(), collate_fn=ks.row_wise(pairs_of))
    with pytest.raises(ks.errors.InputError, match="Its `collate_fn` made"):
        make_model(strategy).fit(batches, verbose=0)


def of_other_orders(strategy: Any) -> None:
    generator = torch.Generator().manual_seed(strategy.workers.group.index)
    rows = TensorDataset(torch.tensor(X), torch.tensor(Y))
    batches = DataLoader(rows, BATCH, sampler=RandomSampler(X, generator=generator))
    text = r"(?s)have different batches.*`generator`"
    with pytest.raises(ks.errors.WorkerError, match=text):
        make_model(strategy).fit(batches, verbose=0)


@pytest.mark.parametrize("program", [wrongly_declared, of_other_orders])
def test_wrong_declarations_and_orders_that_differ(cluster: Any, program: Any) -> None:
    cluster(program)


class Nested(Rows):
    """Rows with named inputs, with targets or alone."""

    def __init__(self, has_targets: bool = True):
        super().__init__()
        self.has_targets = has_targets

    def __getitem__(self, i: int) -> Any:
        x = {"one": X[i], "two": 2 * X[i]}
        return (x, Y[i]) if self.has_targets else (x,)


def in_other_ways(strategy: Any, is_eager: bool) -> Any:
    """Several steps in one call, validation, nested input, and predictions."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        inputs = {name: keras.Input((WIDTH,), name=name) for name in ("one", "two")}
        both = keras.layers.Concatenate()(list(inputs.values()))
        model = keras.Model(inputs, keras.layers.Dense(1)(both))
        options = {"run_eagerly": True} if is_eager else {"steps_per_execution": 2}
        model.compile("sgd", "mse", metrics=["mae"], **options)
    validation = loader(Nested(), shuffle=False, batch_size=4)
    given = loader(Nested(), shuffle=False)
    history = model.fit(given, validation_data=validation, epochs=2, verbose=0)
    alone = loader(Nested(has_targets=False), shuffle=False)
    return numbers(model, history, model.predict(alone, verbose=0))


# Only TensorFlow has eager steps.
@pytest.mark.one_backend
@pytest.mark.nightly(unless=["two-False"])
@pytest.mark.parametrize(
    "is_eager", [False, True] if keras.backend.backend() == "tensorflow" else [False]
)
@ALL
def test_loaders_in_other_ways(cluster: Any, is_eager: bool) -> None:
    assert_as_one_device(cluster, in_other_ways, is_eager)
