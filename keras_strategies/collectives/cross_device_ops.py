"""`CrossDeviceOps`: how the values of several devices become one."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_strategies.backends import get_backend
from keras_strategies.backends.base import Backend
from keras_strategies.collectives.packs import pack, pack_indices, unpack
from keras_strategies.devices import Device, parse_device
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.types import ReduceOp
from keras_strategies.values import DistributedValues, Mirrored


class CrossDeviceOps(abc.ABC):
    """Reduces and broadcasts values between the devices of one machine.

    A value is a `PerReplica` with a tensor per device, all of one shape and dtype.
    """

    @property
    def backend(self) -> Backend:
        return get_backend()

    def reduce(
        self, reduce_op: ReduceOp | str, per_replica_value: Any, destinations: Any
    ) -> Any:
        """Reduces a value and puts the result on the destinations.

        Args:
            reduce_op: `ReduceOp` or its name, in any case.
            per_replica_value: `PerReplica` of tensors; a tensor is a value of one.
            destinations: a device name, a sequence of them, or a
                `DistributedValues`, whose devices are meant.

        Returns:
            A tensor for one destination, `Mirrored` for several.

        Raises:
            ValueError: for an unknown operation, tensors that differ in shape, or
                destinations that are none.

        Example:

        >>> ks.ReductionToOneDevice().reduce("sum", per_replica, ["cpu:0", "cpu:1"])
        """
        (result,) = self.batch_reduce(reduce_op, [(per_replica_value, destinations)])
        return result

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
    ) -> list[Any]:
        """Reduces many values together, packed where this kind of reduction packs.

        Args:
            reduce_op: `ReduceOp` or its name.
            value_destination_pairs: sequence of `(value, destinations)`, as for
                `reduce`.

        Returns:
            list of results, as of `reduce`.
        """
        op = ReduceOp.parse(reduce_op)
        assert isinstance(op, ReduceOp)
        values = [_components(value) for value, _ in value_destination_pairs]
        devices = [
            _destinations(destinations, self.backend)
            for _, destinations in value_destination_pairs
        ]
        results: list[Any] = [None] * len(values)
        for indices in self._packs(values):
            packed = [
                pack([values[i][replica] for i in indices])
                for replica in range(len(values[indices[0]]))
            ]
            wanted = list(dict.fromkeys(d for i in indices for d in devices[i]))
            placed = self._reduce(op, packed, wanted)
            for device, tensor in zip(wanted, placed, strict=True):
                parts = unpack(tensor, [values[i][0] for i in indices])
                for i, part in zip(indices, parts, strict=True):
                    if device in devices[i]:
                        results[i] = {**(results[i] or {}), device: part}
        return [
            _result([found[device] for device in wanted])
            for found, wanted in zip(results, devices, strict=True)
        ]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to the destinations.

        Args:
            tensor: a tensor.
            destinations: as for `reduce`.

        Returns:
            A tensor for one destination, `Mirrored` for several.
        """
        devices = _destinations(destinations, self.backend)
        return _result(self.backend.broadcast(tensor, devices))

    def _packs(self, values: Sequence[Sequence[Any]]) -> list[list[int]]:
        """Which values travel together; each on its own unless a class packs."""
        return [[i] for i in range(len(values))]

    @abc.abstractmethod
    def _reduce(
        self, op: ReduceOp, tensors: Sequence[Any], devices: Sequence[Device]
    ) -> list[Any]:
        """Reduces one tensor per device; the result on each of `devices`."""


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one device, reduces them there and copies the result.

    Args:
        reduce_to_device: str, the device to reduce on; None for the destination.
        accumulation_fn: callable of a list of tensors that returns their sum; None
            for the backend's sum. Used for SUM and MEAN.
    """

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ):
        self._device = (
            None if reduce_to_device is None else parse_device(reduce_to_device)
        )
        self._accumulate = accumulation_fn

    def _reduce(
        self, op: ReduceOp, tensors: Sequence[Any], devices: Sequence[Device]
    ) -> list[Any]:
        home = self._device or devices[0]
        moved = [self.backend.to_device(tensor, home) for tensor in tensors]
        if self._accumulate is not None and op in (ReduceOp.SUM, ReduceOp.MEAN):
            reduced = self._accumulate(moved)
            if op is ReduceOp.MEAN:
                reduced = reduced / len(moved)
        else:
            reduced = self.backend.all_reduce(op, moved)[0]
        return self.backend.broadcast(reduced, devices)


class _PackedAllReduce(CrossDeviceOps):
    """An all-reduce between the devices of the values, in packs.

    Args:
        num_packs: int, how many packs the tensors of a `batch_reduce` make; 0 sends
            each tensor on its own.

    Raises:
        ValueError: for a negative number.
    """

    def __init__(self, num_packs: int = 1):
        if num_packs < 0:
            raise InvalidArgumentError(
                f"`num_packs` is 0 or more. Received: num_packs={num_packs}"
            )
        self._num_packs = num_packs

    def _packs(self, values: Sequence[Sequence[Any]]) -> list[list[int]]:
        firsts = [value[0] for value in values]
        dtypes = [keras.backend.standardize_dtype(first.dtype) for first in firsts]
        # The number of replicas is part of what must agree within a pack.
        kinds = [f"{d} x {len(v)}" for d, v in zip(dtypes, values, strict=True)]
        sizes = [math.prod(first.shape) for first in firsts]
        return pack_indices(kinds, sizes, num_packs=self._num_packs)


class NcclAllReduce(_PackedAllReduce):
    """All-reduce by the backend's own engine, by NCCL between NVIDIA GPUs.

    - JAX: an XLA collective, which is NCCL's between GPUs.
    - Torch: `torch.cuda.nccl` for floating-point values on different GPUs. Values that
      a gradient is wanted of, and all others, are copied to the first device, reduced
      there and copied back.
    - TensorFlow: values are copied to the first device, reduced there and copied back.

    The results are the same up to the order of the sums.
    """

    def _reduce(
        self, op: ReduceOp, tensors: Sequence[Any], devices: Sequence[Device]
    ) -> list[Any]:
        reduced = self.backend.all_reduce(op, tensors)
        have = [self.backend.device_of(tensor) for tensor in reduced]
        if have == list(devices):
            return reduced
        return self.backend.broadcast(reduced[0], devices)


class HierarchicalCopyAllReduce(_PackedAllReduce):
    """All-reduce in two steps: within halves of the devices, then between them.

    It suits machines whose devices form two groups with fast links inside.
    """

    def _reduce(
        self, op: ReduceOp, tensors: Sequence[Any], devices: Sequence[Device]
    ) -> list[Any]:
        inner = ReduceOp.SUM if op is ReduceOp.MEAN else op
        middle = max(1, len(tensors) // 2)
        halves = [half for half in (tensors[:middle], tensors[middle:]) if half]
        partial = [self.backend.all_reduce(inner, half)[0] for half in halves]
        reduced = self.backend.all_reduce(inner, partial)[0]
        if op is ReduceOp.MEAN:
            reduced = reduced / len(tensors)
        return self.backend.broadcast(reduced, devices)


def _components(value: Any) -> list[Any]:
    components = list(value.values) if isinstance(value, DistributedValues) else [value]
    tensors = [keras.ops.convert_to_tensor(component) for component in components]
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if len(set(shapes)) > 1:
        raise InvalidArgumentError(
            "Values of the replicas are reduced element by element, so their shapes "
            f"must be equal. Found: {shapes}."
        )
    return components if shapes else tensors


def _destinations(destinations: Any, backend: Backend) -> tuple[Device, ...]:
    if isinstance(destinations, DistributedValues):
        return tuple(backend.device_of(value) for value in destinations.values)
    if isinstance(destinations, (str, Device)):
        return (parse_device(destinations),)
    if isinstance(destinations, (list, tuple)) and destinations:
        return tuple(parse_device(name) for name in destinations)
    if backend.is_tensor(destinations):
        return (backend.device_of(destinations),)
    raise InvalidArgumentError(
        "`destinations` is a device name, a list of them, or values that lie on "
        f"devices. Received: {destinations!r}"
    )


def _result(tensors: list[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else Mirrored(tensors)
