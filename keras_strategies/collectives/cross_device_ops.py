"""`CrossDeviceOps`: reductions and broadcasts between devices of a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_strategies.collectives.op_arguments import device_names, per_replica
from keras_strategies.devices import Device, parse_device
from keras_strategies.engines import get_engine
from keras_strategies.errors import InvalidArgumentError, InvalidTypeError
from keras_strategies.runtime.call_options import call_options
from keras_strategies.runtime.engine import Engine
from keras_strategies.types import CommunicationOptions, ReduceOp
from keras_strategies.values import DistributedValues, Mirrored, PerReplica


class CrossDeviceOps:
    """Reduces and broadcasts values between the devices of one process.

    A strategy with a subclass of it reduces values of its replicas with that: the
    gradients of `fit` and of `optimizer.apply` in `run`, `ReplicaContext.all_reduce`,
    `Strategy.reduce` and `extended.reduce_to`. The backend then reduces the result over
    workers. With a class of this package the backend reduces them, as without one.

    A subclass overrides `reduce_implementation`, `batch_reduce_implementation`,
    `broadcast_implementation`, or several of them; the others use the overridden ones.
    A value is a `PerReplica` with a tensor per replica, all of one shape and dtype.
    `reduce_op` is any `ReduceOp`. Within `tf.function`, as in `fit` on TensorFlow, the
    Python of a subclass runs when the program is traced. On JAX, where XLA inserts the
    reductions of a program, a strategy takes the classes of this package only.

    Example:

    >>> class Counting(ks.CrossDeviceOps):
    ...     values = 0
    ...     def reduce_implementation(self, reduce_op, value, destinations, options):
    ...         self.values += 1
    ...         return super().reduce_implementation(
    ...             reduce_op, value, destinations, options)
    >>> ops = Counting()
    >>> strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops)
    """

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
        op = ReduceOp.parse(reduce_op)
        assert isinstance(op, ReduceOp)
        value = per_replica(per_replica_value)
        names = device_names(destinations, self.engine)
        checked = call_options(options)
        result = self.reduce_implementation(op, value, names, checked)
        return _checked_result(self, "reduce_implementation", result, names)

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
        results = self.batch_reduce_implementation(op, pairs, call_options(options))
        where = "batch_reduce_implementation"
        if not isinstance(results, (list, tuple)) or len(results) != len(pairs):
            raise InvalidArgumentError(
                f"`{type(self).__name__}.{where}` must return a list with one result "
                f"for each of the {len(pairs)} values. It returned: {results!r}"
            )
        return [
            _checked_result(self, where, result, names)
            for result, (_, names) in zip(results, pairs, strict=True)
        ]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies a tensor to the destinations.

        Args:
            tensor: a tensor.
            destinations: as for `reduce`.

        Returns:
            A tensor for one destination, `Mirrored` for several.
        """
        names = device_names(destinations, self.engine)
        result = self.broadcast_implementation(tensor, names)
        return _checked_result(self, "broadcast_implementation", result, names)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: tuple[str, ...],
        options: CommunicationOptions,
    ) -> Any:
        """Reduces one value, for a subclass to override.

        Args:
            reduce_op: a `ReduceOp`.
            per_replica_value: `PerReplica` of tensors of one shape and dtype.
            destinations: tuple of str, the devices to put the result on.
            options: `CommunicationOptions`.

        Returns:
            A tensor for one destination, `Mirrored` with a tensor for each of several.
        """
        name = "batch_reduce_implementation"
        if _overrides(self, name) and not _overrides(self, "reduce_implementation"):
            pairs = [(per_replica_value, destinations)]
            (result,) = self.batch_reduce_implementation(reduce_op, pairs, options)
            return result
        return self._reduced(reduce_op, per_replica_value, destinations)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, tuple[str, ...]]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Reduces many values, for a subclass to override.

        Args:
            reduce_op: a `ReduceOp`.
            value_destination_pairs: sequence of `(value, destinations)`, as for
                `reduce_implementation`.
            options: `CommunicationOptions`.

        Returns:
            list of results, as of `reduce_implementation`.
        """
        if _overrides(self, "reduce_implementation"):
            return [
                self.reduce_implementation(reduce_op, value, destinations, options)
                for value, destinations in value_destination_pairs
            ]
        return [
            self._reduced(reduce_op, value, destinations)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(
        self, tensor: Any, destinations: tuple[str, ...]
    ) -> Any:
        """Copies a tensor to devices, for a subclass to override.

        Args:
            tensor: a tensor.
            destinations: tuple of str, the devices.

        Returns:
            A tensor for one destination, `Mirrored` with a tensor for each of several.
        """
        devices = [parse_device(name) for name in destinations]
        return _result([self.engine.to_device(tensor, device) for device in devices])

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
        moved = [self.engine.to_device(tensor, devices[0]) for tensor in tensors]
        return self._copies(self.engine.all_reduce(op, moved)[0], devices)

    def _copies(self, tensor: Any, devices: Sequence[Device]) -> list[Any]:
        """The tensor on each of the devices."""
        names = tuple(str(device) for device in devices)
        result = self.broadcast_implementation(tensor, names)
        where = "broadcast_implementation"
        checked = _checked_result(self, where, result, names)
        return [checked] if len(names) == 1 else list(checked.values)


class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one device, reduces them there and copies the result.

    Args:
        reduce_to_device: str or device object, the device to reduce on; None for the
            first destination.
        accumulation_fn: callable of a list of tensors that returns their sum; None
            for the backend's sum. Used for SUM and MEAN. On JAX it can be called
            directly, but a strategy refuses it, as it refuses subclasses.

    Raises:
        TypeError: if `accumulation_fn` is not callable.
    """

    def __init__(
        self,
        reduce_to_device: object | None = None,
        accumulation_fn: Callable[[list[Any]], Any] | None = None,
    ):
        self._device = (
            None if reduce_to_device is None else parse_device(reduce_to_device)
        )
        if accumulation_fn is not None and not callable(accumulation_fn):
            raise InvalidTypeError(
                "`accumulation_fn` must be a function of a list of tensors that "
                f"returns their sum, or None. Received: {accumulation_fn!r}"
            )
        self._accumulate = accumulation_fn

    def _reduce(
        self, op: ReduceOp, tensors: Sequence[Any], devices: Sequence[Device]
    ) -> list[Any]:
        home = self._device or devices[0]
        moved = [self.engine.to_device(tensor, home) for tensor in tensors]
        if self._accumulate is not None and op in (ReduceOp.SUM, ReduceOp.MEAN):
            reduced = self._accumulate(moved)
            if op is ReduceOp.MEAN:
                reduced = reduced / len(moved)
        else:
            reduced = self.engine.all_reduce(op, moved)[0]
        return self._copies(reduced, devices)


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
        if (
            isinstance(num_packs, bool)
            or not isinstance(num_packs, int)
            or num_packs < 0
        ):
            raise InvalidArgumentError(
                "`num_packs` must be an int of 0 or more. Received: "
                f"num_packs={num_packs!r}"
            )
        self._num_packs = num_packs

    def _reduce(
        self, op: ReduceOp, tensors: Sequence[Any], devices: Sequence[Device]
    ) -> list[Any]:
        reduced = self.engine.all_reduce(op, tensors)
        have = [self.engine.device_of(tensor) for tensor in reduced]
        if have == list(devices) and not _overrides(self, "broadcast_implementation"):
            return reduced
        return self._copies(reduced[0], devices)


