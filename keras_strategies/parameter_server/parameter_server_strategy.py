"""`ParameterServerStrategy`: variables on parameter servers, asynchronous workers."""

from __future__ import annotations

import contextlib
import importlib.util
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_strategies.cluster.environment import find_cluster
from keras_strategies.cluster.resolver import ClusterResolver, as_resolver
from keras_strategies.cluster.resolvers.local_processes import LocalClusterResolver
from keras_strategies.cluster.spec import check_parameter_server_cluster
from keras_strategies.devices import Device
from keras_strategies.engines import get_engine
from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.parameter_server.coordinator.cluster_options import ClusterOptions
from keras_strategies.parameter_server.coordinator.parameter_server_trainer import (
    ParameterServerTrainer,
)
from keras_strategies.parameter_server.coordinator.process_cluster import (
    ProcessCluster,
)
from keras_strategies.parameter_server.coordinator.remote_functions import (
    RemoteFunctions,
)
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.parameter_server.ray_processes import start_on_ray
from keras_strategies.parameter_server.variables.variable_partitioners import (
    PartitionFunction,
)
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.parameter_server.wire.cluster_keys import cluster_keys
from keras_strategies.parameter_server.wire.variable_description import (
    server_device,
    worker_device,
)
from keras_strategies.processes.ray.ray_resolver import RayClusterResolver
from keras_strategies.reports.worker_status import TrainingStatus
from keras_strategies.runtime.drivers import Drivers
from keras_strategies.runtime.engine import Feature, require
from keras_strategies.runtime.placement import Placement
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.base.strategy_extended import StrategyExtended
from keras_strategies.text_tables import counted
from keras_strategies.timeline import recording
from keras_strategies.types import InputContext, RunOptions

_CPU = Device("cpu", 0)
# For `keras-strategies top`.
_NOT_RECORDED = (
    "`ks.ClusterCoordinator(strategy).status()`, in the script, shows workers and "
    "servers."
)


