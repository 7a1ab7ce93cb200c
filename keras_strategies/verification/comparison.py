"""Differences between values of two trainings, relative to their size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.verification.trainings import KINDS, Key, Observed

#: By the dtype that is computed in: what is relative to the largest value of a tensor
#: and counts as equal, and by how much weights are disturbed to see the noise.
_PRECISIONS = {
    "float64": (1e-9, 1e-15),
    "float32": (2e-5, 1e-7),
    "float16": (1e-2, 5e-4),
    "bfloat16": (3e-2, 4e-3),
}
#: A difference is no noise if it is more than this many times that of one device.
NOISE_FACTOR = 10.0
#: Of the largest of all gradients, slots of a name, or updates of variables: what each
#: is relative to at least. Times the tolerance this is 4e-7, above the last digit of
#: the largest; what is zero but for rounding, as a key's bias, is no smaller than that.
_OF_OTHERS = 2e-2
#: Rounding of a variable that is updated once, relative to its largest value.
_ROUNDING = {"float16": 2e-3, "bfloat16": 2e-2}
_FLOAT_ROUNDING = 4e-7


@dataclass(frozen=True)
class Precision:
    """What counts as equal.

    Args:
        tolerance: float, relative to the largest value of a tensor.
        disturbance: float, relative to each weight, for the noise of one device.
        rounding: float, of an update of a variable.
    """

    tolerance: float
    disturbance: float
    rounding: float

    @classmethod
    def of(cls, model: Any, tolerance: float | None) -> Precision:
        """That of the least precise layer of a model."""
        policies = [layer.dtype_policy for layer in sublayers(model)]
        computes = {each.compute_dtype or "float32" for each in policies}
        variables = {each.variable_dtype or "float32" for each in policies}
        found = [_PRECISIONS.get(name, _PRECISIONS["float32"]) for name in computes]
        default, disturbance = max(found)
        rounding = max(_ROUNDING.get(name, _FLOAT_ROUNDING) for name in variables)
        chosen = default if tolerance is None else tolerance
        return cls(chosen, disturbance, rounding)


@np.errstate(invalid="ignore")
def gaps(
    alone: Observed,
    found: Observed,
    precision: Precision,
    start: Observed | None = None,
    step: int = 1,
    other_start: Observed | None = None,
) -> dict[Key, float]:
    """The largest difference of each value, relative to its largest magnitude.

    Variables are compared by how far training has moved them.

    Args:
        alone: the values on one device.
        found: those under the strategy.
        precision: what is rounding.
        start: the values before training.
        step: int, how many updates the variables have had.
        other_start: the values before the other training, if it began with others.

    Returns:
        dict in the order of computation; infinite for other shapes, values that are
        missing, and values that are not finite on one side only.
    """
    own, other_own = _changes(alone, start), _changes(found, other_start or start)
    moves = {key: _size(_finite(change)) for key, change in own.items()}
    updates = [moves[key] for key in alone.trained if key in moves]
    least_update = _OF_OTHERS * max(updates, default=0.0)
    scales = _group_scales(alone)
    gap: dict[Key, float] = {}
    for key in sorted(alone.values, key=lambda each: KINDS.index(each[0])):
        one, other = alone.values[key], found.values.get(key)
        if other is None or other.shape != one.shape:
            gap[key] = float("inf")
            continue
        apart = _size(own[key] - other_own[key]) if key in own else math.inf
        if math.isfinite(apart):
            moved, size = moves[key], _size(one)
            rounding = precision.rounding * step * max(size, moved)
            least = max(moved, 1e-6 * size, 1e-30)
            if key in alone.trained:
                least = max(least, least_update)
            gap[key] = max(0.0, apart - rounding) / least
        else:
            least = 0.0 if key in own else scales.get(_group(alone, key), 0.0)
            gap[key] = relative_gap(one, other, least)
    return gap


@np.errstate(invalid="ignore")
def relative_gap(one: np.ndarray, other: np.ndarray, least_scale: float) -> float:
    """The largest difference of two arrays, relative to the largest value of one."""
    if one.shape != other.shape:
        return float("inf")
    if not np.issubdtype(one.dtype, np.floating):
        return 0.0 if np.array_equal(one, other) else float("inf")
    if not np.array_equal(np.isfinite(one), np.isfinite(other)):
        return float("inf")
    one, other = _finite(_float(one)), _finite(_float(other))
    return _size(one - other) / max(_size(one), least_scale, 1e-12)


def _changes(found: Observed, start: Observed | None) -> dict[Key, np.ndarray]:
    """How far variables are from where they began, for those of the same shape."""
    changes: dict[Key, np.ndarray] = {}
    if start is None:
        return changes
    for key, before in start.values.items():
        after = found.values.get(key)
        if key[0] == "variable" and after is not None and after.shape == before.shape:
            changes[key] = _float(after) - _float(before)
    return changes


def _size(array: np.ndarray) -> float:
    """The largest magnitude of an array; infinite if a value is not finite."""
    largest = float(np.abs(_float(array)).max(initial=0.0))
    return largest if math.isfinite(largest) else math.inf


def _finite(array: np.ndarray) -> np.ndarray:
    """An array with zeros in place of values that are not finite."""
    return np.where(np.isfinite(array), array, 0)


def _float(array: np.ndarray) -> np.ndarray:
    """In a dtype in which differences of rounded values are exact."""
    return array if array.dtype.char in "fd" else array.astype("float64")


def _group(observed: Observed, key: Key) -> str:
    kind, name = key[0], observed.names[key]
    return f"{kind} {name.rpartition('_')[2]}" if kind == "slot" else kind


def _group_scales(observed: Observed) -> dict[str, float]:
    """Of the finite values of all gradients, and of slots of a name."""
    found: dict[str, float] = {}
    for key, value in observed.values.items():
        if key[0] in ("gradient", "slot") and np.issubdtype(value.dtype, np.floating):
            group = _group(observed, key)
            size = _OF_OTHERS * _size(_finite(value))
            found[group] = max(found.get(group, 0.0), size)
    return found


def differing(
    found: dict[Key, float], noise: dict[Key, float], tolerance: float
) -> Iterator[Key]:
    """The keys of differences that are more than noise, in the order of computation."""
    for key, gap in found.items():
        if gap > max(tolerance, NOISE_FACTOR * noise.get(key, 0.0)):
            yield key


def disturbed(state: Observed, by: float, seed: int = 0) -> Observed:
    """A state with weights that are changed in their last digits.

    Zeros are changed as well, relative to the largest value of their tensor, or to one:
    they may lie at the kink of an activation, and what they are added to is rounded.
    Noise at a kink does not grow with the disturbance, so `NOISE_FACTOR` is in theirs.
    Each seed has other signs.
    """
    generator = np.random.default_rng(seed)
    of_zeros = NOISE_FACTOR * min(by, _PRECISIONS["float32"][1])

    def changed(value: np.ndarray) -> np.ndarray:
        largest = np.abs(value).max(initial=0.0) or 1.0
        sizes = np.where(value == 0, of_zeros * largest, by * np.abs(value))
        signs = generator.choice([-1, 1], value.shape)
        return (value + sizes * signs).astype(value.dtype)

    values = {
        key: changed(value)
        if key[0] == "variable" and np.issubdtype(value.dtype, np.floating)
        else value
        for key, value in state.values.items()
    }
    return Observed(values, state.names, state.dtypes)


def few(array: np.ndarray) -> str:
    """The first values of an array."""
    flat = [f"{float(value):.6g}" for value in np.asarray(array).reshape(-1)[:3]]
    text = ", ".join(flat) + (", ..." if array.size > 3 else "")
    return text if array.ndim == 0 else f"[{text}]"
