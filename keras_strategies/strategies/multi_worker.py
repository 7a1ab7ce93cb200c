"""Mirrored replicas on several machines, one process for each worker."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable, Sequence

import keras

from keras_strategies import cluster
from keras_strategies.cluster import (
    ClusterResolver,
    SimpleClusterResolver,
)
from keras_strategies.cluster.environment import ELASTIC, is_port_shared, run_identifier
from keras_strategies.cluster.group import WorkerGroup, uncaught_errors
from keras_strategies.cluster.group.membership import Membership, elastic_settings
from keras_strategies.cluster.resolver import as_resolver
from keras_strategies.cluster.spec import check_training_cluster, worker_addresses
from keras_strategies.collectives.cross_device_ops import (
    CrossDeviceOps,
    check_cross_device_ops,
)
from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.joined_workers import (
    JoinedCluster,
    joined_cluster,
    joined_workers,
    set_joined_cluster,
)
from keras_strategies.devices import Device, as_devices
from keras_strategies.engines import get_engine
from keras_strategies.errors import ClusterError
from keras_strategies.processes.device_processes import end_others
from keras_strategies.processes.resolvers import check_has_started, find_resolver
from keras_strategies.runtime.call_options import check_implementation
from keras_strategies.runtime.engine import Engine, Feature, require
from keras_strategies.runtime.placement import Placement
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.device_selection import (
    choose_devices,
    default_devices,
    keep_own_accelerator,
)
from keras_strategies.training.elastic.elastic_actions import ElasticActions
from keras_strategies.training.random_sync import sync_random_numbers
from keras_strategies.types import (
    CommunicationOptions,
    Elastic,
    check_random_numbers,
)

#: Default timeout between workers, in seconds.
DEFAULT_TIMEOUT = 300.0


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on several machines, with one process on each.

    Every process, a *worker*, runs the same script. Each global batch is split over
    the replicas of all workers, each of which has a copy of the variables. Weights,
    losses and metrics are the same on all workers, and equal those of one device on the
    full batch. Initial weights and random seeds are those of the chief: worker 0, or
    the task `chief`.

    Without a cluster, in the environment or the resolver, it is one worker, as
    `MirroredStrategy`. Workers connect once: later strategies of the process use the
    same connections.

    Args:
        cluster_resolver: `ks.cluster_resolver.ClusterResolver`; None for the cluster of
            the environment (see `ks.cluster_resolver.find_cluster`).
        communication_options: `CommunicationOptions`; `timeout_seconds` is the timeout
            of collectives and heartbeats, 300 seconds by default, set by the first
            strategy of the process. `bytes_per_pack` is the size of messages, on JAX of
            those outside of compiled steps. `implementation`: on Torch and TensorFlow,
            NCCL or RING (Gloo or gRPC) between GPUs; on JAX, where XLA chooses, NCCL is
            for GPUs and RING, which is Gloo, for CPUs.
        devices: sequence of str or device objects, this worker's devices; None for
            all its accelerators, or all its CPU devices where there are none. If
            torchrun, MPI or SLURM runs several workers on a machine, it is the
            accelerator of the worker's number there.
        cross_device_ops: as for `MirroredStrategy`.
        sync_batch_norm: bool, whether batch normalization uses the statistics of the
            global batch (see `MirroredStrategy`).
        random_numbers: `"partitioned"` or `"keras"`, as for `MirroredStrategy`.
        elastic: `Elastic`, for training that continues when workers are lost, return or
            join, under `fit` and in loops that catch `WorkersChanged`; None to end with
            an error when one is lost, unless `keras-strategies launch --elastic` has
            started the workers.

    Raises:
        ValueError: for an invalid cluster, a port in use, two workers with one index,
            workers that differ in backend or versions, or NCCL between devices other
            than GPUs.
        RuntimeError: if workers do not connect in time.

    Example:

    >>> strategy = ks.MultiWorkerMirroredStrategy()
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> model.fit(x, y, batch_size=64)  # 64 rows over all workers
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices: Sequence[object] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        sync_batch_norm: bool = True,
        random_numbers: str = "partitioned",
        elastic: Elastic | None = None,
    ):
        engine = get_engine()
        Elastic.check(elastic)
        check_random_numbers(random_numbers)  # Before workers connect.
        elastic = elastic or _elastic_of_launcher()
        check_cross_device_ops(cross_device_ops)
        # Before devices are listed: connecting engines adds those of other workers.
        resolver, workers, options = find_workers(
            engine, cluster_resolver, communication_options, devices, elastic
        )
        self._cluster_resolver = resolver
        replicas: list[Device] = []

        def choose() -> int:
            replicas[:] = (
                default_devices(engine)
                if devices is None
                else choose_devices(engine, devices)
            )
            check_implementation(options, engine.name, replicas)
            return len(replicas)

        if workers is None:
            choose()
        else:
            workers = workers.with_replicas(choose)
        placement = Placement(
            tuple(replicas), replicas[0], mirrored=True, workers=workers
        )
        super().__init__(placement, cross_device_ops, sync_batch_norm, random_numbers)
        if workers is not None:
            actions, group = workers.actions, workers
            actions.follow(self)
            actions.prepare(lambda: sync_random_numbers(engine, group.group))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The description of the cluster and of this task; empty without a cluster."""
        return self._cluster_resolver or SimpleClusterResolver({})


