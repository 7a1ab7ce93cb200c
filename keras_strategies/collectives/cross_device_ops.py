"""`CrossDeviceOps`: reductions and broadcasts between devices of a process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from keras_strategies.collectives.op_arguments import device_names, per_replica
from keras_strategies.devices import Device, parse_device
from keras_strategies.engines import get_engine
from keras_strategies.errors import InvalidTypeError
from keras_strategies.runtime.call_options import call_options
from keras_strategies.runtime.engine import Engine
from keras_strategies.types import CommunicationOptions, ReduceOp, check_count
from keras_strategies.values import Mirrored, PerReplica

_ENGINE_REDUCES = (
    "the backend's own engine reduces the values of a strategy. Combine values in "
    "another way in a function of `ks.get_replica_context().merge_call`."
)


class CrossDeviceOps:
    """Reduces and broadcasts values between the devices of one process.

    Base class of those of this package. Under a strategy the backend's own engine
    reduces: gradients, `ReplicaContext.all_reduce` and `Strategy.reduce`. A reduction
    of one's own is a function of `ReplicaContext.merge_call`.

    Example:

    >>> value = ks.PerReplica([ops.ones(2), ops.ones(2)])
    >>> ks.ReductionToOneDevice().reduce("sum", value, "cpu:0")
    """

    # The device to reduce on; None for the first destination.
    _device: Device | None = None

    @property
    def engine(self) -> Engine:
        """The backend of the tensors to combine."""
        return get_engine()

    def __repr__(self) -> str:
        options = ", ".join(
            f"{name.lstrip('_')}={value!r}" for name, value in vars(self).items()
        )
        return f"<{type(self).__name__}({options})>"

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduces a value and puts the result on the destinations.

        Args:
            reduce_op: `ReduceOp` or its name, in any case.
            per_replica_value: `PerReplica` of tensors; a tensor is a value of one.
            destinations: a device name or object, a sequence of them, or a
                `DistributedValues`, tensor or variable, for its devices.
            options: `CommunicationOptions`, or None for the defaults.

        Returns:
            A tensor for one destination, `Mirrored` for several.

        Raises:
            ValueError: for an unknown operation, tensors that differ in shape,
                destinations or options of another type, or an engine in the options,
                which is chosen where workers connect.

        Example:

        >>> ks.ReductionToOneDevice().reduce("sum", per_replica, ["cpu:0", "cpu:1"])
        """
        pairs = [(per_replica_value, destinations)]
        (reduced,) = self.batch_reduce(reduce_op, pairs, options)
        return reduced

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduces many values.

        Args:
            reduce_op: `ReduceOp` or its name.
            value_destination_pairs: sequence of `(value, destinations)`, as for
                `reduce`.
            options: as for `reduce`.

        Returns:
            list of results, as of `reduce`.

        Raises:
            ValueError: as `reduce`.
        """
        op = ReduceOp.parse(reduce_op)
        assert isinstance(op, ReduceOp)
        pairs = [
            (per_replica(value), device_names(destinations, self.engine))
            for value, destinations in value_destination_pairs
        ]
        call_options(options)
        return [self._reduced(op, value, names) for value, names in pairs]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to the destinations.

        Args:
            tensor: a tensor.
            destinations: as for `reduce`.

        Returns:
            A tensor for one destination, `Mirrored` for several.
        """
        names = device_names(destinations, self.engine)
        return _result(self._copies(tensor, [parse_device(name) for name in names]))

    # Implemented by the classes of this package.

    def _reduced(
        self, op: ReduceOp, value: PerReplica, destinations: tuple[str, ...]
    ) -> Any:
        devices = [parse_device(name) for name in destinations]
        dtype = keras.backend.standardize_dtype(value.values[0].dtype)
        divides = op is ReduceOp.MEAN and not keras.backend.is_float_dtype(dtype)
        own = ReduceOp.SUM if divides else op
        reduced = self._reduce(own, value.values, devices)
        if divides:
            reduced = [total / len(value.values) for total in reduced]
        return _result(reduced)

    def _reduce(
        self, op: ReduceOp, tensors: Sequence[Any], devices: Sequence[Device]
    ) -> list[Any]:
        """Reduces one tensor per replica; the result on each of `devices`."""
        home = self._device or devices[0]
        moved = [self.engine.to_device(tensor, home) for tensor in tensors]
        return self._copies(self.engine.all_reduce(op, moved)[0], devices)

    def _copies(self, tensor: Any, devices: Sequence[Device]) -> list[Any]:
        """The tensor on each of the devices."""
        return [self.engine.to_device(tensor, device) for device in devices]


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one device, reduces them there and copies the result.

    Args:
        reduce_to_device: str or device object, the device to reduce on; None for the
            first destination.
        accumulation_fn: None, as in `tf.distribute` for the backend's sum.

    Raises:
        TypeError: for an `accumulation_fn`.
    """

    def __init__(
        self, reduce_to_device: object | None = None, accumulation_fn: None = None
    ):
        self._device = (
            None if reduce_to_device is None else parse_device(reduce_to_device)
        )
        if accumulation_fn is not None:
            raise InvalidTypeError(
                f"`accumulation_fn` must be None: {_ENGINE_REDUCES} "
                f"Received: {accumulation_fn!r}"
            )


class NcclAllReduce(CrossDeviceOps):
    """All-reduce by the backend's own engine, by NCCL between NVIDIA GPUs.

    - JAX: an XLA collective, which is NCCL's between GPUs.
    - Torch: `torch.cuda.nccl` for floating-point values on different GPUs. Values that
      a gradient is wanted of, and all others, are copied to the first device, reduced
      there and copied back.
    - TensorFlow: values are copied to the first device, reduced there and copied back.

    The results are the same up to the order of the sums.

    Args:
        num_packs: int, as in `tf.distribute`; the backend's engine decides what it
            sends together.

    Raises:
        ValueError: for a negative number.
    """

    def __init__(self, num_packs: int = 1):
        check_count("num_packs", num_packs, 0)
        self._num_packs = num_packs

    def _reduce(
        self, op: ReduceOp, tensors: Sequence[Any], devices: Sequence[Device]
    ) -> list[Any]:
        reduced = self.engine.all_reduce(op, tensors)
        have = [self.engine.device_of(tensor) for tensor in reduced]
        if have == list(devices):
            return reduced
        return self._copies(reduced[0], devices)


class HierarchicalCopyAllReduce(NcclAllReduce):
    """All-reduce by the backend's own engine, which decides its order.

    Args:
        num_packs: int, as for `NcclAllReduce`.
    """


def check_cross_device_ops(value: Any) -> None:
    """Raises `TypeError` for objects other than a `CrossDeviceOps` of this package."""
    kinds = (ReductionToOneDevice, NcclAllReduce, HierarchicalCopyAllReduce)
    if value is None or type(value) in kinds:
        return
    kind = value if isinstance(value, type) else type(value)
    use = "Use ks.NcclAllReduce(), ks.HierarchicalCopyAllReduce(), "
    use += "ks.ReductionToOneDevice(), or None for the backend's own way"
    if isinstance(value, type) and value in kinds:
        use = f"Use an instance: {value.__name__}()"
    elif issubclass(kind, CrossDeviceOps):
        use = f"{_ENGINE_REDUCES} {use}"
    elif kind.__module__.partition(".")[0] == "tensorflow":
        use = f"It is tf.distribute's. {use}"
    raise InvalidTypeError(
        f"`cross_device_ops` must be a ks.CrossDeviceOps of this package. {use}. "
        f"Received: {value!r} of type {kind.__name__}"
    )


def _result(tensors: list[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else Mirrored(tensors)
