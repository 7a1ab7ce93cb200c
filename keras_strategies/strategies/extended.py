"""`strategy.extended`: a thin view of a strategy's parts, as `tf.distribute` has it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from keras_strategies import context
from keras_strategies.collectives import ReductionToOneDevice
from keras_strategies.errors import ContextError
from keras_strategies.types import ReduceOp
from keras_strategies.values import map_structure

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy


class StrategyExtended:
    """Devices, variables and reductions of a strategy.

    Args:
        strategy: the strategy that this is a view of.
    """

    def __init__(self, strategy: Strategy):
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """tuple of str, the device of each local replica."""
        return tuple(str(device) for device in self._strategy.placement.replicas)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """tuple of str, the devices that keep variables."""
        return tuple(str(device) for device in self._strategy.placement.keepers)

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Whether a `keras.Variable` was made in this strategy's scope."""
        return self._strategy.created(variable)

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Makes variables where another one is.

        Args:
            colocate_with_variable: a `keras.Variable` of this strategy.

        Raises:
            RuntimeError: if the variable is not this strategy's.
        """
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ContextError(
                f"Variable {colocate_with_variable.path!r} was not made in the scope "
                f"of {self._strategy!r}; colocate with one that was."
            )
        with self._strategy.scope():
            yield

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any
    ) -> Any:
        """Reduces a value onto devices; see `CrossDeviceOps.reduce`."""
        (result,) = self.batch_reduce_to(reduce_op, [(value, destinations)])
        return result

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
    ) -> list[Any]:
        """Reduces values onto devices; see `CrossDeviceOps.batch_reduce`."""
        ops = self._strategy.cross_device_ops or ReductionToOneDevice()
        return ops.batch_reduce(reduce_op, value_destination_pairs)

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
                updates are the same everywhere.
            kwargs: dict, likewise.
            group: accepted for `tf.distribute`'s sake; has no effect.

        Raises:
            RuntimeError: in replica context; use `merge_call` to leave it.
        """
        del group
        if context.current_replica() is not None:
            raise ContextError(
                "`extended.update` was called in replica context. Call it in "
                "cross-replica context: outside of `run`, or in a `merge_call`."
            )

        def first(leaf: Any) -> Any:
            return self._strategy.experimental_local_results(leaf)[0]

        own_args, own_kwargs = map_structure(first, (list(args), kwargs or {}))
        return fn(var, *own_args, **own_kwargs)
