"""Per-replica values as composite tensors, as in `tf.distribute`.

`tf.nest` keeps a composite tensor as a leaf. `tf.function`, loops and conditions expand
it to its components.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.programs import make_composite
from keras_strategies.values import DistributedValues, Mirrored, PerReplica


class PerReplicaSpec(tf.TypeSpec):  # type: ignore[misc]
    """The type of a `PerReplica`: a specification of each component.

    Args:
        specs: structures of `tf.TypeSpec`s.
    """

    __slots__ = ("_specs",)
    value_type: type[DistributedValues] = PerReplica

    def __init__(self, *specs: Any):
        self._specs = specs

    def _serialize(self) -> tuple[Any, ...]:
        return self._specs

    @property
    def _component_specs(self) -> tuple[Any, ...]:
        return self._specs

    def _to_components(self, value: DistributedValues) -> tuple[Any, ...]:
        return tuple(tf.nest.map_structure(_tensor, each) for each in value.values)

    def _from_components(self, components: tuple[Any, ...]) -> DistributedValues:
        return self.value_type(components)


class MirroredSpec(PerReplicaSpec):
    """The type of a `Mirrored`."""

    value_type = Mirrored


def _spec(leaf: Any) -> Any:
    """The specification of a leaf; of a specification, as in `element_spec`, itself."""
    return leaf if isinstance(leaf, tf.TypeSpec) else tf.type_spec_from_value(leaf)


def _tensor(leaf: Any) -> Any:
    kept = (tf.Tensor, tf.TypeSpec, tf.__internal__.CompositeTensor, type(None))
    return leaf if isinstance(leaf, kept) else tf.convert_to_tensor(leaf)


def _spec_of(value: DistributedValues) -> PerReplicaSpec:
    kind = MirroredSpec if isinstance(value, Mirrored) else PerReplicaSpec
    return kind(*(tf.nest.map_structure(_spec, each) for each in value.values))


def register() -> None:
    """Makes all `DistributedValues` composite tensors."""
    make_composite(DistributedValues, _spec_of)
