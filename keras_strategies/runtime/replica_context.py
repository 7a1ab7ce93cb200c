"""The context of code on a replica: its number, and collectives of all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.runtime.call_options import call_options
from keras_strategies.runtime.frames import merged_replicas
from keras_strategies.types import CommunicationOptions, ReduceOp

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore
    from keras_strategies.runtime.replicas.collectives import ReplicaCollectives


class ReplicaContext:
    """Context of code on one replica: its index, devices and collectives.

    `Strategy.run` creates it; `ks.get_replica_context()` returns it.

    Example:

    >>> def fn():
    ...     context = ks.get_replica_context()
    ...     return context.replica_id_in_sync_group
    >>> strategy.run(fn)
    """

    def __init__(
        self,
        strategy: StrategyCore,
        replica_id: int,
        collectives: ReplicaCollectives,
        num_replicas: int | None = None,
        on_read: Callable[[str], None] | None = None,
        is_proof: bool = False,
    ):
        self._strategy = strategy
        self._replica_id = replica_id
        self._collectives = collectives
        self._num_replicas = num_replicas
        # Called with the name of a property that differs between replicas.
        self._on_read = on_read
        #: Whether a layer call is proved, with the statistics of the global batch also
        #: where a strategy has those of each replica, for which its user asked.
        self.is_proof = is_proof

    @property
    def strategy(self) -> StrategyCore:
        """The strategy of this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """int, the number of this replica, from 0."""
        if self._on_read is not None:
            self._on_read("replica_id_in_sync_group")
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """int, how many replicas run together."""
        if self._num_replicas is not None:
            return self._num_replicas
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """tuple of str, the device of this replica.

        Raises:
            ReplicaMismatchError: on JAX, where one program is traced for several
                replicas.
        """
        if self._on_read is not None:
            self._on_read("devices")
        placement = self._strategy.placement
        local = self._replica_id - placement.replica_counts.first
        return (str(placement.replicas[local]),)

    @property
    def synchronizes_batch_norm(self) -> bool:
        """bool, whether batch normalization uses the global batch."""
        return self.is_proof or self._strategy.sync_batch_norm

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduces a structure of tensors over all replicas, for all of them.

        Args:
            reduce_op: `ReduceOp` or its name.
            value: a structure of tensors, with the same shapes on each replica.
            options: `CommunicationOptions`, or None for those of the strategy.
                `implementation` and `timeout_seconds` must be those of the strategy.

        Returns:
            The structure, reduced. Its gradient is the same all-reduce. A mean of
            integers is a float.

        Raises:
            ValueError: for an unknown operation, or options that differ from those of
                the strategy.
        """
        op = ReduceOp.parse(reduce_op)
        assert isinstance(op, ReduceOp)
        if options is not None:
            call_options(options, self._strategy.workers)
        if op is ReduceOp.SUM and type(value) in (int, float):
            total = self._collectives.total(self._local_id, value)
            if total is not None:
                return keras.ops.convert_to_tensor(total)
        return self._on_tensors(lambda tensors: self._all_reduce(op, tensors), value)

    def _all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> Sequence[Any]:
        if op is ReduceOp.MEAN:
            integers = [i for i, tensor in enumerate(tensors) if _is_integer(tensor)]
            if integers:
                return self._mean(tensors, integers)
        return self._collectives.all_reduce(self._local_id, op, tensors)

    def _mean(self, tensors: Sequence[Any], integers: Sequence[int]) -> list[Any]:
        """Means of tensors; those of integers, by number, are fractions."""
        floats = [i for i in range(len(tensors)) if i not in integers]
        found: list[Any] = [None] * len(tensors)
        for op, numbers in ((ReduceOp.SUM, integers), (ReduceOp.MEAN, floats)):
            own = [tensors[i] for i in numbers]
            if op is ReduceOp.SUM:
                own = [_without_overflow(tensor) for tensor in own]
            if own:
                reduced = self._collectives.all_reduce(self._local_id, op, own)
                for i, tensor in zip(numbers, reduced, strict=True):
                    found[i] = tensor
        for i in integers:
            found[i] = keras.ops.divide(found[i], self.num_replicas_in_sync)
        return found

    def _on_tensors(
        self, collective: Callable[[list[Any]], Sequence[Any]], value: Any
    ) -> Any:
        """The result of a collective on the leaves of a structure, as tensors."""
        leaves = keras.tree.flatten(value)
        found = collective([keras.ops.convert_to_tensor(leaf) for leaf in leaves])
        return keras.tree.pack_sequence_as(value, list(found))

    @property
    def shows_warnings(self) -> bool:
        """bool, whether warnings about a layer call are shown for this replica.

        One replica of a process shows what is the same on all of them.
        """
        if self.is_proof:
            # The call itself shows them.
            return False
        return self._is_of_all or self._local_id == 0

    @property
    def _is_of_all(self) -> bool:
        # In one trace of all replicas the number is a tensor.
        return not isinstance(self._replica_id, int)

    @property
    def _local_id(self) -> int:
        first = self._collectives.first
        return self._replica_id - first if first else self._replica_id

    def all_gather(
        self, value: Any, axis: int, options: CommunicationOptions | None = None
    ) -> Any:
        """Concatenates a structure of tensors over all replicas, for all of them.

        Args:
            value: a structure of tensors; lengths may differ along `axis` only.
            axis: int, the axis to concatenate along.
            options: `CommunicationOptions` with the strategy's implementation and
                timeout, or None.

        Returns:
            The structure, concatenated in replica order; differentiable.

        Raises:
            ValueError: for other options.
        """
        if options is not None:
            call_options(options, self._strategy.workers)
        return self._on_tensors(
            lambda tensors: self._collectives.all_gather(self._local_id, tensors, axis),
            value,
        )

    def gather_batch_statistics(self, value: Any) -> Any:
        """Concatenates batch statistics of all replicas along axis 0."""
        return self._on_tensors(
            lambda tensors: self._collectives.all_gather(
                self._local_id, tensors, 0, are_equal=True
            ),
            value,
        )

    def with_gradient(
        self, fn: Callable[..., tuple[Any, Callable[..., Any]]], tensor: Any
    ) -> Any:
        """Calls a function of a tensor that defines its own gradient.

        Args:
            fn: returns a tuple of tensors, and a function from their gradients to that
                of the argument. Some engines ignore that function and differentiate the
                operations of `fn`, which must therefore be differentiable.
            tensor: the argument.

        Returns:
            The tuple of tensors.
        """
        decorator = self._collectives.custom_gradient
        return fn(tensor)[0] if decorator is None else decorator(fn)(tensor)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `merge_fn(strategy, ...)` once, in cross-replica context.

        Every replica must make the call. Arguments that differ between replicas are
        passed as `PerReplica`; of such a result each replica gets its component.
        """

        def merge(*args: Any, **kwargs: Any) -> Any:
            with merged_replicas(self._strategy):
                return merge_fn(self._strategy, *args, **kwargs)

        arguments = tuple(args), dict(kwargs or {})
        return self._collectives.merge_call(self._local_id, merge, arguments)

    def __repr__(self) -> str:
        if self._is_of_all:
            return f"<ReplicaContext of each replica of {self._strategy!r}>"
        return (
            f"<ReplicaContext {self._replica_id} of {self.num_replicas_in_sync} "
            f"on {self.devices[0]}>"
        )


def _is_integer(tensor: Any) -> bool:
    """Whether a tensor holds integers."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return dtype.startswith(("int", "uint"))


def _without_overflow(tensor: Any) -> Any:
    """An integer tensor of at least 32 bits, which sums over replicas fit into."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return keras.ops.cast(tensor, "int32") if dtype.endswith(("8", "16")) else tensor
