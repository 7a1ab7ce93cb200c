"""What a recorder notes of a layer call: its operations and values."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from keras_strategies.engines.torch.compat import schema_arguments
from keras_strategies.engines.torch.row_proofs.rules.registry import has_rule
from keras_strategies.engines.torch.row_proofs.value_placements import Shape

_COPIES = frozenset(("alias", "clone", "contiguous", "detach", "lift", "lift_fresh"))
_READING_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclass(frozen=True, slots=True)
class Version:
    """A value among the arguments of a recorded operation."""

    number: int


@dataclass(slots=True)
class RecordedStep:
    """An operation as it ran.

    Args:
        operation: an ATen operation, or a name of this package.
        args: its arguments, with `Version`s in place of tensors.
        kwargs: its keyword arguments, likewise.
        results: the versions of its results; None for a result that is no tensor.
        place: the index of the layer call it is in, in `CallRecorder.places`; None in
            the backward pass.
        is_in_draw: bool, whether a function that draws random numbers has called it.
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[int | None]
    place: int | None
    is_in_draw: bool = False


@dataclass(slots=True)
class ValueTraits:
    """Shape and dtype of a value, and its values if they are known.

    `is_dense` says whether its memory has its entries in their order, and no others.
    """

    shape: Shape
    dtype: torch.dtype
    is_dense: bool
    known: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class OperationTraits:
    """What the recorder reads of an operation's declaration."""

    name: str
    is_copy: bool
    reads_values: bool
    is_drawing: bool
    # Positions and names of the arguments that it changes.
    changed: tuple[tuple[int, str], ...]
    changes_shape: bool
    has_own_rule: bool


@functools.cache
def operation_traits(operation: Any) -> OperationTraits:
    """The traits of an ATen operation."""
    name = operation_name(operation)
    changed = tuple(
        (i, argument.name)
        for i, argument in enumerate(schema_arguments(operation))
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    return OperationTraits(
        name,
        name in _COPIES,
        any(tag in operation.tags for tag in _READING_TAGS),
        torch.Tag.nondeterministic_seeded in operation.tags,
        changed,
        torch.Tag.inplace_view in operation.tags,
        has_rule(operation),
    )


@functools.cache
def operation_name(operation: Any) -> str:
    """The name of an ATen operation, of one in place that of the other."""
    name: str = operation.overloadpacket.__name__
    writes = any(
        argument.alias_info is not None and argument.alias_info.is_write
        for argument in schema_arguments(operation)
    )
    return name.rstrip("_") if writes and not name.endswith("__") else name
