"""Interfaces of drivers: the parts of an engine for one strategy.

`FitDriver` and `RunDriver` are required. The others are for strategies that shard
variables, write sharded checkpoints, train on parameter servers, or continue training
when their workers change.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from keras_strategies.devices import Device
from keras_strategies.runtime.placement import Placement, StepCost, VariableCopy
from keras_strategies.runtime.row_splits import split_sizes


class FitDriver(abc.ABC):
    """Training of Keras models: `fit`, `evaluate` and `predict`.

    Args:
        placement: the devices of replicas and variables.
    """

    #: Whether replicas have copies of all variables, or of weights only.
    mirrors_all: ClassVar[bool] = True
    #: Callable of the rows of a batch and of the number of replicas, which returns the
    #: rows of each. A function, so that processes of a dataset can have it.
    split_rows: Callable[[int, int], list[int]] = staticmethod(split_sizes)
    #: Whether each worker needs all rows of a batch in which a replica has none.
    needs_few_rows: ClassVar[bool] = False

    def __init__(self, placement: Placement):
        self.placement = placement

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager around the creation and the methods of models."""

    @abc.abstractmethod
    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        """Sets `model.{kind}_function` for `kind` "train", "test" or "predict".

        `make()` sets Keras's own.
        """

    @abc.abstractmethod
    def copies(self, variable: Any) -> list[VariableCopy]:
        """The memory of a `keras.Variable` on each device."""

    def method(self, model: Any, name: str) -> contextlib.AbstractContextManager[None]:
        """Entered around `compile`, `fit`, `evaluate` and others, inside the scope."""
        return contextlib.nullcontext()

    def adopt(self, variables: Iterable[Any]) -> None:  # noqa: B027
        """Takes variables of an optimizer or a metric that no scope has made."""

    def from_host(self, variable: Any, value: Any) -> Any:
        """What to assign in place of a NumPy array, without copies of its size.

        None, if the driver has assigned the array to the variable.
        """
        return value

    def planned_devices(self, is_weight: bool) -> tuple[Device, ...]:
        """The devices that will hold a weight, or a slot, metric or counter."""
        is_mirrored = is_weight or self.mirrors_all
        place = self.placement
        return self.memories(
            place.variable_devices if is_mirrored else (place.variables,)
        )

    def memories(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        """The devices without those that share the memory of another one."""
        return devices

    def plan_variables(self, variables: Sequence[Any]) -> None:  # noqa: B027
        """Called in a plan with the weights of a model, which have no values."""

    def step_cost(self, model: Any, batch: Any) -> StepCost:
        """Cost of a training step of a model with variables without values, for plans.

        Args:
            model: a model that has been compiled and built.
            batch: structure of `keras.KerasTensor`, `(x, y)` or `(x, y, weights)`.
        """
        raise NotImplementedError


class RunDriver(abc.ABC):
    """Functions on replicas: `Strategy.run` and Keras's calls in it."""

    @abc.abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        """Runs `fn` once per replica, in replica context; the results in order.

        An exception in one replica stops the others and is raised as it is.
        """

    @abc.abstractmethod
    def apply_gradients(
        self,
        apply: Callable[[Sequence[Any], Sequence[Any] | None], Any],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        aggregate: bool,
    ) -> None:
        """`optimizer.apply` in replica context: sums over replicas, applies once.

        Args:
            apply: the original, a callable of gradients and variables.
            gradients: those of the replica that calls.
            variables: the variables to update; None for the optimizer's own.
            aggregate: bool; False where gradients are the same on all replicas.
        """

    def are_sums(
        self, gradients: Sequence[Any], variables: Sequence[Any] | None
    ) -> bool:
        """Whether gradients of a replica are sums over all replicas already.

        Args:
            gradients: those for `optimizer.apply`.
            variables: their variables; None for the optimizer's own.

        Raises:
            InvalidArgumentError: where that is not known.
        """
        return False

    @abc.abstractmethod
    def local_values(self, variable: Any) -> Sequence[Any]:
        """An on-read variable's value on each local replica, on that device."""

    @abc.abstractmethod
    def variable_assigned(self, variable: Any) -> None:
        """An on-read variable was assigned in cross-replica context."""

    def creating_variable(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around the creation of a variable in replica context."""
        return contextlib.nullcontext()

    def colocated_with_variable(self, variable: Any, tensor: Any) -> Any:
        """The tensor on the devices of a variable."""
        return tensor

    def workers_changed(self) -> None:  # noqa: B027
        """Called when the workers of an elastic group have changed, before `run`.

        On-read variables have their aggregated values; those of replicas are dropped.
        """

    @property
    def sees_all_replicas(self) -> bool:
        """Whether a program of the replicas of all workers is being traced.

        Values have a component for each of these replicas in it, and workers
        exchange nothing outside of it.
        """
        return False


class ShardingDriver(abc.ABC):
    """Variables with layouts of a `keras.distribution.Distribution`."""

    @property
    @abc.abstractmethod
    def distribution(self) -> Any:
        """The `keras.distribution.Distribution`."""

    @abc.abstractmethod
    def set_layouts(self, variables: Sequence[Any]) -> None:
        """Assigns layouts to variables without values."""

    def initialized(self, variable: Any) -> None:  # noqa: B027
        """Called when a variable has its first value, once or twice."""

    @abc.abstractmethod
    def unsharded(self, variables: Sequence[Any]) -> list[Any]:
        """The variables that one process holds in full.

        Raises:
            WorkerError: if workers have other values of a sharded one.
        """

    def reading(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Entered on all workers while the chief saves a model."""
        return contextlib.nullcontext()


class CheckpointDriver(abc.ABC):
    """Checkpoints with shards that each process writes and reads by itself."""

    @abc.abstractmethod
    def save_sharded(self, model: Any, directory: Path, keep: int) -> int:
        """See `Strategy.save_sharded`."""

    @abc.abstractmethod
    def load_sharded(self, model: Any, directory: Path) -> int:
        """See `Strategy.load_sharded`."""


class ParameterServerDriver(abc.ABC):
    """Models with variables and steps in other processes."""

    @property
    @abc.abstractmethod
    def is_synchronous(self) -> bool:
        """Whether each step follows the updates of all before it."""

    @abc.abstractmethod
    def before_init(self, variable: Any) -> None:
        """Called before a `keras.Variable` is created in the scope."""

    @abc.abstractmethod
    def call(self, model: Any, name: str, original: Any, bound: Any) -> Any:
        """Runs `compile`, `fit`, `evaluate` or another method.

        Args:
            model: the model.
            name: str, the method.
            original: Keras's own.
            bound: `inspect.BoundArguments`, the model among them.
        """

    @abc.abstractmethod
    def worker_input(self, function: Any, class_weight: dict[int, float] | None) -> Any:
        """The input of `fit` and `evaluate` that workers read.

        Args:
            function: `DatasetFunction`.
            class_weight: dict, as for `fit`.
        """

    @abc.abstractmethod
    def input_made(self, epochs: Any) -> None:
        """A method of a model has made an epoch iterator of its input."""

    @abc.abstractmethod
    def reads_results(self, model: Any) -> None:
        """Called before a method of a model reads the results of metrics."""

    @abc.abstractmethod
    def finish_steps(self) -> None:
        """Waits for the steps under way."""


class RollbackDriver(abc.ABC):
    """State of a step that is repeated when the group of workers has changed.

    See `communication/group_actions.py` for the sequence. All methods are called in the
    thread that trains. `Communicator.end_waits` and `Communicator.replace` are the
    engine's other part.
    """

    @abc.abstractmethod
    def save_state(self, model: Any, kind: str) -> Callable[[], bool]:
        """Saves what a step may change before it fails; called before each step.

        That is everything which an unfinished step changes: batch statistics, seeds,
        metrics, the framework's random numbers; weights and slots only where a
        collective follows an update in the same step, or where the framework deletes
        them (donation).

        Args:
            model: the model.
            kind: str, "train", "test" or "predict".

        Returns:
            A callable that restores the state before the step. It returns False if
            that is not possible; then this worker receives the state of another one.
        """

    @abc.abstractmethod
    def save_variables(self, variables: Sequence[Any]) -> Callable[[], bool]:
        """Saves the values of variables in a custom loop; see `save_state`.

        Called before each call of a loop with all variables, and with each one that is
        created in it, possibly while a program is traced.
        """

    @abc.abstractmethod
    def reformed(self, model: Any, has_new: bool) -> None:
        """Called on all workers when a new generation has been formed and synchronized.

        Drops what was compiled or checked for the previous workers.

        Args:
            model: the model.
            has_new: bool, whether workers have joined; they lack the results of checks
                that workers agree on.
        """


@dataclass(frozen=True)
class Drivers:
    """The drivers of one strategy; None for an optional one that it does not need.

    Args:
        fit: training of Keras models.
        run: functions on replicas.
        sharding: variables with layouts.
        checkpoints: sharded checkpoints.
        servers: models on parameter servers.
        rollback: steps that are repeated when workers are lost.
    """

    fit: FitDriver
    run: RunDriver
    sharding: ShardingDriver | None = None
    checkpoints: CheckpointDriver | None = None
    servers: ParameterServerDriver | None = None
    rollback: RollbackDriver | None = None
