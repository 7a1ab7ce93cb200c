"""Variables on parameter servers, workers that train by themselves."""

from __future__ import annotations

import contextlib
import importlib.util
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_strategies import keras_compat
from keras_strategies.cluster.environment import find_cluster
from keras_strategies.cluster.resolver import ClusterResolver, as_resolver
from keras_strategies.cluster.resolvers.local_processes import LocalClusterResolver
from keras_strategies.cluster.spec import check_parameter_server_cluster
from keras_strategies.devices import Device
from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.parameter_server.coordinator.parameter_server_trainer import (
    ParameterServerTrainer,
)
from keras_strategies.parameter_server.coordinator.process_cluster import (
    ClusterOptions,
    ProcessCluster,
)
from keras_strategies.parameter_server.engines import get_engine
from keras_strategies.parameter_server.variables.variable_partitioners import (
    PartitionFunction,
)
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.parameter_server.wire.cluster_secret import cluster_keys
from keras_strategies.parameter_server.wire.variable_description import server_device
from keras_strategies.runtime.placement import Placement
from keras_strategies.strategies.base import Strategy
from keras_strategies.strategies.extended import StrategyExtended
from keras_strategies.types import InputContext, RunOptions

_CPU = Device("cpu", 0)


class ParameterServerStrategy(Strategy):
    """Asynchronous training: parameter servers keep variables, workers make steps.

    Each step pulls the variables that it needs from the servers, computes gradients on
    one worker, and pushes them; servers apply the optimizer at once. Of tables that are
    looked up by rows (`Embedding`, `ops.take`), only the touched rows travel. Every
    step counts exactly once, also when workers die.

    With a `LossScaleOptimizer`, which the dtype policy `mixed_float16` brings, a step
    with a gradient that is not finite updates nothing, and halves the scale that it was
    computed with, unless another worker's step has changed that scale before.

    All of Keras's optimizers can be used. One that computes with all rows of a variable
    together, as `Lamb`, `Muon` and `Adafactor` do, needs variables that are not cut,
    and updates a whole table for the rows that a batch looks up.

    Without a resolver and without `TF_CONFIG` it starts a cluster of its own on this
    machine, which ends with the strategy: with `close()`, at the end of a `with` block,
    when the strategy is garbage, or when the program ends.

    Args:
        cluster_resolver: a `ClusterResolver`; None for what `TF_CONFIG` says, else
            for `LocalClusterResolver()`.
        variable_partitioner: one of `ks.experimental.partitioners`, or a callable;
            None keeps each variable whole on one server.
        max_staleness: int or None, how many updates of others a step's variables may
            miss. 0 makes steps one after the other, which equals one device; None does
            not bound it.
        pull_ahead: bool, whether a worker asks for a step's values while it makes the
            step before, where staleness is not bounded. No worker waits for servers
            then; a step misses the last update of its own worker, and about twice as
            many of others. False for fresher values, where a loss does not fall as it
            does on one device.
        lazy_rows: bool, whether an update touches only the rows of a table that a
            batch has looked up, also where an optimizer would move others, by momentum
            or weight decay. None for True, and for False with `max_staleness=0`.
        snapshot_seconds: float, seconds between snapshots of each server. A server that
            dies goes on from its last one: at most the updates of that time are lost.
            None for no snapshots: then the death of a server is an error.
        snapshot_folder: str, a folder for snapshots, which stay there when the strategy
            ends; another strategy that is given it begins anew. None for a temporary
            one.
        on_snapshot_error: str, what happens when a server cannot write a snapshot
            because its disk is full or its folder cannot be written. `"raise"` raises
            from the method that trains; the variables are intact. `"continue"` warns
            and trains on.
        timeout_seconds: float, seconds that a server may take to answer, a restart
            included.
        silence_seconds: float, seconds without a sign of life after which a process is
            killed and replaced.
        start_seconds: float, seconds in which the cluster must have started.

    Raises:
        ValueError: for a cluster that cannot be: without a worker or a server, with two
            chiefs; for a partitioner that is not callable.
        RuntimeError: if the cluster does not start in time; as
            `ks.errors.SnapshotError`, if snapshots cannot be written.
        ImportError: if what the extra `ps` installs is missing.

    Example:

    >>> partitioner = ks.experimental.partitioners.MaxSizePartitioner(256 << 20)
    >>> strategy = ks.ParameterServerStrategy(variable_partitioner=partitioner)
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Embedding(10_000_000, 64), ...])
    ...     model.compile("adagrad", "binary_crossentropy")
    >>> model.fit(dataset, epochs=3, steps_per_epoch=1000)
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: PartitionFunction | None = None,
        *,
        max_staleness: int | None = None,
        pull_ahead: bool = True,
        lazy_rows: bool | None = None,
        snapshot_seconds: float | None = None,
        snapshot_folder: str | None = None,
        on_snapshot_error: str = "raise",
        timeout_seconds: float = 120.0,
        silence_seconds: float = 30.0,
        start_seconds: float = 180.0,
    ):
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgumentError(
                "`variable_partitioner` must be one of ks.experimental.partitioners or "
                f"a callable of a shape and a dtype. Received: {variable_partitioner!r}"
            )
        if max_staleness is not None and (
            isinstance(max_staleness, bool)
            or not isinstance(max_staleness, int)
            or max_staleness < 0
        ):
            raise InvalidArgumentError(
                "`max_staleness` must be an int of 0 or more, or None for no "
                f"bound. Received: {max_staleness!r}"
            )
        for name, seconds in (
            ("snapshot_seconds", snapshot_seconds),
            ("timeout_seconds", timeout_seconds),
            ("silence_seconds", silence_seconds),
            ("start_seconds", start_seconds),
        ):
            if seconds is not None and not seconds > 0:
                raise InvalidArgumentError(
                    f"`{name}` must be a positive number of seconds. Received: "
                    f"{seconds!r}"
                )
        if on_snapshot_error not in ("raise", "continue"):
            raise InvalidArgumentError(
                "`on_snapshot_error` must be 'raise' or 'continue'. Received: "
                f"{on_snapshot_error!r}"
            )
        if cluster_resolver is not None:
            resolver = as_resolver(cluster_resolver, "cluster_resolver")
        else:
            resolver = find_cluster() or LocalClusterResolver()
        spec = resolver.cluster_spec()
        check_parameter_server_cluster(spec)
        _check_installed(isinstance(resolver, LocalClusterResolver))
        self._resolver = resolver
        self._coordinator: Any = None
        super().__init__(Placement((_CPU,), _CPU, mirrored=False))
        keras_compat.install_patches("parameter servers")
        get_engine().install()
        options = ClusterOptions(
            workers=spec.num_tasks("worker"),
            servers=spec.num_tasks("ps"),
            max_staleness=max_staleness,
            pull_ahead=pull_ahead and max_staleness is None,
            snapshot_seconds=snapshot_seconds,
            snapshot_folder=snapshot_folder,
            on_snapshot_error=on_snapshot_error,
            timeout_seconds=timeout_seconds,
            silence_seconds=silence_seconds,
            start_seconds=start_seconds,
        )
        self._cluster = _cluster(resolver, options)
        self._finalizer = weakref.finalize(self, self._cluster.close)
        if lazy_rows is None:
            lazy_rows = max_staleness != 0
        assert self._cluster.servers is not None
        self._registry = VariableRegistry(
            self._cluster.servers, variable_partitioner, self._cluster.local, lazy_rows
        )
        self._trainer = ParameterServerTrainer(self)

    @property
    def cluster(self) -> ProcessCluster:
        """The processes of this strategy."""
        return self._cluster

    @property
    def registry(self) -> VariableRegistry:
        """The variables of this strategy."""
        return self._registry

    @property
    def max_staleness(self) -> int | None:
        """int or None, how many updates of others a step's variables may miss."""
        return self._cluster.options.max_staleness

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """What says who is who in the cluster."""
        return self._resolver

    @property
    def extended(self) -> StrategyExtended:
        """Devices, variables and reductions, as `tf.distribute` has them."""
        return ParameterServerExtended(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` on a worker and waits for what it returns.

        In a function that `ClusterCoordinator.schedule` has scheduled, it makes a step
        of that worker. Anywhere else the coordinator schedules `fn` and waits, so that
        workers do not run side by side: schedule functions for that. `fn` runs in
        another process: what it does to Python objects is not seen here.

        Args:
            fn: callable; ordinary Keras code that may call models, apply optimizers,
                update metrics and assign variables.
            args: list or tuple of structures.
            kwargs: dict of structures.
            options: `RunOptions`, or None for the defaults.

        Returns:
            What `fn` returns, with tensors of the backend.

        Raises:
            ValueError: if `args` is not a list or tuple.
            RuntimeError: inside a `ks.function` that was not scheduled.

        Example:

        >>> loss = strategy.run(train_step, args=(batch,))
        """
        RunOptions.parse(options)
        if not isinstance(args, (list, tuple)):
            raise InvalidArgumentError(
                "`args` of `run` must be a list or tuple with one entry per argument "
                f"of the function. Received: {type(args).__name__}. Write "
                "`args=(value,)` for one argument."
            )
        if get_engine().is_tracing():
            raise ContextError(
                "`run` of a ParameterServerStrategy was called while a ks.function was "
                "traced on the coordinator. Schedule that function on a worker "
                "instead: `ks.ClusterCoordinator(strategy).schedule(step, "
                "args=(...))`."
            )
        from keras_strategies.parameter_server.coordinator.cluster_coordinator import (
            ClusterCoordinator,
        )

        return ClusterCoordinator(self).run_now(fn, args, kwargs or {})

    def input_context(self) -> InputContext:
        return InputContext(1, 0, 1)

    def close(self) -> None:
        """Ends the cluster; variables are gone then. May be called again."""
        self._finalizer()

    def __enter__(self) -> ParameterServerStrategy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        options = self._cluster.options
        return (
            f"<ParameterServerStrategy with {options.workers} workers and "
            f"{options.servers} parameter servers>"
        )


class ParameterServerExtended(StrategyExtended):
    """Devices and variables of a `ParameterServerStrategy`."""

    _strategy: ParameterServerStrategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """tuple of str, the device of each worker."""
        workers = range(self._strategy.cluster.options.workers)
        return tuple(f"/job:worker/replica:0/task:{i}/device:CPU:0" for i in workers)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """tuple of str, the device of each parameter server."""
        servers = range(self._strategy.cluster.options.servers)
        return tuple(map(server_device, servers))

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Makes variables, in one part, on the server of another one.

        Args:
            colocate_with_variable: a `keras.Variable` of this strategy; of a
                partitioned one, the server of its first part.

        Raises:
            RuntimeError: if the variable is not this strategy's.
        """
        with (
            super().colocate_vars_with(colocate_with_variable),
            self._strategy.registry.colocated(colocate_with_variable),
        ):
            yield


def _check_installed(is_local: bool) -> None:
    """Raises for what the cluster's processes would miss one after the other."""
    names = ["zmq", "ray"] if is_local else ["zmq"]
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"ParameterServerStrategy needs {' and '.join(missing)}, which is not "
            'installed. Run `pip install "keras-strategies[ps]"`.'
        )


def _cluster(resolver: ClusterResolver, options: ClusterOptions) -> ProcessCluster:
    """The processes that a resolver describes: our own, or those of `ks.Server`."""
    if isinstance(resolver, LocalClusterResolver):
        return ProcessCluster(options)
    if resolver.task_type != "chief":
        raise InvalidArgumentError(
            "Only the coordinator, the task 'chief', creates a "
            f"ParameterServerStrategy; this process is {resolver.task_type!r} "
            f"{resolver.task_id}. Call `ks.Server(...).join()` in workers and "
            "parameter servers, and `ks.SidecarEvaluator(...).start()` in an evaluator."
        )
    spec = resolver.cluster_spec()
    servers = [f"tcp://{spec.task_address('ps', i)}" for i in spec.task_indices("ps")]
    control = f"tcp://{spec.task_address('chief', resolver.task_id or 0)}"
    return ProcessCluster(options, control, servers, cluster_keys())
