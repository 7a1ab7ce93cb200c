"""Base class of strategies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.collectives import local_results, reduce_gather
from keras_strategies.collectives.cross_device_ops import (
    CrossDeviceOps,
    check_cross_device_ops,
)
from keras_strategies.communication.communicator import loop_of
from keras_strategies.engines import get_engine
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat import patching
from keras_strategies.runtime import context
from keras_strategies.runtime.engine import Feature, StrategyCore, require
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.replicas.returned_values import (
    check_results,
    check_returns,
)
from keras_strategies.strategies.base import unused
from keras_strategies.strategies.base.strategy_checkpoints import StrategyCheckpoints
from keras_strategies.strategies.base.strategy_extended import StrategyExtended
from keras_strategies.strategies.base.strategy_input import StrategyInput
from keras_strategies.strategies.base.strategy_reports import StrategyReports
from keras_strategies.training.model_hooks import install_hooks
from keras_strategies.training.tensorflow_calls import (
    check_no_tensorflow_results,
    check_not_in_tf_function,
    replacements_named,
)
from keras_strategies.types import (
    ReduceOp,
    RunOptions,
    check_flag,
    check_random_numbers,
)
from keras_strategies.values import map_structure, regroup, select_replica


class Strategy(StrategyInput, StrategyReports, StrategyCheckpoints):
    """Placement of variables and computation on devices.

    Base class; create one of its subclasses, which only choose the arguments.

    Args:
        placement: the devices of replicas and variables.
        cross_device_ops: `CrossDeviceOps`, reductions between replicas; None for the
            backend's own.
        sync_batch_norm: bool, whether batch normalization uses the statistics of
            the global batch.
        random_numbers: `"partitioned"` or `"keras"`, see `MirroredStrategy`.
    """

    _cluster_resolver: ClusterResolver | None = None

    def __init__(
        self,
        placement: Placement,
        cross_device_ops: CrossDeviceOps | None = None,
        sync_batch_norm: bool = True,
        random_numbers: str = "partitioned",
    ):
        check_cross_device_ops(cross_device_ops)
        check_flag("sync_batch_norm", sync_batch_norm)
        check_random_numbers(random_numbers)
        engine = get_engine()
        if not sync_batch_norm and placement.replica_counts.total > 1:
            require(engine, Feature.SEPARATE_BATCH_NORM)
        self._cross_device_ops = cross_device_ops
        super().__init__(engine, placement, sync_batch_norm, random_numbers)
        unused.made(self)

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The cluster and the task of this process; None for one process alone."""
        return self._cluster_resolver

    @property
    def num_replicas_in_sync(self) -> int:
        """int, how many replicas compute one step together."""
        return self._placement.replica_counts.total

    @property
    def cross_device_ops(self) -> Any:
        """The strategy's `CrossDeviceOps`; None for the backend's own reductions."""
        return self._cross_device_ops

    @property
    def sync_batch_norm(self) -> bool:
        """bool, whether batch normalization uses the global batch's statistics."""
        return self._sync_batch_norm

    @property
    def random_numbers(self) -> str:
        """`"partitioned"` or `"keras"`, see `ks.MirroredStrategy`."""
        return self._random_numbers

    @property
    def extended(self) -> StrategyExtended:
        """A view of devices, variables and reductions, as `tf.distribute` has it."""
        return StrategyExtended(self)

    @property
    def distribution(self) -> Any:
        """The `keras.distribution.Distribution` underneath; None without one."""
        sharding = self._drivers.sharding
        return None if sharding is None else sharding.distribution

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this strategy current: models created inside use it.

        Returns:
            A context manager; the `as` target is the strategy.

        Raises:
            RuntimeError: inside another strategy's scope ("Mixing different
                strategies").

        Example:

        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        """
        unused.used(self)
        install_hooks()
        with context.opened(self, patching.installed_while("scope")):
            yield self

    def __enter__(self) -> Self:
        # As that of `ParameterServerStrategy`, which ends its cluster.
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends nothing here."""

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` once on each replica, in replica context.

        The Python of `fn` runs in each call, unless the call is in a `ks.function`. On
        JAX it is traced then, once for all replicas, and the trace runs as one program,
        which is compiled if no earlier trace is equal: arrays in it have no values yet.
        Tracing takes many times as long as a step in a `ks.function`. Values that are
        constants of a trace and differ in each call make it compile again: pass them as
        arguments, or hold them in a `keras.Variable`.

        Args:
            fn: callable; ordinary Keras code that may call models, apply optimizers,
                update metrics and assign variables.
            args: list or tuple of structures. Each replica gets its component of
                every `DistributedValues` in them, and everything else as it is.
            kwargs: dict of structures, likewise.
            options: `RunOptions`, or None for the defaults.

        Returns:
            The results as one structure: identical objects are bare, others are
            `PerReplica`. With one replica, its result.

        Raises:
            TypeError: if `options` is something else.
            ValueError: if `args` is not a list or tuple, or if replicas get different
                shapes with `experimental_enable_dynamic_batch_size=False`.
            RuntimeError: inside `run`, or in another strategy's scope.
            WorkersChanged: with `ks.Elastic`, if workers were lost or have joined.

        Example:

        >>> def fn(x):
        ...     return x * ks.get_replica_context().num_replicas_in_sync
        >>> strategy.run(fn, args=(distributed_batch,))
        """
        checked = RunOptions.parse(options)
        self._check_outside_replicas("run")
        check_not_in_tf_function("run")
        if not isinstance(args, (list, tuple)):
            raise InvalidArgumentError(
                "`args` of `run` must be a list or tuple with one entry per "
                f"argument of the function. Received: {type(args).__name__}. Write "
                "`args=(value,)` for one argument."
            )
        check_returns(fn, "run")
        replicas = range(self.replicas_here)
        own_args = [tuple(select_replica(i, list(args))) for i in replicas]
        own_kwargs = [select_replica(i, kwargs or {}) for i in replicas]
        if not checked.experimental_enable_dynamic_batch_size:
            local_results.check_equal_shapes(self, own_args, own_kwargs)

        unused.used(self)
        install_hooks()

        def run() -> list[Any]:
            with context.entered(self), replacements_named():
                return self._drivers.run.run(fn, own_args, own_kwargs)

        results = self._in_loop(fn, run)
        check_results(results)
        check_no_tensorflow_results(results)
        return regroup(results)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int | Sequence[int] | None = None,
    ) -> Any:
        """Reduces a value over replicas.

        Args:
            reduce_op: `ReduceOp` or its name, in any case.
            value: a structure of `PerReplica` and on-read variables. Any other value
                is the same on every replica: its mean, minimum and maximum are the
                value itself.
            axis: int, or a sequence of them: axes to reduce along as well, along which
                lengths may differ between replicas; None to reduce over replicas only.

        Returns:
            The structure of reduced tensors. A mean along an axis divides by the number
            of elements on all replicas together.

        Raises:
            ValueError: for an unknown operation, shapes that do not fit, or the sum of
                a value that is the same on every replica.
            RuntimeError: inside `run`; use `ReplicaContext.all_reduce` there.

        Example:

        >>> strategy.reduce("MEAN", per_example_losses, axis=0)
        """
        self._check_outside_replicas("reduce")
        op = ReduceOp.parse(reduce_op)
        assert isinstance(op, ReduceOp)
        with context.entered(self):
            found = self._in_loop(
                "reduce", lambda: reduce_gather.reduce(self, op, value, axis)
            )
        return self._movable(found)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values.

        Args:
            value: a structure of `PerReplica` tensors.
            axis: int, the axis to concatenate along; lengths may differ there.

        Returns:
            The structure of tensors, parts in replica order.

        Raises:
            ValueError: for scalars, or shapes that differ along another axis.
            RuntimeError: inside `run`; use `ReplicaContext.all_gather` there.
        """
        self._check_outside_replicas("gather")
        with context.entered(self):
            found = self._in_loop(
                "gather", lambda: reduce_gather.gather(self, value, axis)
            )
        return self._movable(found)

    def _movable(self, value: Any) -> Any:
        """A value for operations with variables, which may be on several devices."""
        if self.workers is not None:
            return value
        return map_structure(self._engine.movable, value)

    def _in_loop(self, fn: Any, call: Callable[[], Any]) -> Any:
        """Makes a call in which workers exchange values."""
        loop = loop_of(self.workers)
        if self._engine.in_program():
            loop.check_program()
        return loop.call(fn, call)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a value, one for each replica of this process.

        Args:
            value: a `DistributedValues`; a `keras.Variable`; a structure of them in
                lists, tuples and dictionaries; or another value, which has no
                components.

        Returns:
            tuple: of a `DistributedValues`, its components; of a variable that
            several replicas use, its value on each, as a tensor on that replica's
            device; of a structure, one for each replica, with its components. Of
            anything else, and of a variable of one replica, `(value,)`.
        """
        found = local_results.results(self, value)
        return tuple(self._movable(own) for own in found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # Copies of a model train under the same strategy.
        return self

    def __dir__(self) -> list[str]:
        # `StrategyCore` is what engines and hooks use, and not for users.
        internal = vars(StrategyCore).keys() - vars(Strategy).keys()
        found = super().__dir__()
        return sorted(n for n in found if n not in internal and n[:1] != "_")

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self._placement.replicas)
        text = f"<{type(self).__name__} on {devices}"
        if self.workers is not None:
            group = self.workers.group
            text += f", worker {group.index} of {group.count}"
        return f"{text}>"
