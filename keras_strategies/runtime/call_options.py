"""`CommunicationOptions` of a single call: supported and refused fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.types import CommunicationImplementation, CommunicationOptions

if TYPE_CHECKING:
    from keras_strategies.communication.communicator import Communicator
    from keras_strategies.devices import Device

_AT_CONSTRUCTION = (
    "Pass it to the strategy, as in "
    "ks.MultiWorkerMirroredStrategy(communication_options=...) and omit it here."
)


def call_options(
    options: Any, workers: Communicator | None = None
) -> CommunicationOptions:
    """The options of one call, checked against those of the workers' engine.

    The engine between workers, its messages and its timeout are chosen when workers
    connect; a call can only repeat them. A timeout without other workers bounds a wait
    that does not occur, and `bytes_per_pack` is a hint, as in `tf.distribute`.

    Raises:
        ValueError: for an engine or a timeout that the call cannot have.
    """
    found = CommunicationOptions.parse(options)
    engine = CommunicationImplementation.AUTO if workers is None else _engine(workers)
    if found.implementation not in (CommunicationImplementation.AUTO, engine):
        raise InvalidArgumentError(
            f"`options` requests implementation {found.implementation.name!r}, "  # type: ignore[union-attr]
            f"but the workers use {engine.name!r}, chosen when they connected. "
            f"{_AT_CONSTRUCTION}"
        )
    seconds = found.timeout_seconds
    if workers is not None and seconds not in (None, workers.group.timeout):
        raise InvalidArgumentError(
            f"`options` requests timeout_seconds={seconds}, but the timeout "
            f"between the workers is {workers.group.timeout} seconds, set when they "
            f"connected. {_AT_CONSTRUCTION}"
        )
    return found


def _engine(workers: Communicator) -> CommunicationImplementation:
    return CommunicationImplementation(workers.options.implementation)


def check_implementation(
    options: CommunicationOptions, backend: str, devices: Sequence[Device]
) -> None:
    """Raises if the requested engine does not support the devices.

    Args:
        options: the strategy's options.
        backend: str, the name of the backend.
        devices: the devices of this process's replicas.

    Raises:
        ValueError: for NCCL on other devices than GPUs, and, on JAX, for RING on
            other devices than CPUs.
    """
    wanted = options.implementation
    others = sorted({d.kind for d in devices if d.kind != "gpu"})
    if wanted is CommunicationImplementation.NCCL and others:
        raise InvalidArgumentError(
            "CommunicationImplementation.NCCL connects GPUs, but this process's "
            f"replicas are on {', '.join(map(str, devices))}. Use AUTO or RING."
        )
    others = sorted({d.kind for d in devices if d.kind != "cpu"})
    if wanted is CommunicationImplementation.RING and backend == "jax" and others:
        raise InvalidArgumentError(
            "CommunicationImplementation.RING on JAX is Gloo, which connects CPUs "
            "only, but this process's replicas are on "
            f"{', '.join(map(str, devices))}. Use AUTO: XLA chooses the collectives "
            "of accelerators."
        )
