"""Interfaces between strategies and an engine: placement, workers, trainer, backend.

A fourth backend is a folder that implements `Backend`, `Communicator` and
`TrainerAdapter`; nothing else in the package knows the framework's name.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import keras
import numpy as np

from keras_strategies import keras_compat
from keras_strategies.devices import Device
from keras_strategies.errors import (
    BackendError,
    ClusterError,
    OutOfRangeError,
    WorkerError,
)
from keras_strategies.input.worker_shares import Share
from keras_strategies.layouts import Axes, VariableMesh
from keras_strategies.types import CommunicationOptions, ReduceOp
from keras_strategies.values import map_structure

if TYPE_CHECKING:
    from keras_strategies.cluster.group import WorkerGroup
    from keras_strategies.strategies.base import Strategy


@dataclass(frozen=True)
class Placement:
    """Devices of replicas and of variables.

    Args:
        replicas: the device of each local replica.
        variables: the device of the authoritative copy of variables. Outputs, loss,
            metrics and the update of the global batch are computed there.
        mirrored: bool, whether each replica has a persistent copy of the variables, or
            reads the authoritative one in each step.
        workers: the workers of a cluster; None with one process. All devices are of
            this process.
        mesh: the mesh of devices that variables are sharded over, of which `replicas`
            are the first column; None without sharded variables.
    """

    replicas: tuple[Device, ...]
    variables: Device
    mirrored: bool
    workers: Workers | None = None
    mesh: VariableMesh | None = None

    @property
    def variable_devices(self) -> tuple[Device, ...]:
        """Devices with copies or shards of variables."""
        if self.mesh is not None:
            return self.mesh.own_devices
        return self.replicas if self.mirrored else (self.variables,)

    @property
    def is_single(self) -> bool:
        """Whether one device computes everything, so that no batch is split."""
        alone = self.workers is None and self.mesh is None
        return alone and self.replicas == (self.variables,)

    @property
    def share(self) -> Share:
        """The replicas of this process among all replicas."""
        if self.workers is not None:
            return self.workers.share
        return Share(0, len(self.replicas), len(self.replicas))


# Batches of a loop whose contents workers compare, where they may differ.
_COMPARED_BATCHES = 2


def _checksum(leaf: Any) -> int:
    array = leaf
    if not isinstance(leaf, np.ndarray):
        array = keras.ops.convert_to_numpy(leaf)
    return zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data)


class Workers(abc.ABC):
    """Communicator between the workers of a cluster.

    Every worker makes the same calls in the same order. When one is lost, the others'
    calls raise `WorkerError`, which names it.

    Args:
        group: the connected workers.
        options: `CommunicationOptions`.
    """

    def __init__(self, group: WorkerGroup, options: CommunicationOptions):
        self.group = group
        self.options = options
        #: The number of replicas of each worker, as `set_replicas` was told.
        self.replicas: tuple[int, ...] = (1,) * group.count
        # The workers that make up one replica, where it takes several.
        self._span = 1
        self._method = ""
        self._steps = 0
        self._checks = False

    def set_replicas(self, count: int, span: int = 1) -> None:
        """Exchanges the number of replicas between all workers.

        Args:
            count: int, replicas of this worker.
            span: int, how many workers form one replica, each with a shard of it.
        """
        found = self.group.gather_values("the number of replicas", count)
        self.replicas = tuple(found)
        self._span = span

    def with_replicas(self, count: int, span: int = 1) -> Self:
        """The same workers for another strategy."""
        own = copy.copy(self)
        own.set_replicas(count, span)
        return own

    def with_options(self, options: CommunicationOptions) -> Self:
        """The same workers, with the options of another strategy.

        Raises:
            ClusterError: for another timeout than the workers have connected with.
        """
        if options == self.options:
            return self
        if options.timeout_seconds not in (None, self.group.timeout):
            raise ClusterError(
                "The workers are already connected with a timeout of "
                f"{self.group.timeout} seconds, shared by all strategies. Received: "
                f"timeout_seconds={options.timeout_seconds}. Pass it to the first "
                "strategy."
            )
        own = copy.copy(self)
        own.options = options
        return own

    @property
    def is_spanned(self) -> bool:
        """Whether a replica takes the devices of several workers."""
        return self._span > 1

    @property
    def share(self) -> Share:
        """Which of all replicas are those of this worker."""
        if self._span == 1:
            return Share.of_worker(self.replicas, self.group.index)
        total = len(self.replicas) // self._span
        return Share(self.group.index // self._span, 1, total)

    @abc.abstractmethod
    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        """Reduces each tensor over the workers, in packs; all have equal shapes."""

    @abc.abstractmethod
    def gather_rows(self, tensor: Any, rows: Sequence[int]) -> Any:
        """Concatenates the workers' tensors along axis 0.

        Args:
            tensor: this worker's; of shape `(rows[index], ...)`.
            rows: the rows of each worker's.
        """

    @abc.abstractmethod
    def broadcast(self, tensors: Sequence[Any]) -> list[Any]:
        """The chief's tensors, in place of those of the same shapes and dtypes."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the connections."""

    @contextlib.contextmanager
    def method(self, name: str) -> Iterator[bool]:
        """Context manager for a method of a model; counts its steps.

        Returns:
            Whether no other method is under way.
        """
        previous = self._method, self._steps, self._checks
        self._method, self._steps, self._checks = name, 0, name.endswith("_on_batch")
        self.group.progress = f"the beginning of {name}"
        try:
            yield not previous[0]
        finally:
            self._method, self._steps, self._checks = previous
            self.group.progress = self._progress()

    def begin_steps(self, count: int = 1) -> None:
        """Starts one or more steps.

        Raises:
            WorkerError: if a worker is lost.
        """
        self._steps += count
        self.group.progress = self._progress()
        self.group.check()

    def check_batches(self, wanted: bool) -> None:
        """Sets whether `check_batch` compares, until the method ends."""
        self._checks = wanted

    def check_batch(self, batch: Any) -> None:
        """Compares a global batch with those that the other workers have read.

        Arrays are compared once, before the loop; what may end or shuffle by itself,
        a generator or a `PyDataset`, with every batch: its rows, and in the first
        batches what is in it.

        Raises:
            WorkerError: if workers have other batches, or one has no more.
        """
        if not self._checks:
            return
        leaves = [leaf for leaf in keras.tree.flatten(batch) if leaf is not None]
        facts: list[Any] = [[list(leaf.shape) for leaf in leaves]]
        if self._steps <= _COMPARED_BATCHES:
            facts.append([_checksum(leaf) for leaf in leaves])
        found = self.group.gather_values("a batch", facts)
        for other, each in enumerate(found):
            if each[0] != facts[0]:
                raise WorkerError(
                    f"Workers have different batches at {self.group.progress}: "
                    f"worker {self.group.index} has shapes {facts[0]}, worker "
                    f"{other} has {each[0]}. All workers must read the same global "
                    "batches; for separate data per worker, use ks.DatasetCreator "
                    "or `strategy.distribute_datasets_from_function`."
                )
            if each != facts:
                raise WorkerError(
                    f"Workers {self.group.index} and {other} have batches of the "
                    f"same shapes but different contents at {self.group.progress}. "
                    "All workers must read the same global batches: seed shuffling "
                    "and augmentation, or use ks.DatasetCreator for separate data "
                    "per worker."
                )

    def _progress(self) -> str:
        if not self._method:
            return ""
        return f"step {self._steps} of {self._method}"

    def cause(self, error: BaseException) -> BaseException:
        """The error to raise for one that a method has raised.

        Returns:
            A `WorkerError` where the engine has failed because of a lost worker; the
            error itself where it has nothing to do with other workers.
        """
        return error

    def lost(self, error: BaseException) -> WorkerError:
        """The error to raise for an `error` of the engine."""
        loss = self.group.loss(wait=min(self.group.timeout, 5.0))
        if loss is not None:
            return WorkerError(self.group.describe(loss))
        progress = self.group.progress or "a collective"
        return WorkerError(
            f"Workers could not exchange values at {progress}, although none is "
            f"known to be lost: {type(error).__name__}: "
            f"{str(error).splitlines()[0]}. Check that all workers make the same "
            "calls and that the network connects them. "
            "`CommunicationOptions(timeout_seconds=...)` sets this timeout."
        )


