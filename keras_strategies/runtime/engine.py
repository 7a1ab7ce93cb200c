"""Interface of an engine, and the parts of a strategy that engines use.

Another backend is a folder that implements `Engine`, `FitDriver`, `RunDriver` and
`ReplicaCollectives`; nothing else in the package names its framework.
"""

from __future__ import annotations

import abc
import contextlib
import enum
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import keras

from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.errors import BackendError, OutOfRangeError
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.values import IdSet
from keras_strategies.runtime.drivers import Drivers
from keras_strategies.runtime.placement import Placement
from keras_strategies.types import CommunicationOptions, InputContext, ReduceOp
from keras_strategies.values import map_structure, regroup

if TYPE_CHECKING:
    from keras_strategies.cluster.group import WorkerGroup


# See `Engine.transfers`.
Transfer = Callable[[Sequence[Any]], Callable[[], Any]]


class Feature(enum.Enum):
    """Features that an engine may lack; the value is the start of the error message."""

    SHARDED_VARIABLES = "ks.ModelParallelStrategy is not supported"
    SHARDED_CHECKPOINTS = "Sharded checkpoints are not supported"
    SEPARATE_BATCH_NORM = "`sync_batch_norm=False` is not supported"
    WORKERS = "Training on several workers is not supported"
    ELASTIC_WORKERS = "`elastic`, for workers that come and go, is not supported"
    PARAMETER_SERVERS = "ks.ParameterServerStrategy is not supported"
    TPUS = "ks.TPUStrategy on TPUs is not supported"


def require(engine: Engine, feature: Feature) -> None:
    """Raises `BackendError` if an engine lacks a feature."""
    reason = engine.lacks.get(feature)
    if reason is not None:
        raise BackendError(
            f"{feature.value} with KERAS_BACKEND={engine.name!r}. {reason}"
        )


