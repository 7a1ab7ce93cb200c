"""Composite values: objects of several arrays, such as sparse ones.

JAX knows them as nodes of its trees (`BCOO`, classes of `register_dataclass`). Programs
have arrays as inputs and outputs, so a composite value enters and leaves a program as a
`CompositeParts`: its arrays, behind the description of the object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies.values import (
    DistributedValues,
    PerReplica,
    map_structure,
    rebuilt_mapping,
    select_replica,
)

_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_LEAVES = (jax.Array, np.ndarray, np.generic, keras.Variable, keras.KerasTensor)
_NOT_COMPOSITE = (*_LEAVES, *_SCALARS, type, DistributedValues)


class CompositeForm:
    """What a composite value is besides its arrays; equal forms are one object.

    Args:
        structures: for each replica, the structure of JAX's tree; a single one for a
            value that is not a `DistributedValues`.
        kind: the class of the `DistributedValues`, or None.
    """

    def __init__(self, structures: tuple[Any, ...], kind: type | None):
        self.structures = structures
        self.kind = kind

    def __str__(self) -> str:
        return " and ".join(dict.fromkeys(map(str, self.structures)))


@functools.lru_cache(maxsize=4096)
def _form(structures: tuple[Any, ...], kind: type | None) -> CompositeForm:
    return CompositeForm(structures, kind)


class CompositeParts(tuple[Any, ...]):
    """A form and the leaves of a composite value; a container for `map_structure`."""


def _is_composite(value: Any) -> bool:
    if isinstance(value, _NOT_COMPOSITE):
        return False
    return not jax.tree_util.all_leaves([value])


def taken_apart(structure: Any) -> Any:
    """A structure with `CompositeParts` in place of its composite values."""
    return map_structure(_parts, structure)


def _parts(value: Any) -> Any:
    if not isinstance(value, DistributedValues):
        if not _is_composite(value):
            return value
        leaves, structure = jax.tree.flatten(value)
        return CompositeParts((_form((structure,), None), *leaves))
    if not any(map(_is_composite, value.values)):
        return value
    kind: Any = type(value)
    columns, structures = zip(*map(jax.tree.flatten, value.values), strict=True)
    if len(set(structures)) == 1:
        leaves = [kind(column) for column in zip(*columns, strict=True)]
        return CompositeParts((_form(structures[:1], None), *leaves))
    leaves = [leaf for column in columns for leaf in column]
    return CompositeParts((_form(structures, kind), *leaves))


def put_together(structure: Any) -> Any:
    """A structure with composite values in place of `CompositeParts`.

    Parts that are the same objects make one composite value: what is identical on all
    replicas stays so.
    """
    return _rebuilt(structure, {})


def _rebuilt(structure: Any, made: dict[Any, Any]) -> Any:
    if isinstance(structure, CompositeParts):
        key = tuple(map(id, structure))
        if key not in made:
            # With the parts, so that their ids stay unique.
            made[key] = (structure, _composite(structure))
        return made[key][1]
    if isinstance(structure, (list, tuple)):
        parts = [_rebuilt(part, made) for part in structure]
        if hasattr(structure, "_fields"):
            return type(structure)(*parts)
        return type(structure)(parts)
    if isinstance(structure, Mapping):
        items = {key: _rebuilt(part, made) for key, part in structure.items()}
        return rebuilt_mapping(structure, items)
    return structure


def _composite(parts: CompositeParts) -> Any:
    form, leaves = parts[0], parts[1:]
    if form.kind is not None:
        columns = iter(leaves)
        return form.kind(
            [
                jax.tree.unflatten(own, [next(columns) for _ in range(own.num_leaves)])
                for own in form.structures
            ]
        )
    structure = form.structures[0]
    distributed = [leaf for leaf in leaves if isinstance(leaf, DistributedValues)]
    if not distributed:
        return jax.tree.unflatten(structure, leaves)
    return PerReplica(
        [
            jax.tree.unflatten(structure, select_replica(i, list(leaves)))
            for i in range(len(distributed[0]))
        ]
    )


def with_composite_values(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes and returns `CompositeParts`, of one of the values."""

    def on_parts(*args: Any, **kwargs: Any) -> Any:
        own_args, own_kwargs = put_together((args, kwargs))
        return taken_apart(fn(*own_args, **own_kwargs))

    return on_parts
