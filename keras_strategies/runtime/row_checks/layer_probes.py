"""Probes of a layer on a few rows: unsplit and in two parts, without side effects.

Random numbers are replaced by a constant, so that parts use the same ones as the
unsplit call. Collectives, such as those of batch normalization, are exact on replicas:
in the parts they return the results of the unsplit call.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import keras
import numpy as np

from keras_strategies import context
from keras_strategies.input.row_splits import split_sizes
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import get_mask, set_mask
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.replicas.collectives import (
    MergeArguments,
    ReplicaCollectives,
    call_merged,
)
from keras_strategies.runtime.state.replica_state import ReplicaState, has_rows
from keras_strategies.types import ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

# Kinds of arguments that are not containers.
_PLAIN = (bool, int, float, str, type(None))


class Randomness(Protocol):
    """Random numbers while a layer is checked."""

    drawn: bool


class LayerProbes(abc.ABC):
    """A framework's calls of a layer on a few rows.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: StrategyCore):
        self.strategy = strategy

    @abc.abstractmethod
    def values_of(self, tensor: Any) -> Any | None:
        """The tensor with its values; None in a program that has only its shape."""

    @abc.abstractmethod
    def first_rows(self, tensor: Any, rows: int | None) -> Any:
        """The first rows of a tensor (None: all), or a substitute."""

    @abc.abstractmethod
    def probing(self, quantile: float) -> contextlib.AbstractContextManager[Randomness]:
        """Context manager for eager calls without gradients and randomness.

        Random numbers are constants inside: this quantile of their range.
        """


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Args:
        layer: the `keras.layers.Layer`.
        call: its original `__call__`, with the layer bound.
        structure: the pair of arguments and keyword arguments.
        leaves: the leaves of the structure, arrays as tensors.
        rows: int, or a tensor in a program for any number of rows.
    """

    layer: Any
    call: Callable[..., Any]
    structure: Any
    leaves: list[Any]
    rows: Any

    def key(self) -> Any:
        """Key of the traits, other than values, that determine the computation."""
        kinds = tuple(
            (len(leaf.shape), leaf.dtype)
            for leaf in self.leaves
            if keras.ops.is_tensor(leaf)
        )
        return flags(self.leaves, {}), kinds

    def arguments(self, leaves: Sequence[Any]) -> Any:
        """The pair of arguments and keyword arguments with other leaves."""
        args, kwargs = self.structure
        names = sorted(kwargs)
        given = (*args, *map(kwargs.__getitem__, names))
        if len(given) != len(leaves) or any(map(operator.is_not, given, self.leaves)):
            return keras.tree.pack_sequence_as(self.structure, leaves)
        # Arguments without containers: `keras.tree` takes 20 microseconds on Torch.
        named = dict(zip(names, leaves[len(args) :], strict=True))
        return tuple(leaves[: len(args)]), {name: named[name] for name in kwargs}


def argument_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The leaves of a call's arguments, in the order of `keras.tree`."""
    given = [*args, *map(kwargs.__getitem__, sorted(kwargs))]
    if all(isinstance(v, _PLAIN) or keras.ops.is_tensor(v) for v in given):
        return given
    found: list[Any] = keras.tree.flatten((args, kwargs))
    return found


