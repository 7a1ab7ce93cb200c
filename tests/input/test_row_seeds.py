"""Random numbers of a row of a `DataLoader` belong to the row, under every strategy."""

from __future__ import annotations

import random
from typing import Any

import keras
import numpy as np
import pytest
import torch
from multi_worker.loaders import BATCH, ROWS, Noisy, Rows, X, forks, loader
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

import keras_strategies as ks
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.loaders.loader_rows import batches_of_worker

pytestmark = pytest.mark.one_backend


def one_device() -> Any:
    return ks.OneDeviceStrategy("cpu:0")


def seed(number: int) -> None:
    keras.utils.set_random_seed(number)
    torch.manual_seed(number)


def passes(given: Any, count: int = 2) -> list[np.ndarray]:
    """`x` of passes over a loader that is distributed."""
    strategy = one_device()
    seed(3)
    batches = strategy.experimental_distribute_dataset(given)
    found = []
    for _ in range(count):
        parts = [
            np.asarray(each[0])
            for batch in batches
            for each in strategy.experimental_local_results(batch)
        ]
        found.append(np.concatenate(parts))
    return found


@pytest.mark.parametrize("kind", ["torch", "numpy", "keras", "made later"])
def test_a_row_is_the_same_in_batches_of_any_size(kind: str) -> None:
    first, second = passes(loader(Noisy(kind), shuffle=False))
    for options in ({"batch_size": 1}, {"batch_size": ROWS}):
        again = passes(loader(Noisy(kind), shuffle=False, **options))
        np.testing.assert_array_equal(again[0], first)
    # Each row has a number of its own, and another one in each pass.
    noise = np.concatenate([first - X, second - X])[:, 0]
    assert len(np.unique(noise.round(5))) == 2 * ROWS


def test_eight_workers_read_each_row_once_and_as_one_device() -> None:
    [expected] = passes(loader(Noisy("numpy"), shuffle=False, batch_size=ROWS), 1)
    read, found = [], []
    for worker in range(8):
        seed(3)
        dataset = Noisy("numpy")
        given = loader(dataset, shuffle=False, batch_size=ROWS)
        counts = ReplicaCounts((1,) * 8, worker)
        [((x, *_), _)] = batches_of_worker(given, counts)
        read += dataset.read
        found.append(np.asarray(x))
    assert read == list(range(ROWS))
    np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.nightly(unless=["numpy"])
@pytest.mark.slow(seconds=11)
@forks
@pytest.mark.parametrize(
    "kind", ["torch", "numpy", "python", "generator", "made later"]
)
def test_a_row_is_the_same_in_processes_of_a_loader(kind: str) -> None:
    expected = passes(loader(Noisy(kind)))
    for options in ({}, {"persistent_workers": True}):
        given = loader(Noisy(kind), num_workers=2, **options)
        np.testing.assert_array_equal(passes(given)[0], expected[0])


def test_reads_leave_the_generators_as_they_were() -> None:
    dataset = Noisy("generator")

    def draws(kind: str) -> list[float]:
        dataset.kind = kind
        passes(loader(dataset, shuffle=False), 1)
        return [
            random.random(),
            np.random.rand(),
            dataset.generator.random(),
            float(keras.random.uniform(())),
        ]

    every = [draws(kind) for kind in ("none", "python", "numpy", "keras global")]
    # Those of the dataset go on from read to read.
    assert all(each[:2] + each[3:] == every[0][:2] + every[0][3:] for each in every)
    expected = np.random.default_rng(1).random(len(every))
    assert [each[2] for each in every] == expected.tolist()


def test_a_row_that_is_read_twice_in_a_pass_has_two_numbers() -> None:
    sampler = RandomSampler(range(1), replacement=True, num_samples=ROWS)
    (found,) = passes(DataLoader(Noisy("torch"), BATCH, sampler=sampler), 1)
    assert len(np.unique(found[:, 0])) == ROWS


class Batches(Noisy):
    """A dataset whose keys are lists of rows."""

    def __getitem__(self, keys: Any) -> Any:
        rows = [super(Batches, self).__getitem__(i) for i in keys]
        return tuple(np.stack(each) for each in zip(*rows, strict=True))


def test_a_dataset_that_makes_batches_is_seeded_for_each_batch() -> None:
    def made() -> Any:
        sampler = BatchSampler(SequentialSampler(range(ROWS)), BATCH, False)
        return DataLoader(Batches("numpy"), batch_size=None, sampler=sampler)

    one, other = passes(made()), passes(made())
    np.testing.assert_array_equal(one, other)
    assert len(np.unique((one[0] - X)[:, 0].round(5))) == ROWS


def fitted(strategy: Any, kind: str, **options: Any) -> list[np.ndarray]:
    seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input(X.shape[1:]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    given = loader(Noisy(kind), **options)
    model.fit(given, validation_data=loader(Noisy(kind)), epochs=2, verbose=0)
    return [np.asarray(weight) for weight in model.get_weights()]


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize("kind", ["torch", "keras"])
def test_fit_on_two_replicas_is_that_of_one_device(mirrored: Any, kind: str) -> None:
    expected = fitted(one_device(), kind)
    for found in (fitted(mirrored, kind), fitted(one_device(), kind)):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_the_shuffle_is_that_of_plain_keras() -> None:
    def order(fit: Any) -> list[int]:
        dataset = Rows()
        seed(5)
        fit(loader(dataset), loader(dataset))
        return dataset.read

    def plain(*given: Any) -> None:
        for _ in range(2):
            for each in given:
                list(each)

    def ours(*given: Any) -> None:
        distribute = one_device().experimental_distribute_dataset
        plain(*map(distribute, given))

    assert order(ours) == order(plain)
