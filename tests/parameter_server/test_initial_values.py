"""Initial values that servers compute: distribution, seeds, pieces."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.parameter_server.server.request_handler import ParameterServer
from keras_strategies.parameter_server.variables import initial_values
from keras_strategies.parameter_server.variables.initial_values import (
    pickled,
    shard_initializers,
)
from parameter_server import servers_in_process

pytestmark = pytest.mark.one_backend

ROWS, WIDTH = 30_011, 24
NAMES = keras.initializers


class Doubled(NAMES.RandomUniform):
    """A subclass: its own values, computed by Keras."""

    def __call__(self, shape, dtype=None):
        return 2 * super().__call__(shape, dtype)


INITIALIZERS = {
    "uniform": lambda: NAMES.RandomUniform(-0.25, 0.5, seed=3),
    "normal": lambda: NAMES.RandomNormal(2.0, 0.5, seed=3),
    "truncated": lambda: NAMES.TruncatedNormal(-1.0, 0.1, seed=3),
    "glorot": lambda: NAMES.GlorotUniform(seed=3),
    "he": lambda: NAMES.HeNormal(seed=3),
    "generator": lambda: NAMES.LecunNormal(seed=keras.random.SeedGenerator(3)),
    "subclass": lambda: Doubled(-0.25, 0.5, seed=3),
}


def in_shards(initializer, *ends: int, dtype: str = "float32") -> np.ndarray:
    shard = shard_initializers(initializer, (ROWS, WIDTH), dtype)
    return np.concatenate(
        [shard(a, b)() for a, b in zip((0, *ends), (*ends, ROWS), strict=True)]
    )


@pytest.mark.parametrize("name", INITIALIZERS)
def test_values_have_the_distribution_of_the_initializer(name) -> None:
    initializer = INITIALIZERS[name]()
    found = in_shards(initializer)
    keras_values = keras.ops.convert_to_numpy(initializer((ROWS, WIDTH), "float32"))
    levels = [0.1, 1, 10, 25, 50, 75, 90, 99, 99.9]
    spread = keras_values.std()
    np.testing.assert_allclose(
        np.percentile(found, levels),
        np.percentile(keras_values, levels),
        atol=0.04 * spread,
    )
    assert found.std() == pytest.approx(spread, rel=0.01)
    assert found.min() >= keras_values.min() - 0.3 * spread
    assert len(np.unique(found[:, 0])) > 0.99 * ROWS


@pytest.mark.parametrize("name", [n for n in INITIALIZERS if n != "generator"])
def test_values_do_not_depend_on_the_shards(name, monkeypatch) -> None:
    monkeypatch.setattr(initial_values, "_BLOCK_SIZE", 5_000 * WIDTH)
    unsharded = in_shards(INITIALIZERS[name]())
    for ends in ((4_000, 20_001), (5_000,)):
        assert np.array_equal(in_shards(INITIALIZERS[name](), *ends), unsharded)


def test_other_seeds_give_other_values() -> None:
    first = in_shards(NAMES.RandomNormal(seed=1))
    assert not (first == in_shards(NAMES.RandomNormal(seed=2))).any()
    generator = keras.random.SeedGenerator(5)
    one = in_shards(NAMES.RandomNormal(seed=generator))
    assert not (one == in_shards(NAMES.RandomNormal(seed=generator))).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_have_the_dtype_of_the_variable(dtype) -> None:
    found = in_shards(NAMES.RandomNormal(seed=1), dtype=dtype)
    assert found.dtype.name == dtype
    expected = in_shards(NAMES.RandomNormal(seed=1)).astype(found.dtype)
    assert np.array_equal(found, expected)


@pytest.fixture
def small_requests(monkeypatch) -> None:
    monkeypatch.setattr(initial_values, "_REQUEST_BYTES", 7_000 * WIDTH * 4)
    monkeypatch.setattr(initial_values, "_BLOCK_SIZE", 1_000 * WIDTH)


def test_a_table_is_created_by_several_requests(small_requests, monkeypatch) -> None:
    from keras_strategies.parameter_server.variables import variable_registry

    monkeypatch.setattr(variable_registry, "_LOCAL_BYTES", 1000)
    initializer = NAMES.RandomNormal(seed=1)
    expected = in_shards(initializer)
    for parts in (1, 3):
        with servers_in_process.start(
            2, variable_partitioner=lambda shape, dtype, parts=parts: [parts, 1]
        ) as strategy:
            with strategy.scope():
                table = keras.Variable(initializer, (ROWS, WIDTH), dtype="float32")
                ones = keras.Variable(NAMES.Ones(), (ROWS, WIDTH), dtype="float32")
            assert np.array_equal(table.numpy(), expected)
            assert (ones.numpy() == 1).all()


@pytest.mark.parametrize("name", ["Ones", "RandomNormal", "RandomUniform"])
def test_a_scalar_has_a_value(name) -> None:
    initializer = getattr(NAMES, name)(**({} if name == "Ones" else {"seed": 1}))
    found = shard_initializers(initializer, (), "float32")(0, 1)()
    assert found.shape == () and found.dtype == "float32"
    assert found == 1 if name == "Ones" else found != 0


@pytest.mark.parametrize("killed_after", [1, 2, 5])
def test_a_server_that_is_killed_while_it_creates(
    tmp_path, small_requests, killed_after
) -> None:
    made = shard_initializers(NAMES.RandomNormal(seed=1), (ROWS, WIDTH), "float32")(
        0, ROWS
    )
    expected = made()

    def create(server: ParameterServer, requests) -> None:
        for rows in requests:
            server.handle(("initialize", ((0, 0), *rows)))

    server = ParameterServer(0, str(tmp_path), interval=1e-6)
    server.handle(("begin", "me"))
    server.handle(("create", [((0, 0), pickled(made))]))
    requests = list(made.requests())
    assert len(requests) == 5
    create(server, requests[1:killed_after])
    # No snapshot has a part of it.
    server.idle()
    assert server._snapshots.is_writing == (killed_after == 5)
    again = ParameterServer(0, str(tmp_path))
    create(again, requests[killed_after - 1 :])
    assert np.array_equal(again.handle(("read", ((0, 0), 0, ROWS))), expected)
    path = server.handle(("snapshot", None))
    assert path.endswith(".snapshot")
    third = ParameterServer(0, str(tmp_path))
    create(third, requests[killed_after:])
    assert np.array_equal(third.handle(("read", ((0, 0), 0, ROWS))), expected)


def test_more_rows_than_ids_are_refused_on_jax() -> None:
    with servers_in_process.start(1) as strategy, strategy.scope():
        shape = (2**31 + 1, 1)
        if keras.backend.backend() != "jax":
            # No memory is taken before it is written.
            keras.Variable(NAMES.Zeros(), shape, dtype="float32")
            return
        with pytest.raises(InvalidArgumentError, match="ids in int32"):
            keras.Variable(NAMES.Zeros(), shape, dtype="float32")