class ParameterServerStrategy(Strategy):
    """Asynchronous training: variables on parameter servers, steps on workers.

    Each step pulls the variables that it needs from the servers, computes gradients on
    one worker, and pushes them; servers apply the optimizer immediately. Of tables that
    are looked up by rows (`Embedding`, `ops.take`), only the looked-up rows are sent.
    Every step is applied exactly once, also when workers die.

    Optimizers that compute with all rows of a variable at once, such as `Lamb` and
    `Muon`, and those with an `update_step` of their own need unsharded variables and
    update all rows of a table in each step. `Adafactor`, `MultiOptimizer` and
    `LossScaleOptimizer`, which the dtype policy `mixed_float16` brings, are refused.

    A worker computes on the first accelerator that its process sees, and without any on
    the CPU. Servers and the coordinator stay on the CPU: on JAX and TensorFlow
    accelerators are hidden from this process, unless the framework is in use already.

    Without a resolver and without `TF_CONFIG` it starts a cluster on this machine,
    which ends with the strategy: with `close()`, at the end of a `with` block, when the
    strategy is garbage-collected, or when the program ends.

    Args:
        cluster_resolver: a `ClusterResolver`; None for `TF_CONFIG` if it is set, else
            `LocalClusterResolver()`.
        variable_partitioner: one of `ks.experimental.partitioners`, or a callable;
            None for unsharded variables.
        max_staleness: int or None, maximum number of other workers' updates that a
            step's variables may miss. With 0, steps run one after the other, with the
            result of one device; None for no bound.
        pull_ahead: bool, whether a worker pulls the values of later steps while it
            computes a step, if staleness is not bounded. Workers do not wait for
            servers then; a step misses the last update of its own worker, and about
            twice as many of others. False for fresher values, if the loss does not
            fall as on one device.
        lazy_rows: bool, whether an update changes only the looked-up rows of a table,
            also for optimizers that change the others by momentum or weight decay.
            None for True, and for False with `max_staleness=0`.
        snapshot_seconds: float, seconds between snapshots of each server. A server that
            dies is restored from its last one; the updates since then are lost. None
            for no snapshots: then the death of a server is an error.
        snapshot_folder: str, a folder for snapshots, which remain after the strategy
            ends; another strategy does not restore them. None for a temporary one.
        on_snapshot_error: str, reaction to a snapshot that cannot be written because
            the disk is full or the folder is not writable. `"raise"` raises from the
            training method; the variables are intact. `"continue"` warns and continues
            training.
        timeout_seconds: float, timeout for a server's reply, including a restart.
        silence_seconds: float, seconds without a heartbeat after which a process is
            killed and restarted.
        start_seconds: float, timeout for the start of the cluster.
        step_timeout_seconds: float, seconds without a result after which a worker that
            runs a scheduled function or a step is ended and replaced, although its
            process is alive; the function goes to another worker. After three such
            ends it is an error. The first steps of a worker, which compile, must
            finish in this time. None for no timeout.

    Raises:
        ValueError: for an invalid cluster, without a worker or a server or with two
            chiefs; for a partitioner that is not callable.
        RuntimeError: if the cluster does not start in time; as
            `ks.errors.SnapshotError`, if snapshots cannot be written.
        ImportError: if packages of the extra `ps` are missing.

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
        step_timeout_seconds: float | None = None,
    ):
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise InvalidArgumentError(
                "`variable_partitioner` must be one of ks.experimental.partitioners or "
                f"a callable of a shape and a dtype. Received: {variable_partitioner!r}"
            )
        if cluster_resolver is not None:
            resolver = as_resolver(cluster_resolver, "cluster_resolver")
        else:
            resolver = find_cluster() or LocalClusterResolver()
        spec = resolver.cluster_spec()
        check_parameter_server_cluster(spec)
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
            step_timeout_seconds=step_timeout_seconds,
        )
        require(get_engine(), Feature.PARAMETER_SERVERS)
        _check_installed()
        self._resolver = resolver
        # Set by `ClusterCoordinator`, which exists once.
        self._coordinator: Any = None
        with parameter_server_engine().on_cpu():
            super().__init__(Placement((_CPU,), _CPU, mirrored=False))
        self._cluster = _cluster(resolver, options)
        self._finalizer = weakref.finalize(self, self._cluster.close)
        if lazy_rows is None:
            lazy_rows = max_staleness != 0
        assert self._cluster.servers is not None
        self._registry = VariableRegistry(
            self._cluster.servers, variable_partitioner, self._cluster.local
        )
        scheduler = self._cluster.scheduler
        self._functions = RemoteFunctions(
            self, scheduler, self._registry, self._cluster.servers, lazy_rows
        )
        driver = ParameterServerTrainer(
            self.placement, self._registry, self._functions, scheduler
        )
        self._drivers = Drivers(driver, self._drivers.run, servers=driver)
        recording.start(
            processes=1 + options.workers + options.servers, others=_NOT_RECORDED
        )

    @property
    def cluster(self) -> ProcessCluster:
        """The processes of this strategy."""
        return self._cluster

    @property
    def registry(self) -> VariableRegistry:
        """The variables of this strategy."""
        return self._registry

    @property
    def functions(self) -> RemoteFunctions:
        """The functions and models that workers run."""
        return self._functions

    @property
    def max_staleness(self) -> int | None:
        """int or None, maximum number of updates that a step's variables may miss."""
        return self._cluster.options.max_staleness

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster's tasks."""
        return self._resolver

    @property
    def extended(self) -> StrategyExtended:
        """Devices, variables and reductions, as in `tf.distribute`."""
        return ParameterServerExtended(self)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` on a worker and waits for its return value.

        In a scheduled function it runs a step of that worker. On the coordinator it
        schedules `fn` and waits, so that only one worker is busy: schedule functions to
        use all workers. `fn` runs in another process: its changes of Python objects are
        not visible here.

        Args:
            fn: callable; ordinary Keras code that may call models, apply optimizers,
                update metrics and assign variables.
            args: list or tuple of structures.
            kwargs: dict of structures.
            options: `RunOptions`, or None for the defaults.

        Returns:
            The return value of `fn`, with tensors of the backend.

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
        if parameter_server_engine().is_tracing():
            raise ContextError(
                "`run` of a ParameterServerStrategy was called while a ks.function was "
                "traced on the coordinator. Schedule that function on a worker "
                "instead: `ks.ClusterCoordinator(strategy).schedule(step, "
                "args=(...))`."
            )
        return self._functions.run(fn, args, kwargs or {})

    def status(self) -> TrainingStatus:
        raise ContextError(
            "`strategy.status()` is for synchronous workers, which "
            "ParameterServerStrategy does not have. Call "
            "`ks.ClusterCoordinator(strategy).status()` for its workers and servers."
        )

    def input_context(self) -> InputContext:
        return InputContext(1, 0, 1)

    def close(self) -> None:
        """Ends the cluster, which deletes its variables; may be called repeatedly."""
        self._finalizer()

    def __enter__(self) -> ParameterServerStrategy:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        workers = counted(self._cluster.options.workers, "worker")
        servers = counted(len(self._cluster.scheduler.servers), "parameter server")
        return f"<ParameterServerStrategy with {workers} and {servers}>"


class ParameterServerExtended(StrategyExtended):
    """Devices and variables of a `ParameterServerStrategy`."""

    _strategy: ParameterServerStrategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """tuple of str, the device of each worker."""
        workers = self._strategy.cluster.scheduler.workers.values()
        return tuple(worker_device(w.index, w.device or "cpu:0") for w in workers)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """tuple of str, the device of each parameter server."""
        servers = range(len(self._strategy.cluster.scheduler.servers))
        return tuple(map(server_device, servers))

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Any) -> Iterator[None]:
        """Creates variables, unsharded, on the server of another one.

        Args:
            colocate_with_variable: a `keras.Variable` of this strategy; of a
                sharded one, the server of its first shard.

        Raises:
            RuntimeError: if the variable is not this strategy's.
        """
        with (
            super().colocate_vars_with(colocate_with_variable),
            self._strategy.registry.colocated(colocate_with_variable),
        ):
            yield


def _check_installed() -> None:
    """Raises ImportError if a package of the extra `ps` is missing."""
    if importlib.util.find_spec("zmq") is None:
        raise ImportError(
            "ParameterServerStrategy needs zmq, which is not installed. Run "
            '`pip install "keras-strategies[ps]"`.'
        )


def _cluster(resolver: ClusterResolver, options: ClusterOptions) -> ProcessCluster:
    """The cluster of a resolver: local processes, or those of `ks.Server`."""
    if isinstance(resolver, LocalClusterResolver):
        return ProcessCluster(options)
    if isinstance(resolver, RayClusterResolver) and resolver.is_driver:
        return start_on_ray(resolver, options)
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
