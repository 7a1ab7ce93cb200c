"""How one layer call is split over replicas, and how its results become global ones.

A plan is data. The functions here turn the results of the replicas into channels, one
for each tensor of the global batch, by the row placements that are proved.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.devices import Device
from keras_strategies.errors import BatchError
from keras_strategies.rows.layer_calls import LayerCall
from keras_strategies.rows.row_placements import (
    SAME,
    RowKind,
    RowPlacement,
    RowProof,
)
from keras_strategies.runtime.data_parallel.row_parts import RowPartsCaller
from keras_strategies.runtime.random_numbers.row_draws import OwnRows, ProvedDraws
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.replicas.tensor_primitives import (
    TensorPrimitives,
    is_float,
)
from keras_strategies.runtime.state.replica_state import ReplicaResult, has_rows

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


@dataclass(frozen=True)
class SplitPlan:
    """A layer call that is split over the replicas of a strategy.

    Args:
        strategy: the strategy.
        layer_call: the call.
        row_split: the rows of each replica, and the functions of tensors.
        proof: the placements of what the call returns, adds and assigns.
        caller: the data-parallel calls of the strategy.
    """

    strategy: StrategyCore
    layer_call: LayerCall
    row_split: RowSplit
    proof: RowProof
    caller: RowPartsCaller

    @property
    def ops(self) -> TensorPrimitives:
        """The functions of the framework's tensors."""
        return self.row_split.replica_set.primitives

    @property
    def lead(self) -> Device:
        """The device of the global batch."""
        return self.strategy.placement.variables

    def on_lead(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around operations on the device of the global batch."""
        return self.strategy.engine.on_device(self.lead)

    def to_lead(self, tensor: Any) -> Any:
        """A tensor, without gradient, on the device of the global batch."""
        return self.ops.to_device(keras.ops.stop_gradient(tensor), self.lead)

    def as_row_parts(self, parts: Sequence[Any], multiple: int = 1) -> Any:
        """A tensor of the global batch whose rows stay on their replicas.

        Args:
            parts: the part of each local replica.
            multiple: int, entries of axis 0 for each row of the call.
        """
        make = self.ops.row_parts
        assert make is not None
        found = make(parts, self.row_split.times(multiple), self.caller, self.lead)
        found.layer = weakref.ref(self.layer_call.layer)
        return found

    def own_rows(self, replica_id: int) -> OwnRows:
        """The rows of a local replica."""
        first = self.row_split.replica_set.counts.first
        return OwnRows.of(self.row_split.every, first + replica_id)

    def draws(self, rows: OwnRows) -> ProvedDraws:
        """The random numbers of a replica with these rows."""
        name, is_partitioned = (
            self.layer_call.layer.name,
            self.strategy.partitions_draws,
        )
        return ProvedDraws(self.proof.draws, rows, name, is_partitioned)

    def fractions(self, sizes: Sequence[Any]) -> list[Any]:
        """The share in the global batch of each of the replicas with these rows."""
        rows = self.layer_call.rows
        if isinstance(rows, int):
            return [size / rows for size in sizes]
        count = keras.ops.cast(keras.ops.maximum(rows, 1), "float64")
        return [keras.ops.cast(size, "float64") / count for size in sizes]


@dataclass
class Channel:
    """One tensor on each replica, and how the tensors become a global one.

    Args:
        parts: the tensors, in replica order.
        weights: None to concatenate the parts by rows; otherwise the factors of a
            weighted sum, one for each part. Where all parts are equal, the factors of
            their gradients.
        multiple: int, entries of axis 0 for each row of the call.
        are_equal: bool, whether the parts are equal, on all workers.
        is_in_parts: bool, whether rows stay on their replicas, see `RowParts`.
    """

    parts: list[Any]
    weights: list[Any] | None = None
    multiple: int = 1
    are_equal: bool = False
    is_in_parts: bool = False


@dataclass(frozen=True)
class OutputActivation:
    """The activation that has computed an output, for losses that use its inputs.

    Keras on TensorFlow computes the crossentropy of probabilities from the logits.

    Args:
        logits: the inputs of the activation, one for each replica.
        apply: computes the output for the global batch from the joined inputs; None if
            outputs are joined too.
    """

    logits: list[Any]
    apply: Callable[[Any], Any] | None


@dataclass(frozen=True)
class SplitOutput:
    """One output of the layer on all replicas.

    Args:
        channels: the channel of the output, after that of its logits if it has an
            activation; only that of the logits if the activation can be applied to
            joined ones. None of an output that is no tensor.
        activation: the activation of the output.
    """

    channels: list[Channel]
    activation: OutputActivation | None = None


def outputs_of(
    plan: SplitPlan,
    results: Sequence[ReplicaResult],
    activations: Mapping[int, OutputActivation],
) -> list[SplitOutput]:
    """The outputs of a call.

    Args:
        plan: the plan of the call.
        results: the results of the replicas.
        activations: see `ForwardPass`.
    """
    columns = list(zip(*(result.leaves for result in results), strict=True))
    placements = plan.proof.of_outputs(len(columns))
    _check_count(plan, len(columns), len(placements), "returned", "outputs")
    found = []
    for i, (parts, placement) in enumerate(zip(columns, placements, strict=True)):
        if not keras.ops.is_tensor(parts[0]):
            found.append(SplitOutput([]))
            continue
        channel = channel_of(plan, parts, placement or SAME)
        activation = None
        if channel.weights is None and is_float(parts[0]):
            activation = activations.get(i)
        if activation is None:
            found.append(SplitOutput([channel]))
            continue
        if channel.is_in_parts:
            activation = replace(activation, apply=None)
        logits = replace(channel, parts=activation.logits)
        own = [logits] if activation.apply else [logits, channel]
        found.append(SplitOutput(own, activation))
    return found


def losses_of(plan: SplitPlan, results: Sequence[ReplicaResult]) -> list[Channel]:
    """The losses of the global batch that a call has added.

    Args:
        plan: the plan of the call.
        results: the results of the replicas.
    """
    for result in results:
        proved = len(plan.proof.of_losses(len(result.losses)))
        _check_count(plan, len(result.losses), proved, "added", "losses")
    columns = list(zip(*(result.losses for result in results), strict=True))
    placements = plan.proof.of_losses(len(columns))
    return [
        channel_of(plan, parts, placement)
        for parts, placement in zip(columns, placements, strict=True)
    ]


def channel_of(
    plan: SplitPlan, parts: Sequence[Any], placement: RowPlacement
) -> Channel:
    """The channel of a tensor, by its placement.

    A tensor that is equal on all replicas is the one of the first replica. Its
    gradient is distributed by the replicas' shares of the rows, which add up to one.
    """
    if placement.kind is RowKind.ROWS:
        _check_rows_of(plan, parts, placement.multiple)
        return Channel(
            list(parts),
            multiple=placement.multiple,
            is_in_parts=plan.ops.row_parts is not None,
        )
    if placement.kind is RowKind.SUM:
        return Channel(list(parts), [1.0] * len(parts))
    are_equal = placement.kind is RowKind.SAME
    return Channel(
        list(parts), plan.fractions(plan.row_split.sizes), are_equal=are_equal
    )


def _check_rows_of(plan: SplitPlan, parts: Sequence[Any], multiple: int) -> None:
    """Compares the rows of slices with those of the proof, where they are known."""
    layer = plan.layer_call.layer
    for part, size in zip(parts, plan.row_split.sizes, strict=True):
        if len(part.shape) and has_rows(
            part, size * multiple if isinstance(size, int) else size
        ):
            continue
        raise BatchError(
            f"Layer {layer.name!r} ({type(layer).__name__}) returned a tensor of "
            f"shape {tuple(part.shape)} for a slice of {size} rows, where the "
            f"proof of its row placements has {multiple} for each row. "
            "Its code behaves differently in two calls with the same arguments: "
            "make what changes an argument of the call or a `keras.Variable`."
        )


def _check_count(plan: SplitPlan, own: int, proved: int, verb: str, what: str) -> None:
    layer = plan.layer_call.layer
    if own != proved:
        raise BatchError(
            f"Layer {layer.name!r} ({type(layer).__name__}) {verb} {own} {what} in "
            f"one call and {proved} in another with arguments of the same kinds. "
            "Make what changes an argument of the call or a `keras.Variable`, or "
            "use the same number in every call."
        )
