"""`CommunicationOptions` of a single call: supported and refused fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.communication.packing import pack_indices
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.runtime.placement import itemsize
from keras_strategies.runtime.tensor_packs import pack, unpack
from keras_strategies.types import (
    CommunicationImplementation,
    CommunicationOptions,
    ReduceOp,
)
from keras_strategies.values import flatten, map_structure

if TYPE_CHECKING:
    from keras_strategies.communication.communicator import Communicator
    from keras_strategies.devices import Device
    from keras_strategies.runtime.engine import Engine

_AT_CONSTRUCTION = (
    "Pass it to the strategy, as in "
    "ks.MultiWorkerMirroredStrategy(communication_options=...) and omit it here."
)


def call_options(
    options: Any, workers: Communicator | None = None
) -> CommunicationOptions:
    """The options of one call, checked against those of the workers' engine.

    `bytes_per_pack` is the call's own. The engine between workers and its timeout are
    chosen when workers connect; a call can only repeat them. A timeout without other
    workers bounds a wait that does not occur.

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


def gather_options(options: Any, workers: Communicator | None = None) -> None:
    """Checks the options of an `all_gather`, which sends tensors one by one.

    Raises:
        ValueError: for packs, and as `call_options`.
    """
    found = call_options(options, workers)
    if found.bytes_per_pack:
        raise InvalidArgumentError(
            "`all_gather` sends each tensor separately, since lengths may differ "
            "between replicas. Omit `bytes_per_pack` from `options`. Received: "
            f"bytes_per_pack={found.bytes_per_pack}"
        )


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


def all_reduce_in_packs(
    engine: Engine,
    all_reduce: Callable[[ReduceOp, Sequence[Any]], Sequence[Any]],
    op: ReduceOp,
    value: Any,
    bytes_per_pack: int,
) -> Any:
    """Reduces a structure in messages of about so many bytes each.

    Args:
        engine: the engine of the tensors.
        all_reduce: reduces a list of tensors.
        op: the operation.
        value: structure of tensors.
        bytes_per_pack: int, bytes of a message.
    """
    leaves = [keras.ops.convert_to_tensor(leaf) for leaf in flatten(value)]
    results: list[Any] = [None] * len(leaves)
    for indices in _packs(leaves, bytes_per_pack):
        like = [leaves[i] for i in indices]
        [reduced] = all_reduce(op, [pack(engine, like)])
        for i, tensor in zip(indices, unpack(engine, reduced, like), strict=True):
            results[i] = tensor
    rest = iter(results)
    return map_structure(lambda _: next(rest), value)


def _packs(tensors: Sequence[Any], bytes_per_pack: int) -> list[list[int]]:
    """Indices of tensors that travel together; one of unknown shape goes alone."""
    dtypes = [keras.backend.standardize_dtype(tensor.dtype) for tensor in tensors]
    sizes, kinds = [], []
    for i, (tensor, dtype) in enumerate(zip(tensors, dtypes, strict=True)):
        shape = tuple(tensor.shape)
        is_known = None not in shape
        sizes.append(math.prod(shape) * itemsize(dtype) if is_known else 0)
        kinds.append((dtype, None if is_known else i))
    return pack_indices(kinds, sizes, bytes_per_pack=bytes_per_pack)