def flags(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Flags such as `training` that can change the computation."""
    given = (*args, *kwargs.values())
    return tuple(v for v in given if v is None or isinstance(v, (bool, str)))


class _ReplayedCollectives(ReplicaCollectives):
    """Replays the collective results of the unsplit call in the parts."""

    def __init__(self) -> None:
        self._results: list[Any] = []
        self._next: int | None = None
        self.by_user = False

    def replay(self) -> None:
        self._next = 0

    def batch_statistics(self, value: Any) -> Any:
        if self._next is None:
            self._results.append(value)
            return value
        self._next += 1
        return self._results[self._next - 1]

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        self.by_user = True
        return list(self.batch_statistics(tensors))

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int
    ) -> Sequence[Any]:
        self.by_user = True
        return list(self.batch_statistics(tensors))

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        self.by_user = True
        is_recorded = self._next is None
        result = call_merged(merge, [arguments])[0] if is_recorded else None
        return self.batch_statistics(result)


class _ProbeReplica(context.ReplicaContext):
    """One of two replicas, with collectives that are replayed."""

    def __init__(
        self, strategy: StrategyCore, replica_id: int, collectives: _ReplayedCollectives
    ):
        super().__init__(strategy, replica_id, collectives, num_replicas=2)
        self._replayed = collectives

    @property
    def replica_id_in_sync_group(self) -> int:
        self._replayed.by_user = True
        return super().replica_id_in_sync_group

    @property
    def synchronizes_batch_norm(self) -> bool:
        return True

    def gather_batch_statistics(self, value: Any) -> Any:
        return self._replayed.batch_statistics(value)


@dataclass
class ProbeOutcome:
    """Outputs, losses and updates of one call on a few rows."""

    outputs: list[Any]
    losses: list[Any]
    updates: dict[int, tuple[Any, Any]]
    # Each inner layer's call as it ended, innermost first.
    inner: list[InnerCall]


@dataclass
class InnerCall:
    layer: Any
    outputs: list[Any]
    losses_so_far: int


def _call(
    call: LayerCall, leaves: list[Any], replica: _ProbeReplica, with_inner: bool
) -> ProbeOutcome:
    args, kwargs = call.arguments(leaves)
    state = ReplicaState(raw_value)
    scope = state.scope()
    inner: list[InnerCall] = []

    def recorded(layer: Any, original: Any, args: Any, kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        inner.append(InnerCall(layer, as_arrays(outputs), len(scope.losses)))
        return outputs

    route = recorded if with_inner else None
    with (
        scope,
        context.on_replica(replica),
        layer_calls_through(route),
        _python_numbers_restored(),
    ):
        outputs = call.call(*args, **kwargs)
    return ProbeOutcome(
        as_arrays(outputs),
        [as_array(loss) for loss in scope.losses],
        state.updates,
        inner,
    )


class Probe:
    """The calls on one small batch: unsplit, and in two parts.

    Args:
        probes: the framework's calls.
        call: the layer's call.
        batch: its leaves, some of which are `Rows`.
        with_inner: bool, whether to record inner layers.
    """

    def __init__(
        self,
        probes: LayerProbes,
        call: LayerCall,
        batch: list[Any],
        with_inner: bool = False,
    ):
        self._strategy = probes.strategy
        self._layer_call = call
        self._batch = batch
        self._with_inner = with_inner
        self.rows = next(len(leaf) for leaf in batch if isinstance(leaf, Rows))
        self.sizes = split_sizes(self.rows, 2)
        self.collectives = _ReplayedCollectives()
        self.unsplit = self._outcome(0, batch, 0, self.rows)

    @functools.cached_property
    def first_part(self) -> ProbeOutcome:
        return self._replayed(0, self._batch, 0, self.sizes[0])

    @functools.cached_property
    def parts(self) -> list[ProbeOutcome]:
        second = self._replayed(1, self._batch, self.sizes[0], self.rows)
        return [self.first_part, second]

    def repeated(self, row: int, count: int) -> ProbeOutcome:
        """The call on repetitions of one row, with the statistics of all rows."""
        return self._replayed(0, taken(self._batch, [row] * count), 0, count)

    @property
    def compares_rows(self) -> bool:
        """Whether the outputs of a row show if it depends on the others.

        They do not show it if the layer adds losses or calls collectives itself, which
        are functions of the batch.
        """
        return not (self.unsplit.losses or self.collectives.by_user)

    @property
    def fractions(self) -> list[float]:
        return [size / self.rows for size in self.sizes]

    def _replayed(
        self, replica_id: int, batch: list[Any], start: int, stop: int
    ) -> ProbeOutcome:
        self.collectives.replay()
        return self._outcome(replica_id, batch, start, stop)

    def _outcome(
        self, replica_id: int, batch: list[Any], start: int, stop: int
    ) -> ProbeOutcome:
        leaves = [
            leaf.tensor(start, stop) if isinstance(leaf, Rows) else leaf
            for leaf in batch
        ]
        replica = _ProbeReplica(self._strategy, replica_id, self.collectives)
        try:
            return _call(self._layer_call, leaves, replica, self._with_inner)
        except Exception as error:
            if self.collectives.by_user:
                raise UsesReplicasError from error
            raise


@dataclass
class Rows:
    """Rows of an argument, and their mask."""

    values: Any
    mask: Any = None

    def __len__(self) -> int:
        return int(self.values.shape[0])

    def tensor(self, start: int, stop: int) -> Any:
        part = self.values[start:stop]
        if self.mask is not None:
            set_mask(part, self.mask[start:stop])
        return part

    def take(self, indices: Sequence[int]) -> Rows:
        """Rows by their indices, most of which are equal."""

        def rows(tensor: Any) -> Any:
            each = {i: tensor[i : i + 1] for i in set(indices)}
            return keras.ops.concatenate([each[i] for i in indices])

        mask = None if self.mask is None else rows(self.mask)
        return Rows(rows(self.values), mask)


def first_rows(probes: LayerProbes, call: LayerCall, rows: int) -> list[Any]:
    batch: list[Any] = []
    for leaf in call.leaves:
        if has_rows(leaf, call.rows):
            mask = get_mask(leaf)
            if mask is not None:
                mask = probes.first_rows(mask, rows)
            batch.append(Rows(probes.first_rows(leaf, rows), mask))
        elif keras.ops.is_tensor(leaf):
            batch.append(probes.first_rows(leaf, None))
        else:
            batch.append(leaf)
    lengths = {len(leaf) for leaf in batch if isinstance(leaf, Rows)}
    if len(lengths) > 1:
        raise DifferentRowsError(lengths)
    if rows == 1:
        batch = taken(batch, [0, 0])
    return batch


def taken(batch: list[Any], indices: Sequence[int]) -> list[Any]:
    return [leaf.take(indices) if isinstance(leaf, Rows) else leaf for leaf in batch]


class UsesReplicasError(RuntimeError):
    """A layer that uses its `ReplicaContext` failed in a probe."""


class DifferentRowsError(ValueError):
    def __init__(self, lengths: set[int]):
        super().__init__(f"its inputs have {sorted(lengths)} rows")


@contextlib.contextmanager
def _python_numbers_restored() -> Iterator[None]:
    """Restores the state of Python's and NumPy's random numbers."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def as_arrays(structure: Any) -> list[Any]:
    """The leaves as arrays; None for a leaf that is not a dense tensor."""
    return [
        as_array(leaf) if keras.ops.is_tensor(leaf) else None
        for leaf in keras.tree.flatten(structure)
    ]


def as_array(tensor: Any) -> Any:
    if keras.backend.is_float_dtype(keras.backend.standardize_dtype(tensor.dtype)):
        tensor = keras.ops.cast(tensor, "float32")
    return np.asarray(keras.ops.convert_to_numpy(tensor))
