"""The boundary between the global batch and the replicas that compute it.

Tensors cross it in channels: parts on replicas become a tensor of the global batch, and
its gradient is split again. Gradients of the replicas' copies of variables are summed,
those of slices of inputs are concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategies.communication.communicator import Communicator
from keras_strategies.runtime.data_parallel.row_parts import parts_of
from keras_strategies.runtime.data_parallel.split_plan import Channel, SplitPlan
from keras_strategies.runtime.replicas.gradient_sums import (
    largest_over_replicas,
    sums_over_replicas,
    sums_over_workers,
)
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.types import ReduceOp


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
        as_row_parts: callable of the gradients of the slices, which makes one tensor
            of them whose rows stay on their replicas, as those of the input do; None
            for other inputs.
        is_overwritten: bool, whether gradients are new values of the variable, of which
            the largest counts.
    """

    tensor: Any
    locals: list[Any]
    by_rows: bool
    variable: Any = None
    as_row_parts: Callable[[Sequence[Any]], Any] | None = None
    is_overwritten: bool = False

    def joined_rows(self, ops: TensorPrimitives, parts: Sequence[Any]) -> Any:
        """The gradient of an input, from those of its slices; None without any."""
        if all(part is None for part in parts):
            return None
        filled = [
            keras.ops.zeros_like(local) if part is None else part
            for part, local in zip(parts, self.locals, strict=True)
        ]
        if self.as_row_parts is not None:
            return self.as_row_parts(filled)
        return ops.concatenate([ops.to_device_of(p, self.tensor) for p in filled])

    def rounded(self, ops: TensorPrimitives, total: Any) -> Any:
        """A sum of gradients in the dtype that it has on one device."""
        if total is None:
            return None
        read = self.locals[0]
        if read is None:
            read = next(local for local in self.locals if local is not None)
        if total.dtype == read.dtype == self.tensor.dtype:
            return total
        return ops.cast(ops.cast(total, read.dtype), self.tensor.dtype)


