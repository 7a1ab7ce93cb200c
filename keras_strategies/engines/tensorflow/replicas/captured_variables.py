"""Variables with values in several places, as arguments and captures of programs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.variables import (
    ResourceVariable,
    handle_alias,
    handle_specs,
)


class CapturedVariable(ResourceVariable):
    """A variable with values in several places.

    Plain variables of TensorFlow are composite tensors: `tf.nest` and `tf.function`
    decompose them into handles and rebuild them as variables with one value. This class
    is not a composite tensor; programs capture it.
    """

    def value_on(self, device: str) -> Any:
        """The value on a device, without a gradient; None if it has none there.

        Args:
            device: as TensorFlow names it, `/device:KIND:INDEX`.
        """
        raise NotImplementedError

    def __tf_tracing_type__(self, context: Any) -> _Identity:
        return _Identity(self, handle_alias(self, context))


class _Identity(tf.types.experimental.TraceType):  # type: ignore[misc]
    """Trace type of such a variable: a trace is for this variable only."""

    def __init__(self, variable: CapturedVariable, alias: Any):
        self._variable = weakref.ref(variable)
        self._id = id(variable)
        # Equal for all arguments of a call that are the same variable.
        self._alias = alias

    def is_subtype_of(self, other: Any) -> bool:
        return self == other

    def most_specific_common_supertype(self, others: Sequence[Any]) -> _Identity | None:
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        variable = self._variable()
        assert variable is not None
        if not placeholder_context.unnest_only:
            # TensorFlow expects the handle of an argument among the captures.
            placeholder_context.context_graph.capture(variable.handle)
        return variable

    def to_tensors(self, value: Any) -> list[Any]:
        return [value.handle]

    def flatten(self) -> list[Any]:
        return handle_specs(self._alias)

    def cast(self, value: Any, cast_context: Any) -> Any:
        return value

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Identity)
            and self._variable() is other._variable()
            and self._alias == other._alias
        )
