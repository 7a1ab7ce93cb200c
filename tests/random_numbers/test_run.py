"""Random numbers in `Strategy.run`: of a replica's rows, and those that all share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from random_numbers.cases import of_the_framework

X = np.random.default_rng(5).normal(size=(12, 4)).astype("float32")

#: Functions of rows and a seed.
DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda x, seed: keras.random.normal(ops.shape(x), seed=seed),
    "uniform-of-rows": lambda x, seed: keras.random.uniform(
        ops.shape(x), -5.0, x, seed=seed
    ),
    "categorical": lambda x, seed: keras.random.categorical(x, 3, seed=seed),
    "dropout": lambda x, seed: keras.random.dropout(x, 0.5, seed=seed),
    "several": lambda x, seed: ops.sum(
        keras.random.normal((len(x), 3, 4), seed=seed), 1
    ),
    "beta": lambda x, seed: keras.random.beta(ops.shape(x), 0.5, 2.0, seed=seed),
    "gamma-of-rows": lambda x, seed: keras.random.gamma(
        ops.shape(x), ops.abs(x) + 0.1, seed=seed
    ),
    "spatial": lambda x, seed: ops.sum(
        keras.random.dropout(
            ops.ones((len(x), 3, 4)), 0.5, noise_shape=(len(x), 1, 4), seed=seed
        ),
        1,
    ),
    "shuffle": lambda x, seed: keras.random.shuffle(x, axis=1, seed=seed),
    "shared": lambda x, seed: x + ops.sum(keras.random.normal((7, 4), seed=seed), 0),
}
#: How many numbers a row takes depends on its parameters.
REFUSED = [("gamma-of-rows", "keras")] * (keras.backend.backend() == "torch")


def mirrored(count: int = 2, **options: Any) -> ks.MirroredStrategy:
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(count)], **options)


def local(strategy: Any, found: Any) -> list[np.ndarray]:
    """The results of replicas."""
    return [*map(ops.convert_to_numpy, strategy.experimental_local_results(found))]


def rows_of_replicas(sizes: tuple[int, ...]) -> Any:
    bounds = np.cumsum((0, *sizes))
    parts = [X[a:b] for a, b in itertools.pairwise(bounds)]
    return ks.PerReplica([ops.convert_to_tensor(part) for part in parts])


@pytest.mark.one_backend
@pytest.mark.parametrize("random_numbers", ["partitioned", "keras"])
@pytest.mark.parametrize("sizes", [(6, 6), (5, 4, 3)])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_one_device(name, sizes, random_numbers) -> None:
    if (name, random_numbers) in REFUSED:
        pytest.skip("see `test_numbers_of_keras_that_depend_on_other_rows_are_refused`")
    draw = DRAWS[name]
    rows = ops.convert_to_tensor(X[: sum(sizes)])
    seed = keras.random.SeedGenerator(3)
    one_device = ks.OneDeviceStrategy("cpu:0", random_numbers=random_numbers)
    expected = [
        one_device.run(lambda: draw(rows, seed))
        if keras.backend.backend() == "torch" and random_numbers == "partitioned"
        else draw(rows, seed)
        for _ in range(2)
    ]
    strategy = mirrored(len(sizes), random_numbers=random_numbers)
    for wanted, found in zip(
        expected, joined_runs(strategy, draw, [sizes] * 2), strict=True
    ):
        np.testing.assert_allclose(found, ops.convert_to_numpy(wanted), atol=1e-6)


def joined_runs(strategy: Any, draw: Any, runs: list[Any]) -> list[np.ndarray]:
    """What replicas draw in several runs of a function, each joined."""
    with strategy.scope():
        seed = keras.random.SeedGenerator(3)

    def fn(x: Any) -> Any:
        return draw(x, seed)

    found = []
    for sizes in runs:
        results = strategy.run(fn, args=(rows_of_replicas(sizes),))
        found.append(np.concatenate(local(strategy, results)))
    return found


def of_length(count: Any) -> Callable[[Any, Any], Any]:
    def draw(x: Any, seed: Any) -> Any:
        length = count(len(x)) if callable(count) else count
        drawn = keras.random.normal((length, 4), seed=seed)
        return ops.sum(drawn, 0) + ops.zeros_like(x)

    return draw


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("count", "runs"),
    [
        (3, [(4, 2), (5, 4), (6, 6), (5, 0)]),
        (lambda rows: rows + 1, [(2, 2)]),
        (lambda rows: 2 * rows, [(3, 3)]),
    ],
    ids=["fixed", "more", "twice"],
)
def test_draws_of_other_lengths_are_those_of_one_replica(count, runs) -> None:
    """The same on all replicas, whatever earlier runs have drawn."""
    draw, alone = of_length(count), [(sizes[0],) for sizes in runs]
    expected = joined_runs(ks.OneDeviceStrategy("cpu:0"), draw, alone)
    found = joined_runs(mirrored(), draw, runs)
    for one, every in zip(expected, found, strict=True):
        np.testing.assert_allclose(every, np.broadcast_to(one[:1], every.shape), 1e-5)


def test_a_fixed_length_that_is_that_of_the_rows_has_rows() -> None:
    """The rule that the guide states: a replica's entries of a draw for all rows."""

    def draw(x: Any, seed: Any) -> Any:
        return keras.random.normal((length, 4), seed=seed)

    length = 6
    (expected,) = joined_runs(ks.OneDeviceStrategy("cpu:0"), draw, [(6,)])
    length = 3
    (found,) = joined_runs(mirrored(), draw, [(3, 3)])
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_draws_of_the_framework_are_equal_on_replicas() -> None:
    """They have the same seed, key or state of the process's generator."""
    keras.utils.set_random_seed(5)
    alone = ops.convert_to_numpy(of_the_framework(ops.ones((3, 4))))
    keras.utils.set_random_seed(5)
    strategy = mirrored()
    found = strategy.run(of_the_framework, args=(rows_of_replicas((3, 3)),))
    for each in local(strategy, found):
        np.testing.assert_allclose(each, alone, 1e-6)


def test_a_draw_without_rows_is_the_same_on_all_replicas() -> None:
    strategy = mirrored()
    with strategy.scope():
        seed = keras.random.SeedGenerator(3)
    found = strategy.run(lambda: keras.random.normal((3,), seed=seed))
    first, second = local(strategy, found)
    np.testing.assert_array_equal(first, second)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="a sequence of numbers")
def test_numbers_of_keras_that_depend_on_other_rows_are_refused() -> None:
    """With rows of their own they are drawn, see above."""
    strategy = mirrored(random_numbers="keras")
    with pytest.raises(ks.errors.ContextError, match="random_numbers='partitioned'"):
        strategy.run(
            lambda x: keras.random.gamma(ops.shape(x), ops.abs(x) + 0.1),
            args=(rows_of_replicas((6, 6)),),
        )
