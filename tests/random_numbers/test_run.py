"""Random numbers in `Strategy.run`: of a replica's rows, and those that all share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

X = np.random.default_rng(5).normal(size=(12, 4)).astype("float32")

#: Functions of rows and a seed.
DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda x, seed: keras.random.normal(ops.shape(x), seed=seed),
    "uniform": lambda x, seed: keras.random.uniform(ops.shape(x), seed=seed),
    "truncated_normal": lambda x, seed: keras.random.truncated_normal(
        ops.shape(x), seed=seed
    ),
    "randint": lambda x, seed: keras.random.randint(ops.shape(x), 0, 99, seed=seed),
    "categorical": lambda x, seed: keras.random.categorical(x, 3, seed=seed),
    "dropout": lambda x, seed: keras.random.dropout(x, 0.5, seed=seed),
    "several": lambda x, seed: ops.sum(
        ops.reshape(keras.random.normal((len(x) * 3, 4), seed=seed), (-1, 3, 4)), 1
    ),
    "dropout-shared": lambda x, seed: keras.random.dropout(
        x, 0.5, noise_shape=(1, 4), seed=seed
    ),
    "shared": lambda x, seed: x + ops.sum(keras.random.normal((7, 4), seed=seed), 0),
}
#: One for each way in which a draw has its shape.
BY_DAY = ("normal", "categorical", "dropout", "shared", "several")


def rows_of_replicas(sizes: tuple[int, ...]) -> Any:
    bounds = np.cumsum((0, *sizes))
    parts = [X[a:b] for a, b in itertools.pairwise(bounds)]
    return ks.PerReplica([ops.convert_to_tensor(part) for part in parts])


@pytest.mark.parametrize("random_numbers", ["partitioned", "keras"])
@pytest.mark.parametrize("sizes", [(6, 6), (5, 4, 3)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in BY_DAY else [pytest.mark.nightly])
        for name in DRAWS
    ],
)
def test_draws_are_those_of_one_device(
    name: str, sizes: tuple[int, ...], random_numbers: str
) -> None:
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
    strategy = ks.MirroredStrategy(
        [f"cpu:{i}" for i in range(len(sizes))], random_numbers=random_numbers
    )
    with strategy.scope():
        own = keras.random.SeedGenerator(3)
    for wanted in expected:
        found = strategy.run(lambda x: draw(x, own), args=(rows_of_replicas(sizes),))
        parts = map(ops.convert_to_numpy, strategy.experimental_local_results(found))
        joined = np.concatenate(list(parts))
        np.testing.assert_allclose(joined, ops.convert_to_numpy(wanted), atol=1e-6)


def test_layers_draw_for_their_rows() -> None:
    def noisy() -> keras.Model:
        return keras.Sequential(
            [
                keras.Input((4,)),
                layers.GaussianNoise(0.5, seed=1),
                layers.Dropout(0.4, seed=2),
            ]
        )

    expected = noisy()(X, training=True)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], random_numbers="keras")
    with strategy.scope():
        model = noisy()
    rows = rows_of_replicas((7, 5))
    found = strategy.run(lambda x: model(x, training=True), args=(rows,))
    parts = map(ops.convert_to_numpy, strategy.experimental_local_results(found))
    joined = np.concatenate(list(parts))
    np.testing.assert_allclose(joined, ops.convert_to_numpy(expected), atol=1e-6)


def drawn_in_uneven_replicas(draw: Any, sizes: tuple[int, ...]) -> Any:
    """What replicas draw, joined, and what one device draws."""
    rows = ops.convert_to_tensor(X[: sum(sizes)])
    seed = keras.random.SeedGenerator(3)
    expected = ks.OneDeviceStrategy("cpu:0").run(lambda: draw(rows, seed))
    strategy = ks.MirroredStrategy([f"cpu:{i}" for i in range(len(sizes))])
    with strategy.scope():
        own = keras.random.SeedGenerator(3)
    found = strategy.run(lambda x: draw(x, own), args=(rows_of_replicas(sizes),))
    parts = map(ops.convert_to_numpy, strategy.experimental_local_results(found))
    return np.concatenate(list(parts)), ops.convert_to_numpy(expected)


def shared(x: Any, seed: Any) -> Any:
    return x + ops.sum(keras.random.normal((3, 4), seed=seed), 0)


def doubled(x: Any, seed: Any) -> Any:
    drawn = keras.random.normal((2 * ops.shape(x)[0], 4), seed=seed)
    return ops.sum(ops.reshape(drawn, (-1, 2, 4)), 1)


@pytest.mark.parametrize(
    ("draw", "sizes"), [(shared, (4, 3)), (doubled, (2, 1)), (doubled, (2, 2, 1))]
)
def test_uneven_rows_show_which_draws_have_rows(
    draw: Any, sizes: tuple[int, ...]
) -> None:
    """Not the length on one replica alone: 3 of 3 rows, 2 for one row."""
    found, expected = drawn_in_uneven_replicas(draw, sizes)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("draw", "sizes"), [(shared, (3, 2)), (doubled, (1, 2))])
def test_draws_that_may_have_rows_or_not_are_refused(
    draw: Any, sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ks.errors.ContextError, match="does not follow from the leng"):
        drawn_in_uneven_replicas(draw, sizes)


def fixed(x: Any, seed: Any) -> Any:
    """Entries as many as rows of a run, by chance."""
    return x + ops.sum(keras.random.normal((3, 4), seed=seed), 0)


def drawn_in_runs(strategy: Any, draw: Any, runs: list[tuple[int, ...]]) -> list[Any]:
    """What replicas draw in several runs of a function, each joined."""
    with strategy.scope():
        seed = keras.random.SeedGenerator(3)

    def fn(x: Any) -> Any:
        return draw(x, seed)

    found = []
    for sizes in runs:
        results = strategy.run(fn, args=(rows_of_replicas(sizes),))
        parts = map(ops.convert_to_numpy, strategy.experimental_local_results(results))
        found.append(np.concatenate(list(parts)))
    return found


@pytest.mark.parametrize(
    ("draw", "runs"),
    [(fixed, [(4, 2), (3, 3), (3, 2), (3, 3)]), (doubled, [(2, 2), (1, 2), (1, 1)])],
)
def test_earlier_runs_show_which_draws_have_rows(draw: Any, runs: Any) -> None:
    one_device = ks.OneDeviceStrategy("cpu:0")
    expected = drawn_in_runs(one_device, draw, [(sum(sizes),) for sizes in runs])
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    for one, other in zip(expected, drawn_in_runs(strategy, draw, runs), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-6)


@pytest.mark.parametrize(
    "runs", [[(3, 3), (4, 2)], [(3, 3), (2, 2)], [(3, 3), (3, 3), (5, 4)]]
)
def test_later_runs_do_not_change_which_draws_have_rows(runs: Any) -> None:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ks.errors.ContextError, match="in an earlier run"):
        drawn_in_runs(strategy, fixed, runs)


def test_functions_with_the_same_code_draw_apart() -> None:
    """What one has drawn says nothing of another that it is called with."""
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    for draw, runs in [(fixed, [(4, 2)]), (DRAWS["normal"], [(3, 3), (2, 1)])]:
        totals = [(sum(sizes),) for sizes in runs]
        one_device = ks.OneDeviceStrategy("cpu:0")
        expected = drawn_in_runs(one_device, draw, totals)
        found = drawn_in_runs(strategy, draw, runs)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_allclose(other, one, atol=1e-6)


def test_a_draw_without_rows_is_the_same_on_all_replicas() -> None:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        seed = keras.random.SeedGenerator(3)
    found = strategy.run(lambda: keras.random.normal((3,), seed=seed))
    first, second = map(
        ops.convert_to_numpy, strategy.experimental_local_results(found)
    )
    np.testing.assert_array_equal(first, second)


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="functions of torch")
def test_numbers_of_keras_that_depend_on_other_rows_are_refused() -> None:
    """With rows of their own they are drawn, see `test_partitioned_draws`."""
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], random_numbers="keras")
    with pytest.raises(ks.errors.ContextError, match="random_numbers='partitioned'"):
        strategy.run(
            lambda x: keras.random.gamma(ops.shape(x), 0.5),
            args=(rows_of_replicas((6, 6)),),
        )


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="functions of torch")
def test_functions_that_mix_axis_0_get_no_rows_of_others() -> None:
    """As long as the replica's rows, but an axis of time or of categories."""
    import torch
    from torch.nn import functional

    values = torch.ones(4, 3)
    weights = torch.tensor([0.0, 0.0, 0.0, 1.0])

    def draw(x: Any) -> Any:
        attended = functional.scaled_dot_product_attention(
            values, values, 2 * values, dropout_p=1e-9
        )
        chosen = torch.multinomial(weights, 5, replacement=True)
        soft = functional.gumbel_softmax(20 * weights, tau=1e-3)
        dropped = functional.alpha_dropout(input=x, p=0.5, training=True)
        return attended.mean() + chosen.sum() + soft.sum() + 0 * dropped.sum()

    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    found = strategy.run(draw, args=(rows_of_replicas((4, 4)),))
    for each in strategy.experimental_local_results(found):
        assert float(each) == pytest.approx(2 + 15 + 1)
