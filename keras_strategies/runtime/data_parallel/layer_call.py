"""The data-parallel call of a layer, for backends whose replicas are separate.

# Why the call, and not the step

A step of `Model.fit` runs once, on the global batch, as Keras or its user wrote
it. Only the outermost calls of layers in it (`self(x, training=True)`) are
parallel: the rows of their arguments are split over the replicas, each replica
calls the layer on its rows, and the outputs come back as one global batch. The
loss, its reduction and masks, every metric, `add_loss`, clipping, accumulation and
the optimizer see what they see on one device, so they need no distributed twin,
and a custom `train_step` is exact whatever it computes. Gradients cross the
boundary once: the outputs' gradient is split by rows, each replica runs its own
backward pass, and the gradients of the variables are summed.

What is left to combine is what happens *inside* the layer: batch statistics (see
`training/batch_norm.py`), losses that layers add, and state that they update.
"""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.errors import BatchError
from keras_strategies.keras_compat.models.building import is_built
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import clear_losses, get_mask, set_mask
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.row_checks.layer_checks import RowChecks
from keras_strategies.runtime.row_checks.layer_probes import LayerCall, Randomness
from keras_strategies.runtime.state.replica_state import (
    ReplicaResult,
    ReplicaState,
    has_rows,
    merged_value,
)
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

# Rows on which the arithmetic of a layer is measured.
_MEASURED_ROWS = 4


@dataclass
class Channel:
    """One tensor on each replica, and how the tensors become a global one.

    Args:
        parts: the tensors, in replica order.
        weights: None to concatenate the parts by rows; otherwise the factors of a
            weighted sum, one for each part.
    """

    parts: list[Any]
    weights: list[Any] | None = None


