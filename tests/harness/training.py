"""Whether a strategy trains a case as a single device does."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

from harness import references
from harness.case import (
    ADAM_TOLERANCE,
    SGD_TOLERANCE,
    Case,
    Results,
    as_arrays,
    compiled,
    fit_evaluate_predict,
    state_of,
    train,
    without_phantom_step,
)

__all__ = [
    "ADAM_TOLERANCE",
    "SGD_TOLERANCE",
    "Case",
    "Results",
    "alone",
    "as_arrays",
    "assert_arrays",
    "assert_same",
    "assert_same_training",
    "assert_workers",
    "compiled",
    "differences",
    "fit_evaluate_predict",
    "numbers",
    "state_of",
    "train",
]

# Differences are relative to the largest magnitude of a tensor. Where all of it is
# nearly zero (a bias after the first steps) rounding is that of the gradients behind
# it, which are of the order of one, so nothing is held against less than this.
_SMALLEST_SCALE = 1e-2


def alone(case: Case) -> Results:
    """What the case gives on one device, by Keras without this library."""
    return references.load(case)


def assert_same_training(case: Case, strategy: Any) -> None:
    """Fails if a strategy does not give what one device gives."""
    if keras.backend.backend() in case.refused_by:
        # What Keras refuses on one device, it refuses under a strategy.
        for under in (None, strategy):
            with pytest.raises(case.refused_by[keras.backend.backend()]):
                train(case, under)
        return
    found = train(case, strategy)
    if strategy.placement.is_single:
        # One device runs Keras's own program, so it has this too.
        found = without_phantom_step(case, found)
    assert_same(alone(case), found, case.tolerance, f"{strategy!r}")


def assert_same(expected: Results, found: Results, tolerance: float, who: str) -> None:
    """Compares two structures of arrays, and lists what differs by how much."""
    problems = list(differences(expected, found, tolerance))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise AssertionError(
            f"{who} differs from one device by more than {tolerance:g} of the largest "
            f"magnitude, in {len(problems)} places:\n{lines}"
        )


def assert_arrays(
    found: Iterable[Any], expected: Iterable[Any], rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Fails if arrays differ from other ones, one by one."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol, atol)


def assert_workers(
    expected: Results, every: list[Any], tolerance: float = 1e-5
) -> None:
    """Fails where a worker has other results than one device."""
    for index, found in enumerate(every):
        assert_same(expected, found, tolerance, f"worker {index}")


def numbers(model: keras.Model, history: Any = None, *others: Any) -> Results:
    """Logs, weights and other values after a training, for `assert_same`."""
    logs = {} if history is None else history.history
    return {
        "history": {name: np.asarray(values) for name, values in logs.items()},
        "weights": {
            i: np.asarray(value) for i, value in enumerate(model.get_weights())
        },
        "others": {i: np.asarray(value) for i, value in enumerate(others)},
    }


def differences(
    expected: Any, found: Any, tolerance: float, path: str = ""
) -> Iterator[str]:
    if isinstance(expected, dict):
        if not isinstance(found, dict) or _keys(expected) != _keys(found):
            yield f"{path or 'results'}: {_names(expected)}, found {_names(found)}"
            return
        pairs = zip(expected.items(), found.values(), strict=True)
        for (key, value), other in pairs:
            yield from differences(value, other, tolerance, f"{path}[{key!r}]")
        return
    if expected.shape != found.shape:
        yield f"{path}: shape {expected.shape}, found {found.shape}"
        return
    if expected.size == 0:
        return
    a, b = expected.astype("float64"), found.astype("float64")
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        yield f"{path}: {_few(expected)}, found {_few(found)}"
        return
    finite = np.isfinite(a)
    if not finite.any():
        return
    scale = max(float(np.abs(a[finite]).max()), _SMALLEST_SCALE)
    gap = float(np.abs(a[finite] - b[finite]).max())
    if gap > tolerance * scale:
        yield (
            f"{path} {list(expected.shape)}: largest difference {gap:.3g}, which is "
            f"{gap / scale:.2g} of {scale:.3g}; {_few(expected)}, found {_few(found)}"
        )


def _keys(structure: dict[Any, Any]) -> list[Any]:
    # Names of layers and metrics count up within a process: dense_3, auc_1.
    return [
        re.sub(r"_\d+", "", key) if isinstance(key, str) else key for key in structure
    ]


def _names(structure: Any) -> str:
    return str(list(structure)) if isinstance(structure, dict) else "an array"


def _few(array: np.ndarray) -> str:
    flat = [f"{float(value):.8g}" for value in array.reshape(-1)[:4]]
    return "[" + ", ".join(flat) + (", ..." if array.size > 4 else "") + "]"


@contextlib.contextmanager
def uncompared_rows() -> Iterator[None]:
    """A context in which no rows of arrays are read to compare the data.

    By workers, and by `Resume` with those of its snapshot.
    """
    package = "keras_strategies.training"
    workers = f"{package}.worker_training.sampled_checksums"
    resume = f"{package}.resume.described_data._pieces"
    with (
        mock.patch(workers, lambda structure, name: {}),
        mock.patch(resume, lambda array: [np.zeros(1)]),
    ):
        yield
