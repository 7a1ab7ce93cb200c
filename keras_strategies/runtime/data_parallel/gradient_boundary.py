"""The boundary between the global batch and the replicas that compute it.

Tensors cross it in channels: parts on replicas become a tensor of the global batch, and
its gradient is split again. Gradients of the replicas' copies of variables are summed,
those of slices of inputs are concatenated.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.keras_compat.optimizers.optimizer_parts import is_overwritten
from keras_strategies.runtime.data_parallel.row_parts import RowPartsCaller, parts_of
from keras_strategies.runtime.replicas.gradient_sums import (
    largest_over_replicas,
    sums_over_replicas,
    sums_over_workers,
)
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.replicas.tensor_primitives import (
    TensorPrimitives,
    is_float,
)
from keras_strategies.runtime.state.replica_state import ReplicaResult
from keras_strategies.runtime.workers import Workers
from keras_strategies.types import ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


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
        is_apart: bool, whether rows stay on their replicas, see `RowParts`.
    """

    parts: list[Any]
    weights: list[Any] | None = None
    multiple: int = 1
    are_equal: bool = False
    is_apart: bool = False


@dataclass
class GradientTarget:
    """A variable or input outside of the replicas that receives a gradient.

    Args:
        tensor: the variable's value, or an input of the layer.
        locals: the replicas' tensors: copies of the variable (None where a replica did
            not read it) or slices of the input.
        by_rows: bool, whether gradients are concatenated, as for an input, or
            summed, as for a variable.
        variable: the `keras.Variable`; None for an input.
        apart: callable of the gradients of the slices, which makes one tensor of them
            whose rows stay on their replicas, as those of the input do; None for other
            inputs.
    """

    tensor: Any
    locals: list[Any]
    by_rows: bool
    variable: Any = None
    apart: Callable[[Sequence[Any]], Any] | None = None

    @property
    def is_overwritten(self) -> bool:
        """Whether gradients are new values, of which the largest counts."""
        return self.variable is not None and is_overwritten(self.variable)

    def joined_rows(self, ops: TensorPrimitives, parts: Sequence[Any]) -> Any:
        """The gradient of an input, from those of its slices; None without any."""
        if all(part is None for part in parts):
            return None
        filled = [
            keras.ops.zeros_like(local) if part is None else part
            for part, local in zip(parts, self.locals, strict=True)
        ]
        if self.apart is not None:
            return self.apart(filled)
        return ops.concatenate([ops.to_device_of(p, self.tensor) for p in filled])

    def rounded(self, ops: TensorPrimitives, total: Any) -> Any:
        """A sum of gradients in the dtype that it has on one device."""
        if total is None:
            return None
        read = next(local for local in self.locals if local is not None)
        return ops.cast(ops.cast(total, read.dtype), self.tensor.dtype)


def sums_on_worker(
    ops: TensorPrimitives,
    targets: Sequence[GradientTarget],
    columns: Sequence[Sequence[Any]],
    reduction: LocalReduction | None,
) -> list[Any]:
    """The gradient of each target, from those of the local replicas, not rounded.

    Args:
        ops: the functions of the framework's tensors.
        targets: the variables and inputs that receive gradients.
        columns: for each target the gradient of each replica.
        reduction: the strategy's `CrossDeviceOps`, None for the framework's sums.
    """
    columns = [
        [largest_over_replicas(ops, parts, target.tensor)]
        if target.is_overwritten
        else parts
        for target, parts in zip(targets, columns, strict=True)
    ]
    pairs = list(zip(targets, columns, strict=True))
    shared = [
        [
            part if part is None or reduction else ops.to_device_of(part, target.tensor)
            for part in parts
        ]
        for target, parts in pairs
        if not target.by_rows
    ]
    sums = iter(sums_over_replicas(ops, shared, reduction))
    return [
        target.joined_rows(ops, parts) if target.by_rows else next(sums)
        for target, parts in pairs
    ]


def largest_over_workers(
    targets: Sequence[GradientTarget], found: list[Any], workers: Workers | None
) -> None:
    """Replaces the gradients of overwritten variables by the largest of all workers."""
    places = [i for i, target in enumerate(targets) if target.is_overwritten]
    if workers is None or not places:
        return
    # New values are not negative: zeros of a worker without rows are not the largest.
    own = [
        keras.ops.zeros_like(targets[i].tensor) if found[i] is None else found[i]
        for i in places
    ]
    for i, value in zip(places, workers.all_reduce(ReduceOp.MAX, own), strict=True):
        found[i] = value