class DataParallelCall(abc.ABC):
    """Calls a layer on all replicas, each on its rows of the global batch."""

    def __init__(self, strategy: StrategyCore):
        self.strategy = strategy
        self.placement = strategy.placement
        self._not_by_rows: weakref.WeakSet[Any] = weakref.WeakSet()
        self._row_checks = RowChecks(strategy.placement.workers)
        # The call that is being split; calls do not nest.
        self._layer_call: LayerCall | None = None
        # Layers of which gradients of gradients were computed.
        self._twice_differentiated: weakref.WeakSet[Any] = weakref.WeakSet()

    # What a backend provides.

    @abc.abstractmethod
    def sizes(
        self,
        layer: Any,
        rows: Any,
        call_few: Callable[[], int],
        tensors: Sequence[Any],
    ) -> list[Any] | None:
        """Rows for each replica that takes part; None to call the layer whole.

        `call_few()` calls the layer on a few rows, whose number it returns, and
        leaves no trace.
        """

    @abc.abstractmethod
    def split(self, tensor: Any, sizes: Sequence[Any]) -> list[Any]:
        """Slices of a tensor along axis 0, each for its replica's device."""

    @abc.abstractmethod
    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs one task on each replica, in its context; results in order."""

    @abc.abstractmethod
    def copy_variable(self, replica_id: int, variable: Any) -> Any:
        """The value of a variable for a replica, on its device."""

    @abc.abstractmethod
    def assigned_value(self, variable: Any, read: Callable[[], Any], value: Any) -> Any:
        """The value that a replica reads from a variable after assigning `value`.

        Assignments are not differentiable: the gradient of the value read is the
        gradient of the variable, and `value` gets none.

        Args:
            variable: `keras.Variable`.
            read: returns the value of the variable before the assignment.
            value: tensor of the variable's shape and dtype.
        """

    @abc.abstractmethod
    def cast_copy(self, replica_id: int, value: Any, dtype: str) -> Any:
        """A copy of a variable in a dtype, with a gradient of its own.

        None where no gradient is recorded, or not at this place.
        """

    @abc.abstractmethod
    def connect(
        self,
        inputs: Sequence[tuple[Any, list[Any]]],
        results: Sequence[ReplicaResult],
        channels: Sequence[Channel],
    ) -> list[Any]:
        """Global tensors for the channels, with gradients through the replicas.

        Args:
            inputs: pairs of a global tensor and its slices.
            results: the replicas' results, whose scopes hold the variables read.
            channels: what is to be combined.
        """

    @abc.abstractmethod
    def to_lead(self, tensor: Any) -> Any:
        """The tensor, without gradient, on the device of the global batch."""

    @abc.abstractmethod
    def values_of(self, tensor: Any) -> Any | None:
        """The tensor with its values; None where a program has only its shape."""

    @abc.abstractmethod
    def probe_input(self, tensor: Any, rows: int | None) -> Any:
        """The first rows of a tensor (None: all), or what may stand in for them."""

    @abc.abstractmethod
    def probing(self, quantile: float) -> contextlib.AbstractContextManager[Randomness]:
        """Entered around eager calls without gradients and without randomness.

        Random numbers are constants inside: this quantile of their range.
        """

    def workers_changed(self) -> None:
        """Drops results of checks that the workers have made together."""
        self._row_checks.clear()

    # The call.

    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with layer_calls_through(None):
            whole = call
            leaves = keras.tree.flatten((args, kwargs))
            if layer in self._not_by_rows or not is_built(layer):
                return whole(*args, **kwargs)
            if any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                return whole(*args, **kwargs)
            leaves = [_as_tensor(leaf) for leaf in leaves]
            rows = _rows(leaves)
            if rows is None:
                return whole(*args, **kwargs)
            tensors = [leaf for leaf in leaves if has_rows(leaf, rows)]
            structure = (args, kwargs)

            def call_few() -> int:
                few = self._few_rows(structure, leaves, rows)
                with ReplicaState(raw_value).scope():
                    call(*few[0], **few[1])
                return min(rows, _MEASURED_ROWS)

            sizes = self.sizes(layer, rows, call_few, tensors)
            if sizes is None:
                return whole(*args, **kwargs)
            layer_call = LayerCall(layer, call, structure, leaves, rows)
            check, is_new = self._row_checks.check(self, layer_call)
            if check.problem is not None:
                outputs = whole(*args, **kwargs)
                if is_new:
                    self._row_checks.add(layer_call, check)
                    self._warn_of(layer, check.problem)
                return outputs
            self._layer_call = layer_call
            try:
                result = self._call_split(layer_call, sizes, check.loss_kinds)
            finally:
                self._layer_call = None
            if result is None:
                self._not_by_rows.add(layer)
                return whole(*args, **kwargs)
            return result[0]

    def _warn_of(self, layer: Any, problem: str) -> None:
        warn_user(
            f"Layer {layer.name!r} ({type(layer).__name__}) cannot be split by rows: "
            f"{problem}. It is called on one device with the unsplit batch instead, "
            "which is exact but not parallel. Compute each row from its own inputs, "
            "and what needs the batch outside of the layer, in the loss for example, "
            f"to run it on all replicas of {self.strategy!r}."
        )

    def _call_split(
        self, layer_call: LayerCall, sizes: list[Any], loss_kinds: Sequence[str]
    ) -> tuple[Any] | None:
        """The global outputs in a tuple; None if they do not follow the rows."""
        layer, call = layer_call.layer, layer_call.call
        structure, leaves = layer_call.structure, layer_call.leaves
        rows = layer_call.rows
        inputs: list[tuple[Any, list[Any]]] = []
        columns: list[list[Any]] = []
        for leaf in leaves:
            if has_rows(leaf, rows):
                slices = self._split_with_mask(leaf, sizes)
                inputs.append((leaf, slices))
            else:
                slices = [leaf] * len(sizes)
            columns.append(slices)

        def task(replica_id: int) -> Callable[[], ReplicaResult]:
            def run() -> ReplicaResult:
                own = [column[replica_id] for column in columns]
                args, kwargs = keras.tree.pack_sequence_as(structure, own)
                state = ReplicaState(
                    lambda v: self.copy_variable(replica_id, v),
                    lambda value, dtype: self.cast_copy(replica_id, value, dtype),
                    self.assigned_value,
                )
                with state.scope() as scope:
                    outputs = call(*args, **kwargs)
                return ReplicaResult(outputs, state, scope.losses)

            return run

        results: list[ReplicaResult] = self.run([task(i) for i in range(len(sizes))])
        channels = self._output_channels(layer, results, sizes)
        if channels is None:
            return None
        channels_of_losses = self._loss_channels(
            layer, rows, sizes, results, loss_kinds
        )
        connected = self.connect(
            inputs,
            results,
            [c for c in channels if c is not None] + channels_of_losses,
        )
        outputs = self._global_outputs(results, channels, connected)
        self._merge_updates(results, sizes, rows)
        clear_losses(layer)
        if channels_of_losses:
            # Functional models refuse `add_loss` on themselves; their base does not.
            losses = connected[-len(channels_of_losses) :]
            keras.layers.Layer.add_loss(layer, losses)
        return (outputs,)

    def recompute(
        self, layer_call: LayerCall, value_of: Callable[[Any], Any]
    ) -> list[Any]:
        """The output tensors and added losses of the unsplit call.

        A gradient that is differentiated itself is computed by this call, whose
        operations the engine of the backend can differentiate twice. What the call
        assigns is dropped: the call on the replicas has assigned it.

        Args:
            layer_call: the call that was split.
            value_of: returns the tensor that stands for a variable.
        """
        layer = layer_call.layer
        if layer not in self._twice_differentiated:
            self._twice_differentiated.add(layer)
            warn_user(
                f"A gradient that goes through layer {layer.name!r} "
                f"({type(layer).__name__}) is differentiated itself. Gradients of "
                "gradients do not cross replicas, so the layer is called once more on "
                "one device with the unsplit batch for them, which is exact but not "
                "parallel. Random layers in it draw other numbers there. Compute the "
                "penalty inside a layer's `call` to compute it on all replicas."
            )
        args, kwargs = keras.tree.pack_sequence_as(
            layer_call.structure, layer_call.leaves
        )
        scope = ReplicaState(value_of).scope()
        with layer_calls_through(None), scope:
            outputs = layer_call.call(*args, **kwargs)
        leaves = keras.tree.flatten(outputs)
        return [leaf for leaf in leaves if keras.ops.is_tensor(leaf)] + scope.losses

    def _split_with_mask(self, leaf: Any, sizes: list[Any]) -> list[Any]:
        slices = self.split(leaf, sizes)
        mask = get_mask(leaf)
        if mask is not None:
            for part, mask_part in zip(slices, self.split(mask, sizes), strict=True):
                set_mask(part, mask_part)
        return slices

    # Outputs.

    def _output_channels(
        self, layer: Any, results: list[ReplicaResult], sizes: list[Any]
    ) -> list[Channel | None] | None:
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
                    "rows: it does not keep the batch axis, so its replicas' outputs "
                    "cannot be joined. It is called on one device with the whole "
                    "batch instead, which is exact but not parallel. Return one row "
                    "per sample, or use `add_loss` for scalars, to run it on all "
                    f"replicas of {self.strategy!r}."
                )
                return None
        return channels

    def _global_outputs(
        self,
        results: list[ReplicaResult],
        channels: list[Channel | None],
        connected: list[Any],
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
                set_mask(value, self.joined(masks))
            leaves.append(value)
        return keras.tree.pack_sequence_as(results[0].outputs, leaves)

    # Losses that layers add.

    def _loss_channels(
        self,
        layer: Any,
        rows: Any,
        sizes: list[Any],
        results: list[ReplicaResult],
        kinds: Sequence[str],
    ) -> list[Channel]:
        """How each loss of the replicas becomes the loss of the global batch.

        A loss with one row per sample is concatenated. A scalar is either a mean
        over rows (then replicas count by their rows; a term of the weights alone
        is one too) or a sum over rows (then they add up).
        """
        counts = {len(result.losses) for result in results}
        if counts != {len(kinds)}:
            raise BatchError(
                f"Layer {layer.name!r} added {max(counts)} losses to one call and "
                f"{len(kinds)} to another with arguments of the same kinds; how they "
                "follow from the rows is not known. Add the same losses on every call, "
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
                channels.append(Channel(list(parts), self.fractions(sizes, rows)))
        return channels

    def _few_rows(self, structure: Any, leaves: list[Any], rows: Any) -> Any:
        """The arguments with a few rows in place of the batch."""
        few = [
            self.probe_input(leaf, _MEASURED_ROWS) if has_rows(leaf, rows) else leaf
            for leaf in leaves
        ]
        return keras.tree.pack_sequence_as(structure, few)

    def fractions(self, sizes: list[Any], rows: Any) -> list[Any]:
        """The share of each replica in the global batch."""
        return [size / rows for size in sizes]

    # Replicas of other workers.

    def joined(self, parts: list[Any]) -> Any:
        """The rows of all replicas, without gradient, from those of the local ones."""
        return keras.ops.concatenate([self.to_lead(part) for part in parts], axis=0)

    def all_fractions(self, sizes: list[Any], rows: Any) -> list[Any]:
        """The share in the global batch of each replica, of all workers."""
        return self.fractions(sizes, rows)

    def on_all_workers(self, columns: list[list[Any]]) -> list[list[Any]]:
        """For each variable the values of all replicas, from those of the local ones.

        Values of one variable have equal shapes.
        """
        return columns

    # State that layers update.

    def _merge_updates(
        self, results: list[ReplicaResult], sizes: list[Any], rows: Any
    ) -> None:
        """Makes one value of what the replicas assigned to each variable."""
        first = results[0].state.updates
        columns = [
            [
                self.to_lead(result.state.updates[key][1])
                for result in results
                if key in result.state.updates
            ]
            for key in first
        ]
        variables = [variable for variable, _ in first.values()]
        weights = self.all_fractions(sizes, rows)
        everywhere = self.on_all_workers(columns)
        for variable, values in zip(variables, everywhere, strict=True):
            variable.assign(merged_value(variable, values, weights))


def _as_tensor(leaf: Any) -> Any:
    """NumPy arrays become tensors; tensors keep their mask; the rest stays."""
    if hasattr(leaf, "__array__") and not keras.ops.is_tensor(leaf):
        if isinstance(leaf, keras.Variable):
            return leaf
        return keras.ops.convert_to_tensor(leaf)
    return leaf


def _rows(leaves: list[Any]) -> Any:
    """The rows of the first tensor with a batch axis; None without one."""
    for leaf in leaves:
        if keras.ops.is_tensor(leaf) and len(leaf.shape) > 0:
            return keras.ops.shape(leaf)[0]
    return None
