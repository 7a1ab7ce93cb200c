"""Arguments of compiled functions: their arrays, and the key of a program for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from keras_strategies.engines.jax.function.argument_keys import SCALARS, static_key
from keras_strategies.engines.jax.padded_rows import with_zeros
from keras_strategies.values import (
    DistributedValues,
    PerReplica,
    flatten,
    map_structure,
)

if TYPE_CHECKING:
    from keras_strategies.engines.jax.function.trace_state import ProgramState


def is_array(value: Any) -> bool:
    """Whether a value is a tensor of JAX, NumPy or another framework."""
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        return True
    if isinstance(value, (type, keras.Variable, keras.KerasTensor, *SCALARS)):
        return False
    return hasattr(value, "__array__")


def as_array(value: Any) -> Any:
    """A JAX or NumPy array unchanged; another tensor as a NumPy array."""
    return value if isinstance(value, (jax.Array, np.ndarray)) else np.asarray(value)


def array_key(array: Any) -> Any:
    weak = getattr(getattr(array, "aval", None), "weak_type", False)
    return (tuple(array.shape), array.dtype, weak)


def structure_key(structure: Any) -> Any:
    """A key of a structure's containers, without its leaves."""
    if isinstance(structure, (list, tuple)):
        return (type(structure), tuple(map(structure_key, structure)))
    if isinstance(structure, Mapping):
        items = tuple((k, structure_key(v)) for k, v in structure.items())
        return (type(structure), items)
    return None


# A leaf of arguments, of the arrays that `CallArguments.build` gets.
_LeafMaker = Callable[[Sequence[Any], Sequence[Any], "ProgramState"], Any]


class UnevenValues(PerReplica):
    """Components of the local replicas, with other numbers of rows than on others.

    Args:
        values: the components.
        rows: the number of rows of the component of each replica, of all workers.
    """

    def __init__(self, values: Sequence[Any], rows: Sequence[int]):
        super().__init__(values)
        self.rows = tuple(rows)


class CallArguments:
    """A call's arguments as inputs of a program: arrays, and a key of the rest.

    Args:
        structure: arguments; leaves may be `PerReplica`.
        total: int, the number of all replicas where `PerReplica` leaves have the local
            components only; None where they have all.
    """

    def __init__(self, structure: Any, total: int | None = None):
        self._total = total
        self.plain: list[Any] = []
        self.parts: list[Sequence[Any]] = []
        self._structure = structure
        self._makers: list[_LeafMaker] = []
        keys: list[Any] = [structure_key(structure)]
        keys += map(self._take, flatten(structure))
        self.key = tuple(keys)

    def _take(self, leaf: Any) -> Any:
        """Adds a leaf; returns its key."""
        if is_array(leaf):
            array = as_array(leaf)
            index = len(self.plain)
            self.plain.append(array)
            self._makers.append(lambda plain, *_: plain[index])
            return ("plain", array_key(array))
        if not isinstance(leaf, DistributedValues):
            self._makers.append(lambda *_: leaf)
            return ("static", static_key(leaf))
        if not all(map(is_array, leaf.values)):
            self._makers.append(lambda *_: leaf)
            return ("parts", *map(static_key, leaf.values))
        parts = [as_array(value) for value in leaf.values]
        key = (type(leaf), *map(array_key, parts))
        if isinstance(leaf, UnevenValues):
            self._take_padded(parts, leaf.rows, PerReplica)
            return (*key, leaf.rows)
        if len({(part.shape, part.dtype) for part in parts}) == 1:
            stacked = len(parts[0].shape) == 0 or parts[0].shape[0] == 0
            self._take_parts(parts, stacked, type(leaf))
        elif self._total is None and differ_in_rows(parts):
            rows = tuple(part.shape[0] for part in parts)
            self._take_padded(parts, rows, type(leaf))
        else:
            own = slice(len(self.plain), len(self.plain) + len(parts))
            self.plain.extend(parts)
            self._makers.append(lambda plain, *_: type(leaf)(plain[own]))
        return key

    def _take_parts(
        self, parts: list[Any], stacked: bool, kind: type[DistributedValues]
    ) -> None:
        index, count = len(self.parts), self._total or len(parts)
        self.parts.append(parts)
        self._makers.append(
            lambda _, joined, program: kind(
                program.split(joined[index], count, stacked)
            )
        )

    def _take_padded(
        self, parts: list[Any], rows: Sequence[int], kind: type[DistributedValues]
    ) -> None:
        index, most = len(self.parts), max(rows)
        # Zeros after the rows of each component, where it is.
        self.parts.append([with_zeros(p, most - p.shape[0]) for p in parts])
        self._makers.append(
            lambda _, joined, program: kind(program.split_padded(joined[index], rows))
        )

    def build(
        self, plain: Sequence[Any], joined: Sequence[Any], program: ProgramState
    ) -> Any:
        """The arguments with other arrays, such as tracers.

        Args:
            plain: arrays in place of `self.plain`.
            joined: arrays in place of `self.parts`, one for all components.
            program: splits joined arrays into their components.
        """
        makers = iter(self._makers)
        return map_structure(
            lambda _: next(makers)(plain, joined, program), self._structure
        )


