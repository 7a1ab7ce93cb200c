"""`strategy.extended`: a thin view of a strategy's parts, as `tf.distribute` has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.collectives.reduce_gather import reduce_onto
from keras_strategies.errors import ContextError, InvalidTypeError
from keras_strategies.runtime import context
from keras_strategies.runtime.colocation import colocated_with
from keras_strategies.types import CommunicationOptions, ReduceOp, check_flag
from keras_strategies.values import DistributedValues, map_structure

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class StrategyExtended:
    """Devices, variables and reductions of a strategy.

    Args:
        strategy: the strategy that this is a view of.
    """

    def __init__(self, strategy: StrategyCore):
        self._strategy = strategy

    def __repr__(self) -> str:
        return f"<StrategyExtended of {self._strategy!r}>"

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """tuple of str, the device of each local replica."""
        return tuple(str(device) for device in self._strategy.placement.replicas)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """tuple of str, the devices that hold variables.

        On Torch all virtual CPUs have one memory, which is named once.
        """
        devices = self._strategy.drivers.fit.planned_devices(is_weight=True)
        return tuple(str(device) for device in devices)

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether a `keras.Variable` was made in this strategy's scope.

        Args:
            v: a `keras.Variable`; False is returned for anything else.
        """
        return self._strategy.created(v)

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Colocates new variables with another one, in the scope of the strategy.

        New variables have copies on the same devices. If the given variable is sharded
        over a mesh, new ones of the same shape have its layout, and others are
        replicated.

        Args:
            colocate_with_variable: a `keras.Variable` of this strategy.

        Returns:
            A context manager.

        Raises:
            TypeError: if it is something else.
            RuntimeError: if the variable is not of this strategy.

        Example:

        >>> with strategy.extended.colocate_vars_with(kernel):
        ...     average = keras.Variable(keras.ops.zeros(kernel.shape))
        """
        if not isinstance(colocate_with_variable, keras.Variable):
            raise InvalidTypeError(
                "`colocate_with_variable` must be a keras.Variable of this "
                f"strategy. Received: {colocate_with_variable!r} of type "
                f"{type(colocate_with_variable).__name__}"
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ContextError(
                f"Variable {colocate_with_variable.path!r} was not created in the "
                f"scope of {self._strategy!r}; colocate with one that was."
            )
        with self._strategy.scope(), colocated_with(colocate_with_variable):
            yield

    def value_container(self, value: Any) -> Any:
        """Returns the value itself: components do not refer to their container."""
        return value

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduces a value over all replicas, onto devices of this process.

        Args:
            reduce_op: `ReduceOp` or its name.
            value: `PerReplica` of tensors of one shape.
            destinations: a device name or object, a sequence of them, or a
                `DistributedValues`, tensor or variable, for its devices.
            options: `CommunicationOptions`; `implementation` and `timeout_seconds` must
                be those of the strategy.

        Returns:
            A tensor for one destination, `Mirrored` for several.

        Raises:
            ValueError: as `CrossDeviceOps.reduce`.
            RuntimeError: in replica context; use `ReplicaContext.all_reduce` there.
        """
        pairs = [(value, destinations)]
        (result,) = self.batch_reduce_to(reduce_op, pairs, options)
        return result

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces many values together; see `reduce_to`.

        Args:
            reduce_op: `ReduceOp` or its name.
            value_destination_pairs: sequence of `(value, destinations)`.
            options: as for `reduce_to`.

        Returns:
            list of results, as of `reduce_to`.
        """
        if context.current_replica() is not None:
            raise ContextError(
                "`extended.reduce_to` and `batch_reduce_to` were called in replica "
                "context, where a value has one component. Use "
                "`ks.get_replica_context().all_reduce` there."
            )
        op = ReduceOp.parse(reduce_op)
        assert isinstance(op, ReduceOp)
        found = reduce_onto(self._strategy, op, value_destination_pairs, options)
        if self._strategy.workers is not None:
            return found
        return [self._strategy.engine.movable(value) for value in found]

    def update(
        self,
        var: Any,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls `fn(var, *args, **kwargs)` to update a variable, once for all copies.

        Args:
            var: a `keras.Variable`.
            fn: callable that assigns it.
            args: tuple; of a `DistributedValues` the first component is used, since
                updates are equal on all replicas.
            kwargs: dict, likewise.
            group: bool, whether to return the result of `fn` once. False returns lists
                with an entry for each local replica, as `tf.distribute` does.

        Returns:
            The result of `fn`; with `group=False`, its structure with lists as leaves.

        Raises:
            TypeError: if `fn` is not callable, or `group` is not a bool.
            RuntimeError: in replica context; use `merge_call` to leave it.
        """
        check_flag("group", group)
        if not callable(fn):
            raise InvalidTypeError(
                "`fn` of `extended.update` must be a function of the variable and "
                f"`args`. Received: {fn!r} of type {type(fn).__name__}"
            )
        if context.current_replica() is not None:
            raise ContextError(
                "`extended.update` was called in replica context. Call it in "
                "cross-replica context: outside of `run`, or in a `merge_call`."
            )

        driver = self._strategy.drivers.run

        def first(leaf: Any) -> Any:
            if not isinstance(leaf, DistributedValues):
                return leaf
            return driver.colocated_with_variable(var, leaf.values[0])

        own_args, own_kwargs = map_structure(first, (list(args), kwargs or {}))
        result = fn(var, *own_args, **own_kwargs)
        if group:
            return result
        count = self._strategy.placement.replica_counts.count
        return map_structure(lambda leaf: [leaf] * count, result)
