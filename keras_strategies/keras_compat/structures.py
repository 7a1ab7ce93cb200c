"""Leaves of structures, without what `keras.tree` takes for the usual ones.

On Torch `keras.tree.flatten` makes a hundred calls for a pair of tensors, and closures
that refer to themselves and to the tensors, which stay in memory until Python's garbage
collector runs. Structures that are not known here are left to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

_LEAVES = frozenset(
    [type(None), bool, int, float, complex, str, bytes, np.ndarray, slice]
)


def leaves_of(structure: Any) -> list[Any]:
    """The leaves of a structure, as `keras.tree.flatten`.

    Args:
        structure: a nested structure of lists, tuples, dicts and others that
            `keras.tree` knows; None is a leaf.

    Returns:
        list of the leaves, those of a dict in the order of its keys.
    """
    found: list[Any] = []
    if _add_leaves(structure, found):
        return found
    flat: list[Any] = keras.tree.flatten(structure)
    return flat


def with_leaves(structure: Any, leaves: Sequence[Any]) -> Any:
    """A structure with other leaves, as `keras.tree.pack_sequence_as`.

    Args:
        structure: see `leaves_of`.
        leaves: as many leaves as it has, in the order of `leaves_of`.
    """
    kind = type(structure)
    if len(leaves) == 1 and _is_leaf(structure):
        return leaves[0]
    if (
        kind in (tuple, list)
        and len(structure) == len(leaves)
        and all(map(_is_leaf, structure))
    ):
        return kind(leaves)
    return keras.tree.pack_sequence_as(structure, leaves)


def _is_leaf(value: Any) -> bool:
    if type(value) in _LEAVES or isinstance(value, keras.KerasTensor):
        return True
    return bool(keras.ops.is_tensor(value))


def _add_leaves(structure: Any, found: list[Any]) -> bool:
    """Adds the leaves to `found`; False for a structure that is not known here."""
    kind = type(structure)
    if kind is tuple or kind is list:
        return all(_add_leaves(each, found) for each in structure)
    if kind is dict:
        # Backends differ in the order of dicts in dicts.
        if not all(type(key) is str for key in structure):
            return False
        values = [structure[key] for key in sorted(structure)]
        found += values
        return all(map(_is_leaf, values))
    found.append(structure)
    return _is_leaf(structure)
