"""Arguments of compiled functions: which are arrays, and what makes two calls alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies.engines.jax.function.program_keys import static_key
from keras_strategies.values import DistributedValues, flatten, map_structure

_SCALARS = (int, float, complex, bool, str, bytes, type(None))


def is_array(value: Any) -> bool:
    """Whether a value is data: JAX's, NumPy's, or another framework's tensor."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return True
    if isinstance(value, (type, keras.Variable, keras.KerasTensor, *_SCALARS)):
        return False
    return hasattr(value, "__array__")


def as_array(value: Any) -> Any:
    """JAX's and NumPy's arrays as they are, others as NumPy's."""
    return value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)


def array_key(array: Any) -> Any:
    weak = getattr(getattr(array, "aval", None), "weak_type", False)
    return (tuple(array.shape), array.dtype, weak)


def structure_key(structure: Any) -> Any:
    """Equal for structures of the same containers; their leaves do not matter."""
    if isinstance(structure, Mapping):
        items = tuple((k, structure_key(v)) for k, v in structure.items())
        return (type(structure), items)
    if isinstance(structure, (list, tuple)):
        return (type(structure), tuple(map(structure_key, structure)))
    return None


class Packed:
    """A call's arguments, with the arrays taken out.

    Args:
        structure: arguments; leaves may be `PerReplica`.
        total: int, how many replicas there are where components of one shape are
            those of the local ones; None where they are all.
    """

    def __init__(self, structure: Any, total: int | None = None):
        self._total = total
        self.plain: list[Any] = []
        self.parts: list[Sequence[Any]] = []
        self._structure = structure
        self._slots: list[tuple[Any, ...]] = []
        keys: list[Any] = [structure_key(structure)]
        for leaf in flatten(structure):
            slot, key = self._take(leaf)
            self._slots.append(slot)
            keys.append(key)
        self.key = tuple(keys)

    def _take(self, leaf: Any) -> tuple[tuple[Any, ...], Any]:
        if is_array(leaf):
            array = as_array(leaf)
            self.plain.append(array)
            return ("plain", len(self.plain) - 1), ("plain", array_key(array))
        if not isinstance(leaf, DistributedValues):
            return ("static", leaf), ("static", static_key(leaf))
        if not all(map(is_array, leaf.values)):
            return ("static", leaf), ("parts", *map(static_key, leaf.values))
        parts = [as_array(value) for value in leaf.values]
        key = (type(leaf), *map(array_key, parts))
        if len({(part.shape, part.dtype) for part in parts}) == 1:
            self.parts.append(parts)
            stacked = len(parts[0].shape) == 0 or parts[0].shape[0] == 0
            count = self._total or len(parts)
            return ("parts", len(self.parts) - 1, count, stacked, type(leaf)), key
        start = len(self.plain)
        self.plain.extend(parts)
        return ("uneven", start, len(parts), type(leaf)), key

    def build(self, plain: Sequence[Any], joined: Sequence[Any], split: Any) -> Any:
        """The arguments, with these arrays.

        Args:
            plain: arrays for those of `self.plain`.
            joined: one array for each of `self.parts`.
            split: callable of such an array, the number of its parts and whether
                they are stacked; returns the parts.
        """
        slots = iter(self._slots)

        def leaf(_: Any) -> Any:
            kind, *rest = next(slots)
            if kind == "static":
                return rest[0]
            if kind == "plain":
                return plain[rest[0]]
            if kind == "parts":
                index, count, stacked, kept_type = rest
                return kept_type(split(joined[index], count, stacked))
            start, count, kept_type = rest
            return kept_type(plain[start : start + count])

        return map_structure(leaf, self._structure)

    def without_arrays(self) -> Packed:
        """The same, to keep: it does not hold on to the arrays."""
        self._structure = map_structure(lambda _: None, self._structure)
        self.plain, self.parts = [], []
        return self


class Columns:
    """The arguments of all replicas, leaf by leaf.

    Args:
        rows: for each replica, its arguments and keyword arguments.
    """

    def __init__(self, rows: list[tuple[Any, Any]]):
        self.rows = rows
        self.even = True
        self.whole: list[Any] = []
        self.parts: list[Sequence[Any]] = []
        self._slots: list[tuple[str, Any]] = []
        keys: list[Any] = [structure_key(rows[0])]
        leaves = [flatten(row) for row in rows]
        if len({structure_key(row) for row in rows}) > 1:
            self.even = False
            keys += [structure_key(row) for row in rows]
        else:
            keys += [self._take(column) for column in zip(*leaves, strict=True)]
        self.signature = tuple(keys)

    @classmethod
    def of(cls, args: list[Any], kwargs: list[Any]) -> Columns:
        return cls(list(zip(args, kwargs, strict=True)))

    def _take(self, column: Sequence[Any]) -> Any:
        first = column[0]
        if all(leaf is first for leaf in column):
            if not is_array(first):
                self._slots.append(("static", first))
                return static_key(first)
            self._slots.append(("whole", len(self.whole)))
            self.whole.append(as_array(first))
            return array_key(self.whole[-1])
        numbers = (int, float)
        if not all(is_array(leaf) or isinstance(leaf, numbers) for leaf in column):
            keys = [static_key(leaf) for leaf in column]
            self.even = self.even and len(set(keys)) == 1
            self._slots.append(("static", first))
            return tuple(keys)
        parts = [number_or_array(leaf) for leaf in column]
        self.even = self.even and len({(p.shape, p.dtype) for p in parts}) == 1
        self._slots.append(("parts", len(self.parts)))
        self.parts.append(parts)
        return tuple(map(array_key, parts))

    def build(
        self, whole: Sequence[Any], parts: Sequence[Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments of the replica that has these arrays."""
        slots = iter(self._slots)

        def leaf(_: Any) -> Any:
            kind, value = next(slots)
            if kind == "static":
                return value
            if kind == "whole":
                return whole[value]
            part = parts[value]
            stacked = len(self.parts[value][0].shape) == 0 or (
                self.parts[value][0].shape[0] == 0
            )
            return part[0] if stacked else part

        return map_structure(leaf, self.rows[0])


def number_or_array(leaf: Any) -> Any:
    if is_array(leaf):
        return as_array(leaf)
    return np.asarray(leaf, np.int32 if isinstance(leaf, int) else np.float32)