def sums_on_worker(
    ops: TensorPrimitives,
    targets: Sequence[GradientTarget],
    columns: Sequence[Sequence[Any]],
) -> list[Any]:
    """The gradient of each target, from those of the local replicas, not rounded.

    Args:
        ops: the functions of the framework's tensors.
        targets: the variables and inputs that receive gradients.
        columns: for each target the gradient of each replica.
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
            None if part is None else ops.to_device_of(part, target.tensor)
            for part in parts
        ]
        for target, parts in pairs
        if not target.by_rows
    ]
    sums = iter(sums_over_replicas(ops, shared))
    return [
        target.joined_rows(ops, parts) if target.by_rows else next(sums)
        for target, parts in pairs
    ]


def largest_over_workers(
    targets: Sequence[GradientTarget], found: list[Any], workers: Communicator | None
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


def combined(plan: SplitPlan, channel: Channel) -> Any:
    """The global tensor of a channel, without gradient."""
    if channel.is_in_parts:
        return plan.as_row_parts(channel.parts, channel.multiple)
    with plan.on_lead():
        if channel.are_equal:
            return plan.to_lead(channel.parts[0])
        if channel.weights is None:
            parts = [plan.to_lead(part) for part in channel.parts]
            own = plan.ops.concatenate(parts)
            return plan.row_split.joined(own, channel.multiple)
        own, dtype = sum_on_worker(plan, channel), channel.parts[0].dtype
        [total] = plan.row_split.summed([own])
        return plan.ops.cast(total, dtype)


def sum_on_worker(plan: SplitPlan, channel: Channel) -> Any:
    """The weighted sum of the parts of this worker, not rounded."""
    assert channel.weights is not None
    terms, row_split = [], plan.row_split
    for part, weight, size in zip(
        channel.parts, channel.weights, row_split.sizes, strict=True
    ):
        part = plan.ops.widened(plan.to_lead(part))
        if not row_split.all_have_rows:
            # What a replica computes without rows need not be a number.
            part = keras.ops.where(size > 0, part, keras.ops.zeros_like(part))
        is_number = isinstance(weight, float)
        factor = weight if is_number else plan.ops.cast(weight, part.dtype)
        terms.append(part if is_number and weight == 1.0 else part * factor)
    return plan.ops.add(terms)


@dataclass(frozen=True)
class BackwardPass:
    """What one replica computes in the backward pass.

    Args:
        outputs: pairs of a tensor that the call has computed, and its gradient.
        sources: the tensors to differentiate by.
    """

    outputs: list[tuple[Any, Any]]
    sources: list[Any]


@dataclass(frozen=True)
class GradientBoundary:
    """The tensors of one layer call that have gradients, outside of its replicas.

    Args:
        plan: the plan of the call.
        channels: the tensors that the call computes.
        targets: the variables and inputs that receive gradients.
        before: the variables that the call assigns, with their values before it.
    """

    plan: SplitPlan
    channels: list[Channel]
    targets: list[GradientTarget]
    before: list[tuple[Any, Any]]

    def combined(self) -> list[Any]:
        """The global tensors of the channels, without gradient."""
        return [combined(self.plan, each) for each in self.channels]

    def shares(self, gradients: Sequence[Any]) -> list[list[Any] | None]:
        """For each channel the gradient of each part; None without a gradient.

        Args:
            gradients: those of the global tensors; None without one.
        """
        with self.plan.on_lead():
            return [
                None if gradient is None else self._shares(channel, gradient)
                for channel, gradient in zip(self.channels, gradients, strict=True)
            ]

    def _shares(self, channel: Channel, gradient: Any) -> list[Any]:
        ops, row_split = self.plan.ops, self.plan.row_split
        if channel.weights is not None:
            wide = ops.widened(gradient)
            factors = [
                w if isinstance(w, float) else ops.cast(w, wide.dtype)
                for w in channel.weights
            ]
            return [ops.cast(wide * factor, gradient.dtype) for factor in factors]
        parts = parts_of(gradient, row_split.times(channel.multiple))
        if parts is not None:
            return parts
        gradient = row_split.own(gradient, channel.multiple)
        if len(channel.parts) == 1:
            return [gradient]
        sizes = [size * channel.multiple for size in row_split.sizes]
        return ops.split(gradient, sizes)

    def backward(self, shares: Sequence[list[Any] | None]) -> list[BackwardPass]:
        """The backward pass of each local replica.

        Args:
            shares: see `shares`.
        """
        present = [
            (channel, share)
            for channel, share in zip(self.channels, shares, strict=True)
            if share is not None
        ]
        return [
            BackwardPass(
                [(channel.parts[i], share[i]) for channel, share in present],
                [t.locals[i] for t in self.targets if t.locals[i] is not None],
            )
            for i in range(len(self.plan.row_split.sizes))
        ]

    def columns(self, gradients: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """For each target the gradient of each replica; None where it has no copy.

        Args:
            gradients: for each replica those of the sources of its backward pass.
        """
        if len(gradients) == 1:
            return [[gradient] for gradient in gradients[0]]
        found = list(map(iter, gradients))
        return [
            [
                None if local is None else next(of_replica)
                for local, of_replica in zip(target.locals, found, strict=True)
            ]
            for target in self.targets
        ]

    def sums(self, columns: Sequence[Sequence[Any]]) -> list[Any]:
        """The gradients of the targets on all workers, from those of the replicas."""
        plan = self.plan
        with plan.on_lead():
            found = sums_on_worker(plan.ops, self.targets, columns)
            workers = plan.row_split.workers
            largest_over_workers(self.targets, found, workers)
            shared = [
                i
                for i, target in enumerate(self.targets)
                if not target.by_rows and not (workers and target.is_overwritten)
            ]
            totals = sums_over_workers(plan.ops, [found[i] for i in shared], workers)
            for i, total in zip(shared, totals, strict=True):
                found[i] = self.targets[i].rounded(plan.ops, total)
            return found
