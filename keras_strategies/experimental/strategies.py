"""Strategies with the signatures that `tf.distribute.experimental` has for them.

`ks.experimental` exports them by the names that they have there.
"""

from __future__ import annotations

from collections.abc import Sequence

from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.strategies import multi_worker, tpu
from keras_strategies.types import (
    CommunicationImplementation,
    CommunicationOptions,
)


class ExperimentalMultiWorkerMirroredStrategy(multi_worker.MultiWorkerMirroredStrategy):
    """`ks.MultiWorkerMirroredStrategy`, with the arguments in the older order.

    Args:
        communication: `CommunicationImplementation` or its name, the engine of
            collectives between workers.
        cluster_resolver: as for `ks.MultiWorkerMirroredStrategy`.
        communication_options: `CommunicationOptions`, instead of `communication`.
        devices: as for `ks.MultiWorkerMirroredStrategy`.
        sync_batch_norm: as for `ks.MultiWorkerMirroredStrategy`.
        random_numbers: as for `ks.MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: if both `communication` and `communication_options` are given, and
            as `ks.MultiWorkerMirroredStrategy`.

    Example:

    >>> strategy = ks.experimental.MultiWorkerMirroredStrategy(
    ...     ks.experimental.CollectiveCommunication.RING)
    """

    def __init__(
        self,
        communication: CommunicationImplementation | str = "AUTO",
        cluster_resolver: ClusterResolver | None = None,
        *,
        communication_options: CommunicationOptions | None = None,
        devices: Sequence[str] | None = None,
        sync_batch_norm: bool = True,
        random_numbers: str = "partitioned",
    ):
        chosen = CommunicationImplementation.parse(communication)
        if chosen is not CommunicationImplementation.AUTO:
            if communication_options is not None:
                raise InvalidArgumentError(
                    "Both `communication` and `communication_options` were given: "
                    f"{communication!r} and {communication_options!r}. Write "
                    "`communication_options=CommunicationOptions(implementation=...)`."
                )
            communication_options = CommunicationOptions(implementation=chosen)
        super().__init__(
            cluster_resolver,
            communication_options,
            devices=devices,
            sync_batch_norm=sync_batch_norm,
            random_numbers=random_numbers,
        )


class ExperimentalTPUStrategy(tpu.TPUStrategy):
    """`ks.TPUStrategy`, with the older name of the device assignment.

    Args:
        tpu_cluster_resolver: as for `ks.TPUStrategy`.
        device_assignment: `ks.DeviceAssignment`; None for a replica on each core.

    Example:

    >>> strategy = ks.experimental.TPUStrategy(device_assignment=assignment)
    """

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        device_assignment: tpu.DeviceAssignment | None = None,
    ):
        super().__init__(tpu_cluster_resolver, device_assignment)
