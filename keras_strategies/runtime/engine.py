"""Interfaces of an engine, and the parts of a strategy that engines use.

Another backend is a folder that implements `Engine`, `Communicator` and
`TrainerAdapter`; nothing else in the package names its framework.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import keras

from keras_strategies.devices import Device
from keras_strategies.errors import (
    BackendError,
    OutOfRangeError,
)
from keras_strategies.input.worker_shares import Share
from keras_strategies.keras_compat.backends.keras_on_jax import layout_of
from keras_strategies.keras_compat.models.building import (
    all_variables,
    build_optimizer,
    is_built,
)
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.values import IdSet, raw_value
from keras_strategies.layouts import Axes
from keras_strategies.runtime.placement import (
    Placement,
    StepCost,
    VariableCopy,
    nbytes_of,
)
from keras_strategies.runtime.workers import Workers
from keras_strategies.types import CommunicationOptions, InputContext, ReduceOp
from keras_strategies.values import map_structure

if TYPE_CHECKING:
    from keras_strategies.cluster.group import WorkerGroup


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


class StrategyCore(abc.ABC):
    """Parts of a strategy: what engines, input and hooks use of it.

    Args:
        engine: the engine.
        placement: the devices of replicas and variables.
        cross_device_ops: reductions between local replicas; None for the engine's own.
        sync_batch_norm: bool, whether batch normalization uses the statistics of the
            global batch.
        always_split: bool, whether layer calls are split even where that is slower.
    """

    def __init__(
        self,
        engine: Engine,
        placement: Placement,
        cross_device_ops: Any = None,
        sync_batch_norm: bool = True,
        always_split: bool = False,
    ):
        self._engine = engine
        self._placement = placement
        self._cross_device_ops = cross_device_ops
        self._sync_batch_norm = sync_batch_norm
        self._always_split = always_split
        self._trainer = engine.trainer(self)

    @property
    def placement(self) -> Placement:
        """Where replicas compute and where variables are."""
        return self._placement

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine

    @property
    def trainer(self) -> TrainerAdapter:
        """The trainer of Keras models."""
        return self._trainer

    @property
    def sync_batch_norm(self) -> bool:
        """bool, whether batch normalization uses the global batch's statistics."""
        return self._sync_batch_norm

    @property
    def always_split(self) -> bool:
        """bool, whether layer calls are split even where that is slower."""
        return self._always_split

    @property
    def num_replicas_in_sync(self) -> int:
        """int, how many replicas compute one step together."""
        return self._placement.share.total

    @property
    def workers(self) -> Workers | None:
        """The workers of the cluster; None with one process."""
        return self._placement.workers

    @property
    def replicas_here(self) -> int:
        """int, the replicas whose components code sees: local, or all in a program."""
        share = self._placement.share
        # Without workers, the local ones are all.
        return share.total if self.other_workers is None else share.count

    @property
    def other_workers(self) -> Workers | None:
        """The workers, if values have components in other processes; else None."""
        if self.workers is None or self._engine.sees_all_replicas(self):
            return None
        return self.workers

    @property
    def cross_device_ops(self) -> Any:
        """How values are combined; None for the backend's own way."""
        return self._cross_device_ops

    @property
    def replica_context_in_scope(self) -> Any:
        """The replica context of code in a scope, outside of `run`."""
        return None

    @property
    def default_replica_context(self) -> Any:
        """The replica context outside every scope; only the default strategy's."""
        return None

    def input_context(self) -> InputContext:
        """The input context of this process."""
        if self.workers is None:
            return InputContext(1, 0, self.num_replicas_in_sync)
        group = self.workers.group
        return InputContext(group.count, group.index, self.num_replicas_in_sync)

    def input_share(self) -> Share:
        """The replicas of this process among all replicas."""
        return self._placement.share

    def created(self, variable: Any) -> bool:
        """Whether a `keras.Variable` was made in this strategy's scope."""
        if not isinstance(variable, keras.Variable):
            return False
        return strategy_of(variable) is self

    def owns(self, model: Any) -> bool:
        """Whether a model was made in this strategy's scope."""
        return strategy_of(model) is self

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Makes this strategy current: models created inside belong to it."""


_NO_SHARDS = (
    "Sharded checkpoints need KERAS_BACKEND=jax; this is KERAS_BACKEND={0}. Use "
    "`model.save` and `keras.models.load_model`, whose files load under every "
    "strategy and backend."
)


class TrainerAdapter(abc.ABC):
    """How one strategy trains Keras models on one backend."""

    def __init__(self, strategy: StrategyCore):
        self.strategy = strategy
        self.placement = strategy.placement
        # Variables that have been the same on all workers.
        self._shared = IdSet()

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
        raw = raw_value(variable)
        engine = self.strategy.engine
        return [engine.to_device(raw, device) for device in self.placement.replicas]

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
        layout = layout_of(variable)
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
        trained = sum(nbytes_of(v) for v in model.trainable_variables)
        fixed = sum(nbytes_of(v) for v in model.non_trainable_variables)
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
            build_optimizer(model)
        self.broadcast_variables(all_variables(model), all_of_them)

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
        values = [raw_value(variable) for variable in variables]
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
        if mesh is not None and is_built(model):
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


class Engine(abc.ABC):
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

    def sees_all_replicas(self, strategy: StrategyCore) -> bool:
        """Whether a program is traced that describes the replicas of all workers.

        Values of the replicas have a component for each of them in it, and there is
        nothing to exchange outside of it.
        """
        return False

    # Replicas and training

    @abc.abstractmethod
    def run_replicas(
        self,
        strategy: StrategyCore,
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
    def trainer(self, strategy: StrategyCore) -> TrainerAdapter:
        """The trainer of Keras models for `strategy`."""
