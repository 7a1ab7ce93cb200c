"""Draws of a replica's rows are bit for bit the entries that one device draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("draws of TensorFlow", allow_module_level=True)

from keras_strategies.engines.tensorflow.compat import operations  # noqa: E402
from keras_strategies.engines.tensorflow.random_numbers.intercepted_draws import (  # noqa: E402
    drawing_entries,
    intercept_draws,
)
from keras_strategies.runtime.random_numbers.row_draws import OwnRows  # noqa: E402

SEED = (7, -9)
ROWS = 13
#: First row and number of rows of replicas.
PARTS = [(0, 5), (5, 4), (9, 4), (12, 1), (3, 0), (0, 13)]
WIDTHS = [(), (4,), (7,), (3, 5)]
Draw = Callable[..., Any]


def uniform(dtype: str, **options: Any) -> Draw:
    return lambda shape, rows: tf.random.stateless_uniform(
        shape, SEED, dtype=dtype, **options
    )


def normal(dtype: str) -> Draw:
    return lambda shape, rows: tf.random.stateless_normal(shape, SEED, dtype=dtype)


def truncated(dtype: str) -> Draw:
    return lambda shape, rows: tf.random.stateless_truncated_normal(
        shape, SEED, dtype=dtype
    )


PARAMETERS = np.random.default_rng(4).uniform(0.05, 0.95, (ROWS, 3, 5))


def parameter(rows: slice, width: tuple[int, ...], dtype: str = "float32") -> Any:
    """A parameter with the rows."""
    return tf.constant(
        PARAMETERS[rows].reshape(-1, 15)[:, : int(np.prod(width))], dtype
    )


def of_rows(draw: Callable[[Any, Any], Any]) -> Draw:
    """A draw with a parameter for each entry; of tensors with two axes."""

    def apply(shape: Any, rows: slice) -> Any:
        width = (int(np.prod(shape[1:])),)
        return draw([shape[0], *width], parameter(rows, width))

    return apply


random = tf.random
DRAWS: dict[str, Draw] = {
    **{
        f"{name}-{dtype}": make(dtype)
        for name, make in {"u": uniform, "n": normal, "t": truncated}.items()
        for dtype in ("float16", "bfloat16", "float32", "float64")
    },
    "int32": uniform("int32", minval=-5, maxval=900),
    "int64": uniform("int64", minval=-5, maxval=900),
    "threefry": uniform("float32", alg="threefry"),
    "gamma": lambda shape, rows: random.stateless_gamma(shape, SEED, 0.3),
    "gamma-tail": lambda shape, rows: random.stateless_gamma(
        [shape[0], 5], SEED, tf.constant([0.1, 0.5, 2.0, 3.0, 1.0])
    ),
    "gamma-rows": of_rows(lambda s, p: random.stateless_gamma(s, SEED, p)),
    "binomial": lambda shape, rows: random.stateless_binomial(shape, SEED, 40.0, 0.3),
    "binomial-rows": of_rows(lambda s, p: random.stateless_binomial(s, SEED, 40.0, p)),
    "categorical": of_rows(lambda s, p: random.stateless_categorical(p, 3, SEED)),
    "dropout": lambda shape, rows: tf.nn.experimental.stateless_dropout(
        tf.ones(shape), 0.4, SEED
    ),
}


#: ThreeFry has a kernel in XLA only.
ON_CPU = [name for name in DRAWS if name != "threefry"]


def own(name: str, width: tuple[int, ...], rows: OwnRows, part: slice) -> Any:
    with drawing_entries(rows):
        return DRAWS[name]([rows.own, *width], part)


def bits(tensor: Any) -> bytes:
    found: bytes = np.asarray(tensor).tobytes()
    return found


def sliced(start: int, count: int) -> slice:
    return slice(start, start + count)


@pytest.fixture(autouse=True)
def _intercepted() -> None:
    intercept_draws()


@pytest.mark.parametrize("name", ON_CPU)
def test_entries(name: str) -> None:
    for width in WIDTHS[1:] if "rows" in name or name == "categorical" else WIDTHS:
        every = DRAWS[name]([ROWS, *width], slice(0, ROWS)).numpy()
        for start, count in PARTS:
            rows, part = OwnRows(start, count, ROWS), sliced(start, count)
            assert bits(own(name, width, rows, part)) == bits(every[part])


@pytest.mark.parametrize("name", ON_CPU)
@pytest.mark.parametrize("width", [(4,), (7,)])
def test_entries_in_a_graph(name: str, width: tuple[int, ...]) -> None:
    """The rows before are a value of the graph, or all numbers are."""
    every = DRAWS[name]([ROWS, *width], slice(0, ROWS)).numpy()

    @tf.function
    def static(before: Any) -> Any:
        return own(name, width, OwnRows(before, 4, ROWS), sliced(5, 4))

    @tf.function
    def any_rows(before: Any, count: Any, total: Any) -> Any:
        return own(name, width, OwnRows(before, count, total), sliced(0, 0))

    assert bits(static(tf.constant(5, tf.int64))) == bits(every[5:9])
    if "rows" in name or name == "categorical":
        return
    assert bits(static(tf.constant(9, tf.int64))) == bits(every[9:13])
    for start, count in PARTS:
        sizes = (tf.constant(each, tf.int64) for each in (start, count, ROWS))
        assert bits(any_rows(*sizes)) == bits(every[sliced(start, count)])


def test_counter_carries() -> None:
    """A counter that overflows its low word, as of a `tf.random.Generator`."""
    options = {
        "key": tf.constant([3], tf.uint64),
        "counter": tf.constant([2**64 - 2, 5], tf.uint64),
        "alg": 1,
        "dtype": tf.float32,
    }
    every = tf.raw_ops.StatelessRandomUniformV2(shape=[8, 4], **options)
    with drawing_entries(OwnRows(5, 3, 8)):
        draw = operations.DRAWS[0][0].stateless_random_uniform_v2
        found = draw(shape=[3, 4], **options)
    assert bits(found) == bits(every[5:])