@dataclass(frozen=True)
class VariableCopy:
    """Memory of a variable on one device.

    Args:
        device: str, a Keras-style device name.
        nbytes: int, bytes held there.
        role: str, `"variable"` for an authoritative copy or a mirrored one that
            is kept; `"shard"` for a part.
        value: the tensor or variable of the backend that lies there.
    """

    device: str
    nbytes: int
    role: str
    value: Any


@dataclass(frozen=True)
class StepCost:
    """Cost of one training step, estimated without running it.

    Args:
        peak: int, bytes that a device needs while the step runs: variables, batch and
            activations; None if unknown.
        sent: dict from the name of a collective, such as `"all-reduce"`, to how many
            there are and how many bytes a device sends in them.
        source: str, how this was found.
    """

    peak: int | None
    sent: dict[str, tuple[int, int]]
    source: str


class Communicator(abc.ABC):
    """Communicator between replicas, called by each of them."""

    @abc.abstractmethod
    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        """Reduces a structure over replicas; its gradient is the same reduction."""

    @abc.abstractmethod
    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
        """Concatenates a structure over replicas along `axis`; differentiable."""

    @abc.abstractmethod
    def merge_call(
        self,
        replica_id: int,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls `merge_fn(strategy, ...)` once when every replica has arrived."""


_NO_SHARDS = (
    "Sharded checkpoints need KERAS_BACKEND=jax; this is KERAS_BACKEND={0}. Use "
    "`model.save` and `keras.models.load_model`, whose files load under every "
    "strategy and backend."
)


def _nbytes(variable: Any) -> int:
    return math.prod(variable.shape) * itemsize(variable.dtype)


def itemsize(dtype: str) -> int:
    """Bytes of an element: of "bfloat16" 2, of "bool" 1."""
    bits = "".join(c for c in dtype.split("_")[0].removeprefix("b") if c.isdigit())
    return max(int(bits) // 8, 1) if bits else 1


class TrainerAdapter(abc.ABC):
    """How one strategy trains Keras models on one backend."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy
        self.placement = strategy.placement
        # Variables that have been the same on all workers.
        self._shared = keras_compat.IdSet()

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager around the creation and the methods of models."""

    @abc.abstractmethod
    def step_function(
        self, model: Any, kind: str, make: Callable[[bool], Any], force: bool
    ) -> None:
        """Sets `model.{kind}_function` for `kind` "train", "test" or "predict".

        `make(force)` is Keras's own `make_{kind}_function`.
        """

    @abc.abstractmethod
    def copies(self, variable: Any) -> list[VariableCopy]:
        """The memory of a `keras.Variable` on each device."""

    def colocated_with_variable(self, variable: Any, tensor: Any) -> Any:
        """The tensor on the devices of a variable."""
        return tensor

    def local_values(self, variable: Any) -> list[Any]:
        """A variable's value on each local replica, on the device of that replica."""
        raw = keras_compat.raw_value(variable)
        backend = self.strategy.backend
        return [backend.to_device(raw, device) for device in self.placement.replicas]

    def save_sharded(self, model: Any, directory: Path, keep: int) -> int:
        """See `Strategy.save_sharded`."""
        raise BackendError(_NO_SHARDS.format(keras.backend.backend()))

    def load_sharded(self, model: Any, directory: Path) -> int:
        """See `Strategy.load_sharded`."""
        raise BackendError(_NO_SHARDS.format(keras.backend.backend()))

    def planned_devices(self, is_weight: bool) -> tuple[Device, ...]:
        """The devices that will keep a weight, or a slot, metric or counter."""
        return self.placement.variable_devices

    def axes(self, variable: Any) -> Axes:
        """The mesh axes that a variable is sharded along; `()` if it is replicated."""
        if self.placement.mesh is None:
            return ()
        layout = keras_compat.layout_of(variable)
        return () if layout is None else tuple(layout.axes)

    def set_layouts(self, variables: Sequence[Any]) -> None:  # noqa: B027
        """Assigns layouts to variables without values."""

    def step_cost(self, model: Any, batch: Any) -> StepCost:
        """Cost of a training step of a model whose variables have no values.

        Args:
            model: a model that has been compiled and built.
            batch: structure of `keras.KerasTensor`, `(x, y)` or `(x, y, weights)`.
        """
        lead = self.placement.variables
        others = sum(device != lead for device in self.placement.replicas)
        trained = sum(_nbytes(v) for v in model.trainable_variables)
        fixed = sum(_nbytes(v) for v in model.non_trainable_variables)
        sent = {}
        if others:
            sent["weights to replicas"] = (others, others * (trained + fixed))
            sent["gradients from replicas"] = (others, others * trained)
        return StepCost(None, sent, "estimated from the sizes of the variables")

    def apply_gradients(
        self,
        optimizer: Any,
        apply: Callable[..., Any],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        aggregate: bool,
    ) -> Any:
        """`optimizer.apply` in replica context: sums over replicas, applies once.

        `apply(gradients, variables)` is the original. With `aggregate` False the
        gradients are the same on all replicas already.
        """
        raise NotImplementedError

    def creating_variable(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around the making of a variable in replica context."""
        return contextlib.nullcontext()

    def variable_assigned(self, variable: Any, value: Any) -> None:  # noqa: B027
        """An on-read variable was assigned in cross-replica context."""

    def sync_variables(self, model: Any, all_of_them: bool) -> None:
        """Broadcasts a model's variables from the chief, with several workers.

        Args:
            model: a `keras.Model`, possibly not built.
            all_of_them: bool, whether to include variables that are in sync already.
        """
        workers = self.placement.workers
        if workers is None:
            return
        if all_of_them:
            # As the chief has it, which may have restored a file.
            keras_compat.build_optimizer(model)
        self.broadcast_variables(keras_compat.all_variables(model), all_of_them)

    def broadcast_variables(self, variables: Sequence[Any], all_of_them: bool) -> None:
        """Broadcasts variables with values from the chief; see `sync_variables`."""
        workers = self.placement.workers
        assert workers is not None
        if not all_of_them:
            variables = [v for v in variables if v not in self._shared]
        workers.group.agree(
            "the model's variables (their shapes and dtypes)",
            [[list(variable.shape), variable.dtype] for variable in variables],
        )
        if not variables:
            return
        values = [keras_compat.raw_value(variable) for variable in variables]
        for variable, value in zip(variables, workers.broadcast(values), strict=True):
            variable.assign(value)
            self._shared.add(variable)

    @contextlib.contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        """Context manager on all workers while the chief saves a model."""
        yield

    def exporting(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Entered around `model.export`."""
        return contextlib.nullcontext()

    def check_model(self, model: Any) -> None:  # noqa: B027
        """Raises `ModelScopeError` if the model's variables are on other devices."""

    def check_layouts(self, model: Any) -> None:
        """Raises `LayoutError` if a layout map has patterns that match nothing."""
        mesh = self.placement.mesh
        if mesh is not None and keras_compat.is_built(model):
            mesh.rule.check_matches()

    @contextlib.contextmanager
    def method(self, model: Any, name: str) -> Iterator[None]:
        """Entered around `fit`, `evaluate`, ... and `compile`, inside the scope."""
        self.check_model(model)
        yield

    def making(self, variable: Any) -> None:  # noqa: B027
        """Called before a `keras.Variable` is created in the scope."""

    def call(self, model: Any, name: str, original: Any, bound: Any) -> Any:
        """Runs `fit`, `evaluate`, ... or `compile`.

        Args:
            model: the model.
            name: str, the method.
            original: Keras's own.
            bound: `inspect.BoundArguments`, the model among them.
        """
        return original(*bound.args, **bound.kwargs)

    def distribution(self) -> Any:
        """The `keras.distribution.Distribution` underneath, None without one."""
        return None


class Backend(abc.ABC):
    """An engine: devices, tensors, replicas and collectives of one framework."""

    name: ClassVar[str]

    # Topology

    @abc.abstractmethod
    def local_devices(self) -> tuple[Device, ...]:
        """All devices of this process, accelerators first, then CPUs."""

    @abc.abstractmethod
    def set_virtual_cpu_devices(self, count: int) -> None:
        """Makes `count` CPU devices exist; `BackendInUseError` if it is too late."""

    def cpu_device_count(self) -> int:
        """CPU devices there are, or will be; must not fix the devices if possible."""
        return sum(device.kind == "cpu" for device in self.local_devices())

    def mesh_devices(
        self, devices: tuple[Device, ...], is_chosen: bool
    ) -> tuple[Device, ...]:
        """This process's devices of a mesh, for `ModelParallelStrategy`.

        Args:
            devices: those that were named, or all there are.
            is_chosen: bool, whether they were named.
        """
        return devices

    def memories(self, devices: Sequence[Device]) -> tuple[Device, ...]:
        """The devices with separate memory."""
        return tuple(devices)

    def check_options(  # noqa: B027
        self, placement: Placement, cross_device_ops: Any, sync_batch_norm: bool
    ) -> None:
        """Raises for options of a strategy that would have no effect here."""

    # Data

    @abc.abstractmethod
    def is_tensor(self, value: Any) -> bool: ...

    @abc.abstractmethod
    def to_numpy(self, tensor: Any) -> Any: ...

    @abc.abstractmethod
    def to_device(self, value: Any, device: Device) -> Any:
        """A tensor with this value on that device."""

    @abc.abstractmethod
    def device_of(self, tensor: Any) -> Device: ...

    def transfer(
        self, parts: Sequence[Any], devices: Sequence[Device]
    ) -> Callable[[], list[Any]]:
        """Begins to move structures of arrays, each to its device.

        It is called ahead of the use, on a thread of its own.

        Returns:
            A callable for the thread that uses the tensors, which waits for them as
            far as the backend needs it and returns the structures.
        """
        moved = [
            map_structure(
                lambda leaf, device=device: (
                    None if leaf is None else self.to_device(leaf, device)
                ),
                part,
            )
            for part, device in zip(parts, devices, strict=True)
        ]
        return lambda: moved

    def row_dataset(self, rows: Any) -> Any:
        """The framework's own dataset of the rows of an `ArrayDataset`, or that."""
        return rows

    def tensor_spec(self, shape: tuple[int | None, ...], dtype: str) -> Any:
        """Shape and dtype of a tensor, in the backend's own class."""
        return keras.KerasTensor(shape, dtype=dtype)

    def out_of_range(self, message: str) -> Exception:
        """The error of an iterator that has ended."""
        return OutOfRangeError(message)

    def on_device(self, device: Device) -> contextlib.AbstractContextManager[Any]:
        """Tensors made inside are on this device."""
        return contextlib.nullcontext()

    # Datasets in programs

    def in_program(self) -> bool:
        """Whether a program is being traced, in which Python runs only once."""
        return False

    def program_iterator(
        self,
        start: Callable[[], Iterator[Any]],
        spec: Callable[[], Any],
        devices: Sequence[Device] | None,
    ) -> Any:
        """An iterator over batches in the program that is being traced.

        `spec` says what the batches are; `start` makes a Python iterator whenever the
        program runs; `devices` are those that the replicas' batches are moved to, None
        if they stay where they are.
        """
        raise NotImplementedError

    def loops_over(  # noqa: B027
        self, iterable: type, in_program: Callable[[Any], Any]
    ) -> None:
        """Registers a class whose `for` loops are traced into programs."""

    # Collectives, called once for all replicas: a list has one tensor for each.

    @abc.abstractmethod
    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        """The reduction of the tensors, on the device of each of them."""

    @abc.abstractmethod
    def all_gather(self, tensors: Sequence[Any], axis: int) -> list[Any]:
        """The concatenation of the tensors, on the device of each of them."""

    @abc.abstractmethod
    def broadcast(self, tensor: Any, devices: Sequence[Device]) -> list[Any]:
        """Copies of one tensor on several devices."""

    # Workers

    def connect(self, group: WorkerGroup, options: CommunicationOptions) -> Workers:
        """Starts the engine between workers, before the devices are first used."""
        raise NotImplementedError(f"{self.name} does not support several workers.")

    def random_state(self) -> bytes:
        """The state of the framework's global random numbers."""
        return b""

    def set_random_state(self, state: bytes) -> None:  # noqa: B027
        """Sets the state of the framework's global random numbers."""

    def sees_all_replicas(self, strategy: Strategy) -> bool:
        """Whether a program is traced that describes the replicas of all workers.

        Values of the replicas have a component for each of them in it, and there is
        nothing to exchange outside of it.
        """
        return False

    # Replicas and training

    @abc.abstractmethod
    def run_replicas(
        self,
        strategy: Strategy,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        """Runs `fn` once per replica, in replica context; the results in order.

        An exception in one replica stops the others and is raised as it is.
        """

    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        """See `ks.value_and_grad`."""
        raise NotImplementedError

    def optimizer_apply(
        self, optimizer: Any, apply: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`optimizer.apply` inside the current program."""
        return apply

    def initial_value(self, value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
        """Equivalent arguments of `keras.Variable` inside the current program."""
        return value, shape, dtype

    def function(
        self, fn: Callable[..., Any], jit_compile: bool | None
    ) -> Callable[..., Any]:
        """See `ks.function`."""
        raise NotImplementedError

    def check_model_parallel(self) -> None:
        """Raises `BackendError` if this backend cannot shard variables over a mesh."""
        raise BackendError(f"The backend {self.name!r} cannot shard variables.")

    @abc.abstractmethod
    def trainer(self, strategy: Strategy) -> TrainerAdapter:
        """The trainer of Keras models for `strategy`."""
