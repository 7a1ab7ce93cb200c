"""Replicas on the cores of TPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keras_strategies.cluster import ClusterResolver
from keras_strategies.cluster.resolver import as_resolver
from keras_strategies.devices import Device
from keras_strategies.engines import get_engine
from keras_strategies.errors import BackendError, InvalidArgumentError
from keras_strategies.layouts import (
    BATCH_AXIS,
    MIN_SHARD_BYTES,
    MODEL_AXIS,
    AutoLayouts,
    VariableMesh,
)
from keras_strategies.runtime.engine import Engine, Feature, require
from keras_strategies.runtime.placement import Placement
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.device_selection import choose_devices
from keras_strategies.strategies.multi_worker import join_workers
from keras_strategies.types import CommunicationOptions


@dataclass(frozen=True)
class DeviceAssignment:
    """The cores of each replica.

    Args:
        devices: sequence of sequences of device names or objects: the cores of each
            replica, the same number for all. For development, devices other than TPUs
            may be named; they are used in the same way.

    Raises:
        ValueError: if replicas have different numbers of cores, or none.

    Example:

    >>> ks.DeviceAssignment([["tpu:0", "tpu:1"], ["tpu:2", "tpu:3"]])
    """

    devices: Sequence[Sequence[object]]

    def __post_init__(self) -> None:
        rows = tuple(tuple(row) for row in self.devices)
        if not rows or not rows[0] or len({len(row) for row in rows}) > 1:
            raise InvalidArgumentError(
                "A device assignment lists the cores of each replica, the same "
                "number for all, as in [['tpu:0', 'tpu:1'], ['tpu:2', 'tpu:3']]. "
                f"Received: {self.devices!r}"
            )
        object.__setattr__(self, "devices", rows)

    @property
    def num_replicas(self) -> int:
        """int, the number of replicas."""
        return len(self.devices)

    @property
    def num_cores_per_replica(self) -> int:
        """int, the number of cores of each replica."""
        return len(self.devices[0])


class TPUStrategy(Strategy):
    """Synchronous training on TPU cores, on JAX.

    Every core is a replica with a copy of the variables, as with `MirroredStrategy` on
    other accelerators. A device assignment can assign several cores to a replica: with
    SPMD partitioning, large variables are sharded over these as by
    `ModelParallelStrategy("auto")`; without it only the first core of each replica
    computes.

    Args:
        tpu_cluster_resolver: `ks.cluster_resolver.TPUClusterResolver`, for a slice of
            several machines, each of which runs the script; None for the TPUs of this
            machine.
        experimental_device_assignment: `DeviceAssignment`; None for a replica on each
            core.
        experimental_spmd_xla_partitioning: bool, whether variables are sharded over the
            cores of a replica; None for False.

    Raises:
        RuntimeError: if there is no TPU; the message lists the devices.
        ValueError: for cores that do not exist or are named twice, and for SPMD
            partitioning over the machines of a slice.

    Example:

    >>> strategy = ks.TPUStrategy()
    >>> with strategy.scope():
    ...     model = keras.Sequential([keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool | None = None,
    ):
        engine = get_engine()
        assignment = experimental_device_assignment
        if assignment is not None and not isinstance(assignment, DeviceAssignment):
            raise InvalidArgumentError(
                "`experimental_device_assignment` must be a ks.DeviceAssignment. "
                f"Received: {assignment!r} of type {type(assignment).__name__}"
            )
        resolver = tpu_cluster_resolver
        if resolver is not None:
            resolver = as_resolver(resolver, "tpu_cluster_resolver")
        self._cluster_resolver = resolver
        workers = None
        if resolver is not None:
            workers = join_workers(resolver, engine, CommunicationOptions())
        rows = _cores(engine, assignment)
        if workers is not None:
            workers = workers.with_replicas(lambda: len(rows))
        is_sharded = bool(experimental_spmd_xla_partitioning) and len(rows[0]) > 1
        if is_sharded and workers is not None:
            raise InvalidArgumentError(
                "SPMD partitioning shards variables over the cores of one machine, "
                f"but this slice has {workers.group.count} machines. Omit "
                "`experimental_spmd_xla_partitioning`, or use one machine."
            )
        replicas = tuple(row[0] for row in rows)
        mesh = None
        if is_sharded:
            require(engine, Feature.SHARDED_VARIABLES)
            shape = (len(rows), len(rows[0]))
            rule = AutoLayouts(MODEL_AXIS, shape[1], MIN_SHARD_BYTES)
            cores = tuple(core for row in rows for core in row)
            mesh = VariableMesh(shape, (BATCH_AXIS, MODEL_AXIS), cores, rule, None)
        super().__init__(
            Placement(
                replicas,
                replicas[0],
                mirrored=mesh is None,
                workers=workers,
                mesh=mesh,
            )
        )


def _cores(
    engine: Engine, assignment: DeviceAssignment | None
) -> list[tuple[Device, ...]]:
    """The cores of each replica."""
    if assignment is not None:
        names = [name for row in assignment.devices for name in row]
        chosen = choose_devices(engine, names, "experimental_device_assignment")
        if any(device.kind == "tpu" for device in chosen):
            require(engine, Feature.TPUS)
        width = assignment.num_cores_per_replica
        return [chosen[i : i + width] for i in range(0, len(chosen), width)]
    found = engine.local_devices()
    tpus = [device for device in found if device.kind == "tpu"]
    if tpus:
        require(engine, Feature.TPUS)
        return [(device,) for device in tpus]
    install = "On a machine with TPUs, install JAX for them: pip install 'jax[tpu]'."
    raise BackendError(
        f"No TPU was found. The {engine.name} backend has the devices "
        f"{', '.join(map(str, found))}, and none of the kind 'tpu'. "
        f"{engine.lacks.get(Feature.TPUS, install)} To try the strategy on other "
        "devices, name them in `experimental_device_assignment="
        "ks.DeviceAssignment([['cpu:0'], ['cpu:1']])`."
    )
