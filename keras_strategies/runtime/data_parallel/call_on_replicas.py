"""One layer call on replicas: slices of arguments, outputs, losses and state."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.errors import BatchError
from keras_strategies.keras_compat.models.layer_calls import (
    layer_calls_through,
)
from keras_strategies.keras_compat.models.layers import (
    clear_losses,
    get_logits,
    get_mask,
    set_logits,
    set_mask,
)
from keras_strategies.keras_compat.variables.generator_seeds import is_seed_state
from keras_strategies.runtime.data_parallel.added_sums import AddedSums
from keras_strategies.runtime.data_parallel.gradient_boundary import (
    Channel,
    GradientBoundary,
)
from keras_strategies.runtime.data_parallel.row_draws import (
    OwnRows,
    ProvedDraws,
    drawing,
)
from keras_strategies.runtime.data_parallel.row_parts import RowPartsCaller
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.replicas.tensor_primitives import is_float
from keras_strategies.runtime.row_proofs.layer_calls import LayerCall
from keras_strategies.runtime.row_proofs.row_placements import (
    SAME,
    RowKind,
    RowPlacement,
    RowProof,
)
from keras_strategies.runtime.state.replica_state import (
    ReplicaResult,
    ReplicaState,
    has_rows,
    merged_value,
)
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

# Layers for which second-order gradients have been warned about.
_twice_differentiated: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class SplitCall:
    """A layer call that is split over the replicas of a strategy.

    Args:
        strategy: the strategy.
        layer_call: the call.
        row_split: the rows of each replica, and the functions of tensors.
        reduction: the strategy's `CrossDeviceOps`, None for the framework's sums.
        proof: the placements of what the call returns, adds and assigns.
        caller: the data-parallel calls of the strategy.
    """

    strategy: StrategyCore
    layer_call: LayerCall
    row_split: RowSplit
    reduction: LocalReduction | None
    proof: RowProof
    caller: RowPartsCaller


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
class _Output:
    """The channels of one output of the layer: logits first, if it has an activation;
    none of an output that is no tensor."""

    channels: list[Channel]
    activation: OutputActivation | None = None


class CallOnReplicas(GradientBoundary):
    """One call of a layer on all replicas, each on its rows.

    Args:
        call: the layer call and its rows.
    """

    def __init__(self, call: SplitCall):
        super().__init__(call.strategy, call.row_split, call.reduction, call.caller)
        self.layer_call = call.layer_call
        self.layer = weakref.ref(call.layer_call.layer)
        self.proof = call.proof

    # Provided by an engine, besides the boundary.

    @abc.abstractmethod
    def split(self, tensor: Any) -> list[Any]:
        """Slices of a tensor along axis 0, each on its replica's device."""

    @abc.abstractmethod
    def replica_state(self, replica_id: int) -> ReplicaState:
        """The variables of a local replica."""

    @abc.abstractmethod
    def activation_of(self, parts: Sequence[Any]) -> OutputActivation | None:
        """The activation of an output; None without one that losses look for.

        Args:
            parts: the output of each replica.
        """

    def around_call(self) -> contextlib.AbstractContextManager[Any]:
        """Context around a replica's call, in which the engine sees its draws."""
        return contextlib.nullcontext()

    def own_rows(self, replica_id: int) -> OwnRows:
        """The rows of a local replica, in a call that draws random numbers."""
        first = self.row_split.replica_set.counts.first
        return OwnRows.of(self.row_split.every, first + replica_id)

    # The call.

    def outputs(self) -> Any:
        """The outputs for the global batch."""
        proof = self.proof
        inputs: list[tuple[Any, list[Any]]] = []
        columns: list[list[Any]] = []
        for leaf in self.layer_call.leaves:
            if has_rows(leaf, self.layer_call.rows):
                slices = self._split_with_mask(leaf)
                inputs.append((leaf, slices))
                logits = get_logits(leaf)
                if logits is not None:
                    inputs.append((logits, self._split_logits(logits, slices)))
            else:
                slices = [leaf] * len(self.row_split.sizes)
            columns.append(slices)
        count = range(len(self.row_split.sizes))
        own = [[column[i] for column in columns] for i in count]
        results: list[ReplicaResult] = self.run([self._task(i, own[i]) for i in count])
        channels = self._output_channels(results, proof)
        joined = self._with_logits(channels)
        losses = self._loss_channels(results, proof)
        tensors = [channel for each in joined for channel in each.channels] + losses
        connected = self.connect(inputs, results, tensors)
        outputs = self._global_outputs(results, joined, connected)
        if self.layer_call.adds:
            self._add_updates(results, proof)
        else:
            self._merge_updates(results, proof)
        clear_losses(self.layer_call.layer)
        if losses:
            # Functional models refuse `add_loss` on themselves; their base does not.
            added = connected[-len(losses) :]
            keras.layers.Layer.add_loss(self.layer_call.layer, added)
        return outputs

    def _task(self, replica_id: int, leaves: list[Any]) -> Callable[[], ReplicaResult]:
        call, multiples = self.layer_call, self.proof.draws
        rows = self.own_rows(replica_id) if any(multiples) else OwnRows(0, 0, 0)
        is_partitioned = self.strategy.partitions_draws
        draws = ProvedDraws(multiples, rows, call.layer.name, is_partitioned)

        def run() -> ReplicaResult:
            args, kwargs = call.arguments(leaves)
            state = self.replica_state(replica_id)
            with state.scope() as scope, drawing(draws), self.around_call():
                outputs = call.call(*args, **kwargs)
            return ReplicaResult(outputs, state, scope.losses)

        return run

    def _split_with_mask(self, leaf: Any) -> list[Any]:
        slices = self.split(leaf)
        mask = get_mask(leaf)
        if mask is not None:
            for part, mask_part in zip(slices, self.split(mask), strict=True):
                set_mask(part, mask_part)
        return slices

    def _split_logits(self, logits: Any, slices: Sequence[Any]) -> list[Any]:
        parts = self.split(logits)
        for part, logits_part in zip(slices, parts, strict=True):
            set_logits(part, logits_part)
        return parts

    # Outputs.

    def _output_channels(
        self, results: Sequence[ReplicaResult], proof: RowProof
    ) -> list[Channel | None]:
        """A channel for each output; None for one that is no tensor."""
        columns = list(zip(*(result.leaves for result in results), strict=True))
        placements = proof.of_outputs(len(columns))
        self._check_count(len(columns), len(placements), "returned", "outputs")
        return [
            self._channel(parts, placement or SAME)
            if keras.ops.is_tensor(parts[0])
            else None
            for parts, placement in zip(columns, placements, strict=True)
        ]

    def _channel(self, parts: Sequence[Any], placement: RowPlacement) -> Channel:
        """The channel of one tensor; fractions are the replicas' shares of the rows.

        A tensor that is equal on all replicas is the one of the first replica. Its
        gradient is distributed by the same fractions, which add up to one.
        """
        sizes = self.row_split.sizes
        if placement.kind is RowKind.ROWS:
            self._check_rows_of(parts, placement.multiple)
            return Channel(
                list(parts),
                multiple=placement.multiple,
                is_apart=self.ops.row_parts is not None,
            )
        if placement.kind is RowKind.SUM:
            return Channel(list(parts), [1.0] * len(parts))
        are_equal = placement.kind is RowKind.SAME
        return Channel(list(parts), self._fractions(sizes), are_equal=are_equal)

    def _check_rows_of(self, parts: Sequence[Any], multiple: int) -> None:
        """Compares the rows of slices with those of the proof, where they are known."""
        layer, sizes = self.layer_call.layer, self.row_split.sizes
        for part, size in zip(parts, sizes, strict=True):
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

    def _check_count(self, own: int, proved: int, verb: str, what: str) -> None:
        layer = self.layer_call.layer
        if own != proved:
            raise BatchError(
                f"Layer {layer.name!r} ({type(layer).__name__}) {verb} {own} {what} in "
                f"one call and {proved} in another with arguments of the same kinds. "
                "Make what changes an argument of the call or a `keras.Variable`, or "
                "use the same number in every call."
            )

    def _with_logits(self, channels: Sequence[Channel | None]) -> list[_Output]:
        found = []
        for channel in channels:
            if channel is None:
                found.append(_Output([]))
                continue
            activation = None
            if channel.weights is None and is_float(channel.parts[0]):
                activation = self.activation_of(channel.parts)
            own = [channel]
            if activation is not None and channel.is_apart:
                activation = replace(activation, apply=None)
            if activation is not None:
                logits = replace(channel, parts=activation.logits)
                own = [logits] if activation.apply else [logits, channel]
            found.append(_Output(own, activation))
        return found

    def _global_outputs(
        self,
        results: Sequence[ReplicaResult],
        outputs: Sequence[_Output],
        connected: Sequence[Any],
    ) -> Any:
        values = iter(connected)
        leaves = []
        for i, output in enumerate(outputs):
            if not output.channels:
                leaves.append(results[0].leaves[i])
                continue
            value = next(values)
            if output.activation is not None:
                logits, apply = value, output.activation.apply
                if apply is None:
                    value = next(values)
                else:
                    with self.on_lead():
                        value = apply(logits)
                set_logits(value, logits)
            masks = [result.masks[i] for result in results]
            if masks[0] is not None:
                of_mask = replace(output.channels[-1], parts=masks)
                set_mask(value, self.combine(of_mask))
            leaves.append(value)
        return keras.tree.pack_sequence_as(results[0].outputs, leaves)

    # Losses that layers add.

    def _loss_channels(
        self, results: Sequence[ReplicaResult], proof: RowProof
    ) -> list[Channel]:
        """Losses of the global batch, from those of the replicas."""
        for result in results:
            count = len(result.losses)
            placements = proof.of_losses(count)
            self._check_count(count, len(placements), "added", "losses")
        columns = list(zip(*(result.losses for result in results), strict=True))
        return [
            self._channel(parts, placement)
            for parts, placement in zip(
                columns, proof.of_losses(len(columns)), strict=True
            )
        ]

    def _fractions(self, sizes: Sequence[Any]) -> list[Any]:
        """The share of each replica in the global batch."""
        rows = self.layer_call.rows
        if isinstance(rows, int):
            return [size / rows for size in sizes]
        count = keras.ops.cast(keras.ops.maximum(rows, 1), "float64")
        return [keras.ops.cast(size, "float64") / count for size in sizes]

    # State that layers update.

    def _merge_updates(self, results: Sequence[ReplicaResult], proof: RowProof) -> None:
        """Assigns updated variables; replicas exchange those that differ."""
        states = [result.state.updates for result in results]
        differing = []
        for key, (variable, value) in states[0].items():
            is_seed = is_seed_state(variable)
            placement = SAME if is_seed else proof.of_update(variable)
            if placement is None:
                raise BatchError(
                    f"Layer {self.layer_call.layer.name!r} assigned {variable.path!r} "
                    "in one call and not in another with arguments of the same kinds. "
                    "Assign the same variables in every call."
                )
            if placement.kind is RowKind.SAME or "float" not in variable.dtype:
                with self.on_lead():
                    variable.assign(self.to_lead(value))
            else:
                differing.append(key)
        if not differing:
            return
        with self.on_lead():
            columns = [
                [self.to_lead(state[key][1]) for state in states] for key in differing
            ]
            everywhere = self.row_split.replica_set.all_values(columns)
        weights = self._fractions(self.row_split.every)
        for key, values in zip(differing, everywhere, strict=True):
            variable, _ = states[0][key]
            variable.assign(merged_value(variable, values, weights))

    def _add_updates(self, results: Sequence[ReplicaResult], proof: RowProof) -> None:
        """Adds to variables what replicas, whose variables were zero, have in them."""
        sums = []
        for key, (variable, value) in results[0].state.updates.items():
            values = [result.state.updates[key][1] for result in results]
            with self.on_lead():
                channel = self._channel(values, proof.of_update(variable) or SAME)
                if channel.are_equal:
                    own = keras.ops.cast(self.to_lead(value), variable.dtype)
                    variable.assign(variable + own)
                else:
                    sums.append((variable, self.sum_on_worker(channel)))
        AddedSums(self.row_split, sums, self.on_lead).add()

    # Gradients of gradients.

    def recompute(self, value_of: Callable[[Any], Any]) -> list[Any]:
        """The output tensors and added losses of the unsplit call.

        Second-order gradients are computed by this call, with operations that the
        framework can differentiate twice. Its assignments are dropped: the call on the
        replicas has made them already.

        Args:
            value_of: returns the tensor to use as a variable's value.
        """
        layer = self.layer_call.layer
        if layer not in _twice_differentiated:
            _twice_differentiated.add(layer)
            warn_user(
                f"A gradient through layer {layer.name!r} ({type(layer).__name__}) is "
                "differentiated itself. Second-order gradients across replicas are "
                "not supported, so for these the layer is called once more, on one "
                "device with the unsplit batch, which is exact but not parallel; its "
                "random layers draw other numbers there. Compute the penalty inside a "
                "layer's `call` to compute it on all replicas."
            )
        args, kwargs = self.layer_call.arguments(self.layer_call.leaves)
        scope = ReplicaState(value_of).scope()
        with layer_calls_through(None), scope:
            outputs = self.layer_call.call(*args, **kwargs)
        found = keras.tree.flatten(outputs)
        return [leaf for leaf in found if keras.ops.is_tensor(leaf)] + scope.losses