def differ_in_rows(parts: Sequence[Any]) -> bool:
    """Whether arrays are equal in dtype and shape, but for the lengths of axis 0."""
    kinds = {(part.dtype, part.ndim, part.shape[1:]) for part in parts}
    return len(kinds) == 1 and parts[0].ndim > 0


class ReplicaArguments:
    """The arguments of all replicas, leaf by leaf.

    Args:
        calls: for each replica, its arguments and keyword arguments.

    Attributes:
        is_uniform: bool, whether one trace fits all replicas: equal structures,
            shapes, dtypes and constants.
        difference: str, in what they differ but for the lengths of axis 0; "" for
            nothing.
        shared: arrays that are one object on all replicas.
        parts: for each other array, the replicas' components.
        signature: a key of structures, shapes, dtypes and constants.
    """

    def __init__(self, calls: Sequence[tuple[Any, Any]]):
        self.calls = calls
        self.is_uniform = True
        self.difference = ""
        self.shared: list[Any] = []
        self.parts: list[Sequence[Any]] = []
        # Each makes a leaf of shared arrays and of components.
        self._makers: list[Callable[[Sequence[Any], Sequence[Any]], Any]] = []
        keys: list[Any] = [structure_key(calls[0])]
        leaves = [flatten(call) for call in calls]
        if len({structure_key(call) for call in calls}) > 1:
            self.is_uniform, self.difference = False, "their structures"
            keys += [structure_key(call) for call in calls]
        else:
            keys += [self._take(column) for column in zip(*leaves, strict=True)]
        self.signature = tuple(keys)

    def _take(self, column: Sequence[Any]) -> Any:
        first = column[0]
        if all(leaf is first for leaf in column):
            if not is_array(first):
                self._makers.append(lambda *_: first)
                return static_key(first)
            index = len(self.shared)
            self._makers.append(lambda shared, _: shared[index])
            self.shared.append(as_array(first))
            return array_key(self.shared[-1])
        numbers = (int, float)
        if not all(is_array(leaf) or isinstance(leaf, numbers) for leaf in column):
            keys = [static_key(leaf) for leaf in column]
            if len(set(keys)) > 1:
                self.is_uniform = False
                self.difference = f"the values {', '.join(map(repr, column))}"
            self._makers.append(lambda *_: first)
            return tuple(keys)
        parts = [number_or_array(leaf) for leaf in column]
        self.is_uniform = (
            self.is_uniform and len({(p.shape, p.dtype) for p in parts}) == 1
        )
        if len({(p.shape[1:], len(p.shape), p.dtype) for p in parts}) > 1:
            kinds = (f"{p.dtype}{list(p.shape)}" for p in parts)
            self.difference = f"the arrays {', '.join(kinds)}"
        index = len(self.parts)
        self._makers.append(lambda _, parts: parts[index])
        self.parts.append(parts)
        return tuple(map(array_key, parts))

    def build(
        self, shared: Sequence[Any], parts: Sequence[Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments of a replica with these arrays."""
        makers = iter(self._makers)
        return map_structure(lambda _: next(makers)(shared, parts), self.calls[0])


def number_or_array(leaf: Any) -> Any:
    if is_array(leaf):
        return as_array(leaf)
    return np.asarray(leaf, np.int32 if isinstance(leaf, int) else np.float32)
