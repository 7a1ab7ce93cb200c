"""Calls, in a proof, of layers that are known by type: one operation each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategies.keras_compat.models.layers import get_mask
from keras_strategies.keras_compat.models.row_wise_layers import is_row_wise
from keras_strategies.keras_compat.state_scope import StateScope
from keras_strategies.keras_compat.variables.generator_seeds import seed_generators
from keras_strategies.runtime.row_proofs.layer_calls import argument_leaves
from keras_strategies.runtime.state.replica_state import ReplicaState


class UnknownUse(Exception):
    """A known layer gets values that its type says nothing about.

    The call is proved again by the operations of all of its layers.
    """


@dataclass(frozen=True)
class TensorTraits:
    """A tensor with one entry of axis 0 for each row.

    Args:
        shape: its shape without axis 0.
        dtype: its dtype.
    """

    shape: tuple[int | None, ...]
    dtype: Any

    @classmethod
    def of(cls, tensor: Any) -> TensorTraits:
        """The traits of a tensor of the framework."""
        return cls(tuple(tensor.shape)[1:], tensor.dtype)


@dataclass(frozen=True)
class KnownArguments:
    """The tensors among the arguments of a call: all of them, and their masks, have
    one entry of axis 0 for each row.

    Args:
        tensors: the arguments that are tensors.
        masks: the masks of those that have one.
    """

    tensors: list[Any]
    masks: list[Any]

    @property
    def traits(self) -> list[TensorTraits]:
        return [TensorTraits.of(each) for each in (*self.tensors, *self.masks)]


@dataclass(frozen=True)
class KnownResults:
    """The results of a call of a known layer.

    Args:
        structure: the outputs, with None for each tensor.
        outputs: the traits of the outputs.
        masks: those of their masks; None for an output without one.
        reads: the variables that the call reads.
        updates: those that it assigns; none of them is trained.
        is_trained: bool, whether a variable that it reads is trained.
    """

    structure: Any
    outputs: list[TensorTraits]
    masks: list[TensorTraits | None]
    reads: list[Any]
    updates: list[Any]
    is_trained: bool

    @classmethod
    def of(
        cls,
        outputs: Any,
        scope: StateScope,
        state: ReplicaState,
        is_made: Callable[[Any], bool],
        is_trained: Callable[[Any], bool],
    ) -> KnownResults | None:
        """The results of a call that was traced.

        Args:
            outputs: its outputs.
            scope: the scope of the call.
            state: the variables that it has read and assigned.
            is_made: whether an output or mask is a new tensor with the rows.
            is_trained: whether a variable that is read gets a gradient.

        Returns:
            None if it adds losses, assigns trained variables, or returns another value.
        """
        leaves = keras.tree.flatten(outputs)
        masks = [get_mask(leaf) for leaf in leaves]
        made = [*leaves, *(mask for mask in masks if mask is not None)]
        if scope.losses or not all(map(is_made, made)):
            return None
        updates = [variable for variable, _ in state.updates.values()]
        if any(variable.trainable for variable in updates):
            return None
        reads = [variable for variable, _ in state.reads.values()]
        return cls(
            keras.tree.map_structure(lambda leaf: None, outputs),
            [TensorTraits.of(leaf) for leaf in leaves],
            [None if mask is None else TensorTraits.of(mask) for mask in masks],
            reads,
            updates,
            any(map(is_trained, reads)),
        )

    def packed(self, outputs: Sequence[Any]) -> Any:
        """The outputs in their structure."""
        return keras.tree.pack_sequence_as(self.structure, list(outputs))


class KnownCalls:
    """The calls of known layers in one proof, in their order.

    The layer's code runs in the first trace of the call only. Others have the same
    calls with other numbers of rows; where they have not, nothing is proved.
    """

    def __init__(self) -> None:
        self._found: list[tuple[Any, list[TensorTraits], KnownResults | None]] = []
        #: Whether an operation stands for a call.
        self.is_used = False

    def in_order(self) -> KnownCallsOfTrace:
        """The calls of a new trace."""
        return KnownCallsOfTrace(self._found, self)


class KnownCallsOfTrace:
    """See `KnownCalls.in_order`."""

    def __init__(self, found: list[Any], calls: KnownCalls):
        self._found = found
        self._calls = calls
        self._is_first = not found
        self._position = 0

    def results(self, layer: Any, arguments: KnownArguments | None, run: Any) -> Any:
        """What a call gives, if it is one operation.

        Args:
            layer: the layer.
            arguments: its arguments; None if they are others.
            run: callable without arguments, which runs the layer's code once without
                a trace. Returns `KnownResults`; None if its results are others.

        Returns:
            `KnownResults`; None for a call to trace.
        """
        traits = [] if arguments is None else arguments.traits
        if self._is_first:
            found = None if arguments is None else run()
            self._found.append((layer, traits, found))
        else:
            found = self._next(layer, traits)
            if found is not None and seed_generators(layer):
                run()  # Its draws are recorded in each trace.
        self._calls.is_used |= found is not None
        return found

    def _next(self, layer: Any, traits: list[TensorTraits]) -> KnownResults | None:
        if self._position == len(self._found):
            return None
        expected, of_first, found = self._found[self._position]
        self._position += 1
        is_same = layer is expected and traits == of_first
        return found if is_same else None


def known_arguments(
    layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int | None
) -> KnownArguments | None:
    """The arguments of a call, if the layer is known by type for such ones.

    Args:
        layer: a layer.
        args: the arguments of its call.
        kwargs: its keyword arguments.
        rows: int, the number of rows; None for any number.
    """
    tensors = []
    for leaf in argument_leaves(args, kwargs):
        if keras.ops.is_tensor(leaf):
            tensors.append(leaf)
        elif leaf is not None and not isinstance(leaf, bool):
            return None
    masks = [mask for mask in map(get_mask, tensors) if mask is not None]
    if not tensors or not all(_has_rows(each, rows) for each in (*tensors, *masks)):
        return None
    if not layer.built or not is_row_wise(layer, [len(t.shape) for t in tensors]):
        return None
    return KnownArguments(tensors, masks)


def _has_rows(tensor: Any, rows: int | None) -> bool:
    shape = tensor.shape
    if getattr(shape, "rank", 1) is None or len(shape) == 0:
        return False
    return bool(shape[0] == rows)
