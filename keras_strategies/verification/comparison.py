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
    pairs = {
        key: (value, found.values[key])
        for key, value in alone.values.items()
        if key in found.values and found.values[key].shape == value.shape
    }
    # NumPy is called once for all small arrays: a call takes longer than they do.
    sizes, moves = _largest(alone.values), _largest(own)
    apart = _largest(
        {
            key: own[key] - other_own[key] if key in own else _float(a) - _float(b)
            for key, (a, b) in pairs.items()
        }
    )
    moves = {key: size if math.isfinite(size) else 0.0 for key, size in moves.items()}
    updates = [moves[key] for key in alone.trained if key in moves]
    least_update = _OF_OTHERS * max(updates, default=0.0)
    scales = _group_scales(alone, sizes)
    gap: dict[Key, float] = {}
    for key in sorted(alone.values, key=lambda each: KINDS.index(each[0])):
        if key not in pairs:
            gap[key] = float("inf")
        elif key in own and math.isfinite(apart[key]):
            moved, size = moves[key], sizes[key]
            rounding = precision.rounding * step * max(size, moved)
            least = max(moved, 1e-6 * size, 1e-30)
            if key in alone.trained:
                least = max(least, least_update)
            gap[key] = max(0.0, apart[key] - rounding) / least
        else:
            least = 0.0 if key in own else scales.get(_group(alone, key), 0.0)
            gap[key] = _relative(*pairs[key], sizes[key], apart[key], least)
    return gap


@np.errstate(invalid="ignore")
def relative_gap(one: np.ndarray, other: np.ndarray, least_scale: float) -> float:
    """The largest difference of two arrays, relative to the largest value of one."""
    if one.shape != other.shape:
        return float("inf")
    size, apart = _size(one), _size(_float(one) - _float(other))
    return _relative(one, other, size, apart, least_scale)


def _relative(
    one: np.ndarray, other: np.ndarray, size: float, apart: float, least: float
) -> float:
    """Of two arrays with the size of one, and of their difference."""
    if not np.issubdtype(one.dtype, np.floating):
        return 0.0 if np.array_equal(one, other) else float("inf")
    if not math.isfinite(size):
        finite = np.isfinite(one)
        if not np.array_equal(finite, np.isfinite(other)):
            return float("inf")
        return relative_gap(np.where(finite, one, 0), np.where(finite, other, 0), least)
    return apart / max(size, least, 1e-12)


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


def _largest(arrays: dict[Key, np.ndarray]) -> dict[Key, float]:
    """The largest magnitude of each array; infinite if a value is not finite."""
    found = dict.fromkeys(arrays, 0.0)
    groups: dict[str, dict[Key, np.ndarray]] = {}
    for key, array in arrays.items():
        if array.size:
            flat = _float(array).reshape(-1)
            groups.setdefault(flat.dtype.char, {})[key] = flat
    for group in groups.values():
        flat = np.concatenate(list(group.values()))
        starts = np.cumsum([0, *map(len, group.values())])[:-1]
        above, below = (f.reduceat(flat, starts) for f in (np.maximum, np.minimum))
        sizes = np.maximum(above, -below)
        sizes[~np.isfinite(sizes)] = np.inf
        found.update(zip(group, sizes.tolist(), strict=True))
    return found


def _size(array: np.ndarray) -> float:
    """The largest magnitude of one array."""
    key = "", 0
    return _largest({key: array})[key]


def _float(array: np.ndarray) -> np.ndarray:
    """In a dtype in which differences of rounded values are exact."""
    return array if array.dtype.char in "fd" else array.astype("float64")


def _group(observed: Observed, key: Key) -> str:
    kind, name = key[0], observed.names[key]
    return f"{kind} {name.rpartition('_')[2]}" if kind == "slot" else kind


def _group_scales(observed: Observed, sizes: dict[Key, float]) -> dict[str, float]:
    """Of the finite values of all gradients, and of slots of a name."""
    found: dict[str, float] = {}
    for key, value in observed.values.items():
        if key[0] in ("gradient", "slot") and np.issubdtype(value.dtype, np.floating):
            size, group = sizes[key], _group(observed, key)
            if not math.isfinite(size):
                size = _size(np.where(np.isfinite(value), value, 0))
            found[group] = max(found.get(group, 0.0), _OF_OTHERS * size)
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


def dtype_policies(model: Any) -> dict[str, str]:
    """The dtype policy of each layer."""
    return {
        f"{i} {layer.name}": layer.dtype_policy.name
        for i, layer in enumerate(sublayers(model))
    }
