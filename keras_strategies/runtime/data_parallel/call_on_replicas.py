"""One layer call on replicas: slices of arguments, outputs, losses and state."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.errors import BatchError
from keras_strategies.keras_compat.models.layer_calls import (
    CallRoute,
    direct_call,
    layer_calls_through,
)
from keras_strategies.keras_compat.models.layers import clear_losses, get_mask, set_mask
from keras_strategies.runtime.data_parallel.gradient_boundary import (
    Channel,
    GradientBoundary,
)
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.row_checks.layer_probes import LayerCall
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
        route: how replicas call the layer's own code.
    """

    strategy: StrategyCore
    layer_call: LayerCall
    row_split: RowSplit
    reduction: LocalReduction | None
    route: CallRoute = direct_call


class CallOnReplicas(GradientBoundary):
    """One call of a layer on all replicas, each on its rows.

    Args:
        call: the layer call and its rows.
    """

    def __init__(self, call: SplitCall):
        super().__init__(call.strategy, call.row_split, call.reduction)
        self.layer_call = call.layer_call
        self._route = call.route

    # Provided by an engine, besides the boundary.

    @abc.abstractmethod
    def split(self, tensor: Any) -> list[Any]:
        """Slices of a tensor along axis 0, each on its replica's device."""

    @abc.abstractmethod
    def replica_state(self, replica_id: int) -> ReplicaState:
        """The variables of a local replica."""

    # The call.

    def outputs(self, loss_kinds: Sequence[str]) -> tuple[Any] | None:
        """The global outputs in a tuple; None if they do not follow the rows.

        Args:
            loss_kinds: for each loss that the layer adds, `"mean"` or `"sum"`.
        """
        inputs: list[tuple[Any, list[Any]]] = []
        columns: list[list[Any]] = []
        for leaf in self.layer_call.leaves:
            if has_rows(leaf, self.layer_call.rows):
                slices = self._split_with_mask(leaf)
                inputs.append((leaf, slices))
            else:
                slices = [leaf] * len(self.row_split.sizes)
            columns.append(slices)
        count = range(len(self.row_split.sizes))
        own = [[column[i] for column in columns] for i in count]
        results: list[ReplicaResult] = self.run([self._task(i, own[i]) for i in count])
        channels = self._output_channels(results)
        if channels is None:
            return None
        losses = self._loss_channels(results, loss_kinds)
        tensors = [c for c in channels if c is not None] + losses
        connected = self.connect(inputs, results, tensors)
        outputs = self._global_outputs(results, channels, connected)
        self._merge_updates(results)
        clear_losses(self.layer_call.layer)
        if losses:
            # Functional models refuse `add_loss` on themselves; their base does not.
            added = connected[-len(losses) :]
            keras.layers.Layer.add_loss(self.layer_call.layer, added)
        return (outputs,)

    def _task(self, replica_id: int, leaves: list[Any]) -> Callable[[], ReplicaResult]:
        def run() -> ReplicaResult:
            args, kwargs = self.layer_call.arguments(leaves)
            state = self.replica_state(replica_id)
            with state.scope() as scope:
                call = self.layer_call
                outputs = self._route(call.layer, call.call, args, kwargs)
            return ReplicaResult(outputs, state, scope.losses)

        return run

    def _split_with_mask(self, leaf: Any) -> list[Any]:
        slices = self.split(leaf)
        mask = get_mask(leaf)
        if mask is not None:
            for part, mask_part in zip(slices, self.split(mask), strict=True):
                set_mask(part, mask_part)
        return slices

    # Outputs.

    def _output_channels(
        self, results: Sequence[ReplicaResult]
    ) -> list[Channel | None] | None:
        layer, sizes = self.layer_call.layer, self.row_split.sizes
        channels: list[Channel | None] = []
        for parts in zip(*(result.leaves for result in results), strict=True):
            if not keras.ops.is_tensor(parts[0]):
                channels.append(None)
            elif all(
                has_rows(part, size) for part, size in zip(parts, sizes, strict=True)
            ):
                channels.append(Channel(list(parts)))
            else:
                warn_user(
                    f"Layer {layer.name!r} ({type(layer).__name__}) returned a tensor "
                    f"of shape {tuple(parts[0].shape)} for a slice of {sizes[0]} "
                    "rows: it has no batch axis, so its replicas' outputs "
                    "cannot be joined. It is called on one device with the unsplit "
                    "batch instead, which is exact but not parallel. Return one row "
                    "per sample, or use `add_loss` for scalars, to run it on all "
                    f"replicas of {self.strategy!r}."
                )
                return None
        return channels

    def _global_outputs(
        self,
        results: Sequence[ReplicaResult],
        channels: Sequence[Channel | None],
        connected: Sequence[Any],
    ) -> Any:
        values = iter(connected)
        leaves = []
        for i, channel in enumerate(channels):
            if channel is None:
                leaves.append(results[0].leaves[i])
                continue
            value = next(values)
            masks = [result.masks[i] for result in results]
            if masks[0] is not None:
                set_mask(value, self.combine(Channel(masks)))
            leaves.append(value)
        return keras.tree.pack_sequence_as(results[0].outputs, leaves)

    # Losses that layers add.

    def _loss_channels(
        self, results: Sequence[ReplicaResult], kinds: Sequence[str]
    ) -> list[Channel]:
        """Losses of the global batch, from those of the replicas.

        A loss with one row per sample is concatenated. A scalar is either a mean over
        rows, averaged with the replicas' numbers of rows as weights (so is a term of
        the weights alone), or a sum over rows, which is added up.
        """
        layer, sizes = self.layer_call.layer, self.row_split.sizes
        counts = {len(result.losses) for result in results}
        if counts != {len(kinds)}:
            raise BatchError(
                f"Layer {layer.name!r} added {max(counts)} losses to one call and "
                f"{len(kinds)} to another with arguments of the same kinds: how they "
                "depend on the rows is unknown. Add the same losses on every call, "
                "or one value per sample."
            )
        channels = []
        per_loss = zip(*(result.losses for result in results), strict=True)
        for kind, parts in zip(kinds, per_loss, strict=False):
            if len(parts[0].shape) > 0 and all(
                has_rows(part, size) for part, size in zip(parts, sizes, strict=True)
            ):
                channels.append(Channel(list(parts)))
            elif kind == "sum":
                channels.append(Channel(list(parts), [1.0] * len(parts)))
            else:
                channels.append(Channel(list(parts), self._fractions(sizes)))
        return channels

    def _fractions(self, sizes: Sequence[Any]) -> list[Any]:
        """The share of each replica in the global batch."""
        rows = self.layer_call.rows
        if isinstance(rows, int):
            return [size / rows for size in sizes]
        count = keras.ops.cast(keras.ops.maximum(rows, 1), "float32")
        return [keras.ops.cast(size, "float32") / count for size in sizes]

    # State that layers update.

    def _merge_updates(self, results: Sequence[ReplicaResult]) -> None:
        """Assigns updated variables, each the merged value of the replicas."""
        first = results[0].state.updates
        with self.on_lead():
            columns = [
                [
                    self.to_lead(result.state.updates[key][1])
                    for result in results
                    if key in result.state.updates
                ]
                for key in first
            ]
            everywhere = self.row_split.replica_set.all_values(columns)
        weights = self._fractions(self.row_split.every)
        for (variable, _), values in zip(first.values(), everywhere, strict=True):
            variable.assign(merged_value(variable, values, weights))

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