class HierarchicalCopyAllReduce(NcclAllReduce):
    """All-reduce by the backend's own engine, which decides its order.

    Args:
        num_packs: int, as for `NcclAllReduce`.
    """


def _overrides(ops: CrossDeviceOps, method: str) -> bool:
    """Whether a subclass of the user's has this method of its own."""
    return getattr(type(ops), method) is not getattr(CrossDeviceOps, method)


def is_built_in(ops: CrossDeviceOps | None) -> bool:
    """Whether the reduction is one of this package, with a sum of its own."""
    kinds = (ReductionToOneDevice, NcclAllReduce, HierarchicalCopyAllReduce)
    return type(ops) in kinds and getattr(ops, "_accumulate", None) is None


def check_cross_device_ops(value: Any) -> None:
    """Raises `TypeError` for objects other than a `CrossDeviceOps` of this package."""
    if value is None:
        return
    if isinstance(value, CrossDeviceOps):
        for name in ("reduce", "batch_reduce", "broadcast"):
            if _overrides(value, name):
                raise InvalidTypeError(
                    f"`{type(value).__name__}.{name}` overrides what a strategy does "
                    f"not call. Override `{name}_implementation`, as in "
                    "`tf.distribute`."
                )
        return
    kind = value if isinstance(value, type) else type(value)
    use = "ks.NcclAllReduce(), ks.HierarchicalCopyAllReduce(), "
    use += "ks.ReductionToOneDevice(), an instance of a subclass of "
    use += "ks.CrossDeviceOps, or None for the backend's own way"
    if isinstance(value, type) and issubclass(value, CrossDeviceOps):
        use = f"an instance: {value.__name__}()"
    elif kind.__module__.partition(".")[0] == "tensorflow":
        use = f"those of this package in place of tf.distribute's: {use}"
    raise InvalidTypeError(
        f"`cross_device_ops` must be a ks.CrossDeviceOps. Use {use}. "
        f"Received: {value!r} of type {type(value).__name__}"
    )


def _checked_result(
    ops: CrossDeviceOps, method: str, result: Any, names: tuple[str, ...]
) -> Any:
    """The result of an implementation, one tensor for each destination."""
    is_several = isinstance(result, DistributedValues)
    tensors = result.values if is_several else (result,)
    if len(tensors) == len(names) and all(map(keras.ops.is_tensor, tensors)):
        return tensors[0] if len(names) == 1 else result
    what = "a tensor" if len(names) == 1 else f"a Mirrored of {len(names)} tensors"
    raise InvalidArgumentError(
        f"`{type(ops).__name__}.{method}` must return {what}, for the destinations "
        f"{', '.join(names)}. It returned: {result!r} of type {type(result).__name__}"
    )


def _result(tensors: list[Any]) -> Any:
    return tensors[0] if len(tensors) == 1 else Mirrored(tensors)