def find_workers(
    engine: Engine,
    cluster_resolver: ClusterResolver | None,
    communication_options: CommunicationOptions | None,
    devices: Sequence[object] | None,
    elastic: Elastic | None = None,
) -> tuple[ClusterResolver | None, Communicator | None, CommunicationOptions]:
    """The resolver, given or from the environment, the connected workers, the options.

    Args:
        engine: the engine.
        cluster_resolver, communication_options, devices, elastic: as of
            `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: for arguments of other types, and as `MultiWorkerMirroredStrategy`.
    """
    options = CommunicationOptions.parse(communication_options, "communication_options")
    if devices is not None:
        # Before workers connect, so that none waits for this one.
        check_implementation(options, engine.name, as_devices(devices))
    else:
        keep_own_accelerator(engine)
    resolver: ClusterResolver | None
    if cluster_resolver is not None:
        resolver = as_resolver(cluster_resolver, "cluster_resolver")
    else:
        resolver = find_resolver()
    if resolver is None:
        return None, None, options
    workers = join_workers(resolver, engine, options, elastic)
    if workers is not None and communication_options is not None:
        workers = workers.with_options(options)
    return resolver, workers, options


def join_workers(
    resolver: ClusterResolver,
    engine: Engine,
    options: CommunicationOptions,
    elastic: Elastic | None = None,
    absence: Callable[[], str | None] = lambda: None,
) -> Communicator | None:
    """Connects the workers of a cluster; None if this is the only one.

    Args:
        resolver: the cluster and the task of this process.
        engine: the engine.
        options: `CommunicationOptions`.
        elastic: `Elastic`; None for a fixed group.
        absence: as for `WorkerGroup.join`.
    """
    check_has_started(resolver)
    spec = resolver.cluster_spec()
    resolver.check_task()
    if resolver.task_type == "evaluator" or resolver.num_workers == 1:
        return None
    check_training_cluster(spec)
    assert resolver.task_type is not None and resolver.task_id is not None
    addresses = worker_addresses(spec)
    index = cluster.id_in_cluster(spec, resolver.task_type, resolver.task_id)
    joined = joined_cluster()
    if joined is not None:
        if (joined.addresses, joined.index) != (tuple(addresses), index):
            raise ClusterError(
                f"This process is worker {index} of {addresses}, but has already "
                f"joined another cluster: {list(joined.addresses)}. Use a separate "
                "process for each cluster."
            )
        _check_elastic(joined.workers, elastic)
        return joined.workers
    same = {"the backend": engine.name, "the Keras version": keras.__version__}
    timeout = options.timeout_seconds or DEFAULT_TIMEOUT
    job = run_identifier(addresses, resolver.num_workers)
    actions: ElasticActions | None = None
    if elastic is None:
        group = WorkerGroup.join(
            addresses,
            index,
            same,
            timeout=timeout,
            job=job,
            shares_port=is_port_shared(resolver),
            absence=absence,
        )
    else:
        require(engine, Feature.ELASTIC_WORKERS)
        _check_addresses(resolver)
        settings = elastic_settings(elastic, addresses, timeout)
        membership = Membership(settings, index, same, job, is_ready=False)
        actions = ElasticActions(membership)
        group = membership.group
    try:
        workers = engine.connect(group, options)
        if actions is not None:
            workers.actions = actions
            actions.register(workers)
        workers.actions.prepare(workers.start)
    except BaseException as error:
        group.report(error)
        group.leave()
        raise
    set_joined_cluster(JoinedCluster(tuple(addresses), index, workers))
    return workers


def _elastic_of_launcher() -> Elastic | None:
    # "1:4": the minimum, and the number of workers.
    given = os.environ.get(ELASTIC)
    if not given:
        return None
    least, most = given.split(":")
    return Elastic(int(least), int(most))


def _check_addresses(resolver: ClusterResolver) -> None:
    if any(":" not in address for address in worker_addresses(resolver.cluster_spec())):
        raise ClusterError(
            f"`elastic` was given, but {type(resolver).__name__} has the address of "
            "the first worker only; elastic workers need one each. Start them with "
            "`keras-strategies launch --elastic 1:N script.py`, or set TF_CONFIG."
        )


def _check_elastic(workers: Communicator, elastic: Elastic | None) -> None:
    if workers.actions.is_fixed != (elastic is None):
        raise ClusterError(
            "The workers are already connected "
            f"{'without' if workers.actions.is_fixed else 'with'} `elastic`, and all "
            "strategies use this connection. Pass the same `elastic` to each of them."
        )


def leave_cluster() -> None:
    """Closes the engine and leaves the group."""
    workers = joined_workers()
    if workers is None:
        return
    set_joined_cluster(None)
    workers.close()
    workers.actions.leave()


def _end_process() -> None:
    workers = joined_workers()
    is_lost = workers is not None and workers.group.loss() is not None
    if workers is not None:
        uncaught_errors.at_exit(workers.group)
    leave_cluster()
    if is_lost:
        # Skips the interpreter's last garbage collection, which takes seconds on a busy
        # machine while other workers wait for this process to end.
        gc.freeze()
    end_others()


atexit.register(_end_process)
