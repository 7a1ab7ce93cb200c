"""Differences of values: each is relative to its own size, beside any others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keras_strategies.verification.comparison import Precision, gaps
from keras_strategies.verification.trainings import Key, Observed

pytestmark = pytest.mark.one_backend

PRECISION = Precision(tolerance=2e-5, disturbance=1e-7, rounding=0.0)
NAN, INFINITE = float("nan"), float("inf")
#: One device, found, the difference.
PAIRS: dict[str, tuple[Any, Any, float]] = {
    "equal": ([1.0, -4.0], [1.0, -4.0], 0.0),
    "negative is largest": ([1.0, -4.0], [2.0, -4.0], 0.25),
    "empty": ([], [], 0.0),
    "large": ([1e6], [1e6 + 1e5], 0.1),
    "scalar": (2.0, 3.0, 0.5),
    "other shape": ([1.0], [[1.0]], INFINITE),
    "not finite on both": ([NAN, 2.0], [NAN, 3.0], 0.5),
    "not finite on one": ([1.0, 2.0], [1.0, NAN], INFINITE),
    "not finite on the other": ([INFINITE, 2.0], [1.0, 2.0], INFINITE),
    "small": ([1e-6], [1.5e-6], 0.5),
}


def observed(values: dict[str, Any], kind: str, dtype: str) -> Observed:
    found = Observed()
    for name, value in values.items():
        found.add(kind, name, np.asarray(value, dtype))
    return found


def keyed(kind: str) -> dict[Key, Any]:
    return {(kind, i): pytest.approx(pair[2]) for i, pair in enumerate(PAIRS.values())}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_output_is_relative_to_its_largest_value(dtype: str) -> None:
    one, other = (
        observed({name: pair[i] for name, pair in PAIRS.items()}, "output", dtype)
        for i in range(2)
    )
    assert gaps(one, other, PRECISION) == keyed("output")
    del other.values["output", 0]
    assert gaps(one, other, PRECISION)["output", 0] == INFINITE


def test_a_variable_is_relative_to_how_far_it_has_moved() -> None:
    start = observed({"a": [10.0, 10.0], "b": [1.0]}, "variable", "float64")
    one = observed({"a": [10.0, 12.0], "b": [1.5]}, "variable", "float64")
    other = observed({"a": [10.5, 12.0], "b": [1.5]}, "variable", "float64")
    found = gaps(one, other, PRECISION, start)
    assert found == {("variable", 0): pytest.approx(0.25), ("variable", 1): 0.0}


def test_whole_numbers_are_equal_or_not() -> None:
    one, other = (
        observed({"a": [1, 2], "b": [1, each]}, "metric state", "int32")
        for each in (2, 3)
    )
    assert list(gaps(one, other, PRECISION).values()) == [0.0, INFINITE]