class GradientBoundary(abc.ABC):
    """One layer call's tensors and gradients between the global batch and replicas.

    Args:
        strategy: the strategy.
        row_split: the rows of the call.
        reduction: the strategy's `CrossDeviceOps`, None for the framework's sums.
        caller: the data-parallel calls of the strategy.
    """

    def __init__(
        self,
        strategy: StrategyCore,
        row_split: RowSplit,
        reduction: LocalReduction | None,
        caller: RowPartsCaller,
    ):
        self.strategy = strategy
        self.caller = caller
        self.ops = row_split.replica_set.primitives
        self.row_split = row_split
        #: The device of the global batch.
        self.lead = strategy.placement.variables
        self.reduction = reduction
        self.is_forward = True
        self.channels: list[Channel] = []
        self.targets: list[GradientTarget] = []

    #: Returns the layer that is called; None if it is gone.
    layer: Callable[[], Any]

    # Provided by an engine.

    @abc.abstractmethod
    def has_gradient(self, replica_id: int, tensor: Any) -> bool:
        """Whether a gradient of a replica's copy of a variable, or slice, is needed."""

    @abc.abstractmethod
    def target_of_variable(self, variable: Any, local: Any) -> Any:
        """The tensor outside of replicas with the gradient of the local copies."""

    @abc.abstractmethod
    def target_of_input(self, tensor: Any) -> Any:
        """The tensor outside of replicas with the gradient of the slices."""

    @abc.abstractmethod
    def connected(self) -> list[Any]:
        """The tensors of `channels`, with gradients to `targets` by `backward`."""

    @abc.abstractmethod
    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs one task on each replica, in its context; results in order."""

    @abc.abstractmethod
    def replica_gradients(
        self,
        replica_id: int,
        outputs: Sequence[tuple[Any, Any]],
        sources: Sequence[Any],
    ) -> Sequence[Any]:
        """The gradients of a replica's tensors, in its context.

        Args:
            replica_id: int, the number of the local replica.
            outputs: pairs of a tensor of the replica and its gradient.
            sources: the tensors to return gradients of.
        """

    def counted(self, part: Any, replica_id: int) -> Any:
        """A term of a sum over replicas; zeros of a replica without rows."""
        return part

    def begin_backward(self, shares: Sequence[Sequence[Any] | None]) -> None:
        """Called before the backward pass of the replicas.

        Args:
            shares: for each channel the gradient of each part; None where the channel
                has no gradient.
        """
        self.is_forward = False

    # Forward.

    def connect(
        self,
        inputs: Sequence[tuple[Any, list[Any]]],
        results: Sequence[ReplicaResult],
        channels: Sequence[Channel],
    ) -> list[Any]:
        """Global tensors for the channels, with gradients through the replicas.

        Args:
            inputs: pairs of a global tensor and its slices.
            results: the replicas' results; their states have the variables read.
            channels: the tensors to combine.
        """
        self.targets = self._targets(inputs, results)
        floats = [is_float(channel.parts[0]) for channel in channels]
        if not self.targets or not any(floats):
            return [self.combine(channel) for channel in channels]
        self.channels = list(itertools.compress(channels, floats))
        found = iter(self.connected())
        return [
            next(found) if is_float else self.combine(channel)
            for channel, is_float in zip(channels, floats, strict=True)
        ]

    def _targets(
        self,
        inputs: Sequence[tuple[Any, list[Any]]],
        results: Sequence[ReplicaResult],
    ) -> list[GradientTarget]:
        found: dict[Any, GradientTarget] = {}
        for i, result in enumerate(results):
            for key, (variable, local) in result.state.reads.items():
                if not self.has_gradient(i, local):
                    continue
                if key not in found:
                    tensor = self.target_of_variable(variable, local)
                    none = [None] * len(results)
                    found[key] = GradientTarget(tensor, none, False, variable)
                found[key].locals[i] = local
        return [
            *found.values(),
            *(
                GradientTarget(
                    self.target_of_input(tensor),
                    list(slices),
                    True,
                    apart=self.apart
                    if parts_of(tensor, self.row_split) is not None
                    else None,
                )
                for tensor, slices in inputs
                if self.has_gradient(0, slices[0])
            ),
        ]

    def apart(self, parts: Sequence[Any], multiple: int = 1) -> Any:
        """A tensor of the global batch whose rows stay on their replicas.

        Args:
            parts: the part of each local replica.
            multiple: int, entries of axis 0 for each row of the call.
        """
        make = self.ops.row_parts
        assert make is not None
        found = make(parts, self.row_split.times(multiple), self.caller, self.lead)
        found.layer = self.layer
        return found

    def on_lead(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around operations on the device of the global batch."""
        return self.strategy.engine.on_device(self.lead)

    def to_lead(self, tensor: Any) -> Any:
        """A tensor, without gradient, on the device of the global batch."""
        return self.ops.to_device(keras.ops.stop_gradient(tensor), self.lead)

    def combine(self, channel: Channel) -> Any:
        """The global tensor of a channel, without gradient."""
        if channel.is_apart:
            return self.apart(channel.parts, channel.multiple)
        with self.on_lead():
            return self._combined(channel)

    def _combined(self, channel: Channel) -> Any:
        ops = self.ops
        if channel.are_equal:
            return self.to_lead(channel.parts[0])
        if channel.weights is None:
            parts = [self.to_lead(part) for part in channel.parts]
            return self.row_split.joined(ops.concatenate(parts), channel.multiple)
        [total] = self.row_split.summed([self.sum_on_worker(channel)])
        return ops.cast(total, channel.parts[0].dtype)

    def sum_on_worker(self, channel: Channel) -> Any:
        """The weighted sum of the parts of this worker, not rounded."""
        assert channel.weights is not None
        terms = []
        for i, (part, weight) in enumerate(
            zip(channel.parts, channel.weights, strict=True)
        ):
            part = self.counted(self.ops.widened(self.to_lead(part)), i)
            is_number = isinstance(weight, float)
            factor = weight if is_number else self.ops.cast(weight, part.dtype)
            terms.append(part if is_number and weight == 1.0 else part * factor)
        return self.ops.add(terms)

    # Backward.

    def backward(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients of the targets, from those of the combined channels."""
        columns = self.replica_columns(gradients)
        with self.on_lead():
            return self._sums(columns)

    def _sums(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """The gradients of the targets on all workers."""
        counted = [
            column if target.by_rows else self._counted(column)
            for target, column in zip(self.targets, columns, strict=True)
        ]
        found = sums_on_worker(self.ops, self.targets, counted, self.reduction)
        workers = self.row_split.workers
        largest_over_workers(self.targets, found, workers)
        shared = [
            i
            for i, target in enumerate(self.targets)
            if not target.by_rows and not (workers and target.is_overwritten)
        ]
        totals = sums_over_workers(self.ops, [found[i] for i in shared], workers)
        for i, total in zip(shared, totals, strict=True):
            found[i] = self.targets[i].rounded(self.ops, total)
        return found

    def _counted(self, parts: Sequence[Any]) -> list[Any]:
        pairs = enumerate(parts)
        return [None if part is None else self.counted(part, i) for i, part in pairs]

    def _shares(self, channel: Channel, gradient: Any) -> list[Any]:
        ops = self.ops
        if channel.weights is not None:
            wide = ops.widened(gradient)
            factors = [
                w if isinstance(w, float) else ops.cast(w, wide.dtype)
                for w in channel.weights
            ]
            return [ops.cast(wide * factor, gradient.dtype) for factor in factors]
        parts = parts_of(gradient, self.row_split.times(channel.multiple))
        if parts is not None:
            return parts
        gradient = self.row_split.own(gradient, channel.multiple)
        if len(channel.parts) == 1:
            return [gradient]
        sizes = [size * channel.multiple for size in self.row_split.sizes]
        return ops.split(gradient, sizes)

    def replica_columns(self, gradients: Sequence[Any]) -> list[Sequence[Any]]:
        """For each target the gradient of each replica."""
        with self.on_lead():
            shares = [
                None if gradient is None else self._shares(channel, gradient)
                for channel, gradient in zip(self.channels, gradients, strict=True)
            ]
        self.begin_backward(shares)

        def task(i: int) -> Callable[[], list[Any]]:
            own = [target.locals[i] for target in self.targets]
            outputs = [
                (channel.parts[i], share[i])
                for channel, share in zip(self.channels, shares, strict=True)
                if share is not None
            ]

            def run() -> list[Any]:
                sources = [local for local in own if local is not None]
                found = iter(self.replica_gradients(i, outputs, sources))
                return [None if local is None else next(found) for local in own]

            return run

        per_replica = self.run([task(i) for i in range(len(self.row_split.sizes))])
        return list(zip(*per_replica, strict=True))
