"""Composite tensors, ragged and sparse ones, as arrays in structures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_strategies.parameter_server.engines import parameter_server_engine


@dataclass(frozen=True)
class CompositeSpec:
    """The type of a composite tensor, in front of its components in a tuple.

    Args:
        spec: of the framework; may be pickled.
    """

    spec: Any


def is_composite(value: Any) -> bool:
    """Whether a value is a composite tensor of the backend."""
    return parameter_server_engine().expanded(value) is not None


def expanded(structure: Any, convert: Callable[[Any], Any] = lambda x: x) -> Any:
    """A structure with a tuple of a spec and components for each composite tensor.

    Args:
        structure: of tensors and other values.
        convert: callable of a component.
    """
    engine = parameter_server_engine()

    def expanded_leaf(leaf: Any) -> Any:
        found = engine.expanded(leaf)
        if found is None:
            return leaf
        spec, components = found
        return (CompositeSpec(spec), *map(convert, components))

    return keras.tree.map_structure(expanded_leaf, structure)


def composed(structure: Any) -> Any:
    """A structure with composite tensors for the tuples of `expanded`."""
    engine = parameter_server_engine()

    def composed_node(node: Any) -> Any:
        if isinstance(node, tuple) and node and isinstance(node[0], CompositeSpec):
            return engine.composed(node[0].spec, node[1:])
        return None

    return keras.tree.traverse(composed_node, structure)


def has_expanded(structure: Any) -> bool:
    """Whether a structure has tuples of `expanded`."""
    leaves = keras.tree.flatten(structure)
    return any(isinstance(leaf, CompositeSpec) for leaf in leaves)


def on_host(value: Any) -> np.ndarray:
    """A component as a NumPy array."""
    return np.asarray(keras.ops.convert_to_numpy(value))


def reduced(value: Any) -> tuple[Any, ...] | None:
    """The reduction of a composite tensor for pickle; None for other objects."""
    found = parameter_server_engine().expanded(value)
    if found is None:
        return None
    spec, components = found
    return _composed, (spec, [on_host(each) for each in components])


def _composed(spec: Any, components: list[Any]) -> Any:
    return parameter_server_engine().composed(spec, components)