class Engine(abc.ABC):
    """One framework: devices, tensors, gradients, programs and workers."""

    name: ClassVar[str]
    #: The features that this engine lacks, with what to use instead.
    lacks: Mapping[Feature, str] = MappingProxyType({})
    #: Whether Python runs the steps of each device, so that those of one process wait
    #: for its interpreter; each device of a mesh has a process.
    has_python_per_device: ClassVar[bool] = False
    #: Whether layers compute with gathered variables, so that each device of a mesh is
    #: a replica, with rows of its own.
    gathers_shards: ClassVar[bool] = False
    #: Whether tensors may have strings, or rows of different lengths.
    has_text_and_ragged_tensors: ClassVar[bool] = False
    #: The class of shapes and dtypes of tensors.
    spec_class: ClassVar[type[Any]] = keras.KerasTensor
    #: The error of an iterator that has ended.
    out_of_range_error: ClassVar[type[OutOfRangeError]] = OutOfRangeError
    #: The exceptions that end iterations.
    end_errors: ClassVar[tuple[type[Exception], ...]] = (
        StopIteration,
        StopAsyncIteration,
    )

    # Devices and tensors

    @abc.abstractmethod
    def local_devices(self) -> tuple[Device, ...]:
        """All devices of this process, accelerators first, then CPUs."""

    @abc.abstractmethod
    def set_virtual_cpu_devices(self, count: int) -> None:
        """Makes `count` CPU devices exist; `BackendInUseError` if it is too late."""

    def cpu_device_count(self) -> int:
        """Number of CPU devices; does not initialize the devices, if possible."""
        return sum(device.kind == "cpu" for device in self.local_devices())

    def keep_accelerator(
        self, choose: Callable[[Sequence[Device]], Device | None]
    ) -> Device | None:
        """Chooses one accelerator of this machine; the others are for other processes.

        Args:
            choose: callable of the accelerators, before the framework allocates memory
                on them; returns None if this process may use all.

        Returns:
            The device, by the name that it has from now on; None if there is none.
        """
        found = [each for each in self.local_devices() if each.kind != "cpu"]
        chosen = choose(found)
        return None if chosen is None else self._kept(chosen)

    def _kept(self, chosen: Device) -> Device | None:
        """Makes an accelerator the only one, or the default; see above."""
        return chosen

    @abc.abstractmethod
    def to_device(self, value: Any, device: Device) -> Any:
        """A tensor with this value on that device."""

    def movable(self, tensor: Any) -> Any:
        """The tensor, for operations with tensors on other devices; see the engines."""
        return tensor

    @abc.abstractmethod
    def device_of(self, tensor: Any) -> Device:
        """The device of a tensor; of several, the first one."""

    @abc.abstractmethod
    def on_device(self, device: Device) -> contextlib.AbstractContextManager[Any]:
        """Tensors made inside are on this device."""

    @abc.abstractmethod
    def all_reduce(self, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
        """The reduction of the replicas' tensors, on the device of each of them."""

    # Gradients and programs

    @abc.abstractmethod
    def value_and_grad(
        self, fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
    ) -> Callable[..., Any]:
        """See `ks.value_and_grad`."""

    @abc.abstractmethod
    def function(
        self, fn: Callable[..., Any], jit_compile: bool | None
    ) -> Callable[..., Any]:
        """See `ks.function`."""

    def in_program(self) -> bool:
        """Whether a program is being traced, in which Python runs only once."""
        return False

    def when_differentiated(  # noqa: B027
        self, tensors: Sequence[Any], call: Callable[[], None]
    ) -> None:
        """Calls a function where a gradient of tensors is computed, or may be."""

    def optimizer_apply(
        self, optimizer: Any, apply: Callable[..., Any]
    ) -> Callable[..., Any]:
        """`optimizer.apply` inside the current program."""
        return apply

    # Input

    def on_device_of(self, tensor: Any) -> contextlib.AbstractContextManager[Any]:
        """Operations of Keras inside leave a tensor on its device.

        Only for engines where Keras moves arguments to its current device.
        """
        return contextlib.nullcontext()

    def transfers(self, devices: Sequence[Device]) -> Transfer:
        """The transfer of batches, structures of arrays, to the devices of replicas.

        Returns:
            A callable of the parts of a batch, one for each device, that begins to move
            them; called ahead of use, on a separate thread. It returns a callable for
            the thread that uses the tensors, which waits for the transfer if the
            engine needs that, and returns the parts as one structure.
        """

        def begin(parts: Sequence[Any]) -> Callable[[], Any]:
            moved = [
                map_structure(
                    lambda leaf, device=device: (
                        None if leaf is None else self.to_device(leaf, device)
                    ),
                    part,
                )
                for part, device in zip(parts, devices, strict=True)
            ]
            return lambda: regroup(moved)

        return begin

    def tensor_spec(self, shape: tuple[int | None, ...], dtype: str) -> Any:
        """Shape and dtype of a tensor, in the framework's own class."""
        return self.spec_class(shape, self.stored_dtype(dtype))

    def stored_dtype(self, dtype: str) -> str:
        """The dtype of tensors that are made with a dtype."""
        return dtype

    # Workers

    def connect(
        self, group: WorkerGroup, options: CommunicationOptions
    ) -> Communicator:
        """Starts the engine between workers, before the devices are first used."""
        raise NotImplementedError

    @property
    def random_state(self) -> bytes:
        """The state of the framework's global random numbers; empty without any."""
        return b""

    @random_state.setter  # noqa: B027
    def random_state(self, state: bytes) -> None:
        pass

    # Models

    def sync_variables(self, model: Any) -> None:  # noqa: B027
        """Assigns what a loop has computed to a model's variables, between two steps.

        Steps that take and return variables as state leave them empty until then.
        """

    # Strategies

    @abc.abstractmethod
    def drivers(self, strategy: StrategyCore) -> Drivers:
        """The drivers of a strategy, which has its placement."""


class StrategyCore(abc.ABC):
    """Parts of a strategy that engines, input and hooks use.

    Args:
        engine: the engine.
        placement: the devices of replicas and variables.
        sync_batch_norm: bool, whether batch normalization uses the statistics of the
            global batch.
        random_numbers: `"partitioned"` or `"keras"`.
    """

    def __init__(
        self,
        engine: Engine,
        placement: Placement,
        sync_batch_norm: bool = True,
        random_numbers: str = "partitioned",
    ):
        self._engine = engine
        self._placement = placement
        self._sync_batch_norm = sync_batch_norm
        self._random_numbers = random_numbers
        self._synced_variables = IdSet()
        self._drivers = engine.drivers(self)

    @property
    def placement(self) -> Placement:
        """The devices of replicas and variables."""
        return self._placement

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine

    @property
    def drivers(self) -> Drivers:
        """The engine's drivers for this strategy."""
        return self._drivers

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """int, how many replicas compute one step together."""

    @property
    @abc.abstractmethod
    def sync_batch_norm(self) -> bool:
        """bool, whether batch normalization uses the global batch's statistics."""

    @property
    @abc.abstractmethod
    def random_numbers(self) -> str:
        """`"partitioned"` or `"keras"`, see `ks.MirroredStrategy`."""

    @property
    def synced_variables(self) -> IdSet:
        """Variables that have been synchronized between workers."""
        return self._synced_variables

    @property
    def partitions_draws(self) -> bool:
        """bool, whether engines without counters draw in blocks of rows."""
        return self._random_numbers == "partitioned"

    @property
    def workers(self) -> Communicator | None:
        """The workers of the cluster; None with one process."""
        return self._placement.workers

    @property
    def replicas_here(self) -> int:
        """int, the replicas with visible components: local, or all in a program."""
        counts = self._placement.replica_counts
        # Without workers, the local ones are all.
        return counts.total if self.other_workers is None else counts.count

    @property
    def other_workers(self) -> Communicator | None:
        """The workers, if values have components in other processes; else None."""
        if self.workers is None or self._drivers.run.sees_all_replicas:
            return None
        return self.workers

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
