"""Training on JAX: one compiled program computes the global batch."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from keras_strategies.engines.jax.array_placement import spans_processes
from keras_strategies.engines.jax.batch_placement import JaxBatchPlacer
from keras_strategies.engines.jax.devices import default_device, device_of, jax_device
from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.function.program_sharding import ProgramSharding
from keras_strategies.engines.jax.function.state_refs import OnReadValues
from keras_strategies.engines.jax.function.trace_state import in_trace
from keras_strategies.engines.jax.run.replica_program import (
    ReplicaProgram,
    run_single_replica,
)
from keras_strategies.engines.jax.run.run_programs import RunPrograms
from keras_strategies.engines.jax.run.traced_replica_state import current_replica_state
from keras_strategies.engines.jax.sharding import orbax_checkpoints
from keras_strategies.engines.jax.sharding.cross_worker_shards import (
    CrossWorkerShards,
    place_variable,
    variable_reader,
)
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.errors import ModelScopeError
from keras_strategies.keras_compat.backends.keras_on_jax import (
    hook_jax_placement,
    restore_jax_state,
    sync_jax_state,
)
from keras_strategies.keras_compat.models.input_adapters import batches_placed_by
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.engine import TrainerAdapter
from keras_strategies.runtime.placement import VariableCopy
from keras_strategies.runtime.run_state import is_local

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class JaxTrainer(TrainerAdapter):
    """Base of the trainers of one device and of a mesh.

    Args:
        strategy: the strategy.
        placer: the transfer of batches to the devices.
    """

    def __init__(self, strategy: StrategyCore, placer: JaxBatchPlacer):
        super().__init__(strategy)
        self.placer = placer
        if self.placement.workers is not None:
            hook_jax_placement(
                place_variable,
                spans_processes,
                variable_reader(_cross_worker_shards_of),
            )
        self.home = jax_device(self.placement.variables)
        #: The devices of all replicas, those of other workers too.
        self.devices = [jax_device(device) for device in self.placement.replicas]

    @abc.abstractmethod
    def step(self, model: Any, kind: str) -> compiled_steps.Step:
        """One step on a batch that is on the devices."""

    def prepared(self, state: Any) -> Any:
        """The state for the first step of a loop, from the variables."""
        return compiled_steps.unshared(state)

    @abc.abstractmethod
    def is_placed(self, variable: Any) -> bool:
        """Whether a variable has the placement of the strategy."""

    @abc.abstractmethod
    def place(self, variable: Any) -> None:
        """Moves a variable made outside of the scope to the strategy's devices."""

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(batches_placed_by(self.placer))
            if default_device() != self.home:
                stack.enter_context(jax.default_device(self.home))
            distribution = self.distribution()
            if distribution is not None:
                stack.enter_context(distribution.scope())
            yield

    @contextlib.contextmanager
    def method(self, model: Any, name: str) -> Iterator[None]:
        # A callback of `fit` may call `evaluate`, and `fit` empties the variables.
        sync_jax_state(model)
        self.check_model(model)
        try:
            yield
        except BaseException:
            restore_jax_state(model)
            raise

    def step_function(
        self, model: Any, kind: str, make: Callable[[bool], Any], force: bool
    ) -> None:
        name = f"{kind}_function"
        if getattr(model, name) is not None and not force:
            return
        if kind != "predict":
            self._place_compiled(model)
        step = self.step(model, kind)
        if kind == "predict":
            step = self._placing(step)
        workers = self.placement.workers
        function = compiled_steps.loop_function(model, kind, step, self.prepared)
        if workers is not None:
            function = compiled_steps.loop_function(
                model, kind, step, self.prepared, workers.begin_steps
            )
        setattr(model, name, function)

    def _place_compiled(self, model: Any) -> None:
        """Moves an optimizer and metrics that were built before `compile`."""
        optimizer = [] if model.optimizer is None else model.optimizer.variables
        for variable in (*optimizer, *model.metrics_variables):
            if not self.is_placed(variable):
                self.place(variable)

    def _placing(self, step: compiled_steps.Step) -> compiled_steps.Step:
        # Keras 3.15 does not place the input of `predict_on_batch`.
        return lambda state, batch: step(state, self.placer.place(batch))

    def check_model(self, model: Any) -> None:
        for variable in (*model.trainable_variables, *model.non_trainable_variables):
            if not self.is_placed(variable):
                raise ModelScopeError(
                    f"Variable {variable.path!r} of model {model.name!r} is on "
                    f"{_device_names(variable)}, but {self.strategy!r} places "
                    f"variables on {self._variable_devices()}: its layer was made "
                    "outside of the strategy's scope. Move the lines that make it into "
                    "`with strategy.scope():`."
                )

    def _variable_devices(self) -> str:
        return ", ".join(str(device) for device in self.placement.variable_devices)

    def save_sharded(self, model: Any, directory: Path, keep: int) -> int:
        sync_jax_state(model)
        with self._barriers(f"save_sharded to {str(directory)!r}"):
            return orbax_checkpoints.save(model, directory, keep)

    def load_sharded(self, model: Any, directory: Path) -> int:
        sync_jax_state(model)
        with self._barriers(f"load_sharded from {str(directory)!r}"):
            return orbax_checkpoints.load(model, directory, self._sharding_now)

    @contextlib.contextmanager
    def _barriers(self, what: str) -> Iterator[None]:
        """Barriers before and after a block; an absent worker is named in the error."""
        workers = self.placement.workers
        if workers is None:
            yield
            return
        assert isinstance(workers, JaxWorkers)
        workers.group.barrier(what)
        with workers.exchange():
            yield
        # No worker reads an unfinished checkpoint.
        workers.group.barrier(f"the end of {what}")

    def _sharding_now(self, variable: Any) -> jax.sharding.Sharding:
        sharding: jax.sharding.Sharding = raw_value(variable).sharding
        return sharding

    def copies(self, variable: Any) -> list[VariableCopy]:
        raw = raw_value(variable)
        if raw is None:
            return []
        role = "variable" if raw.is_fully_replicated else "shard"
        return [
            VariableCopy(
                str(device_of(shard.device)), shard.data.nbytes, role, shard.data
            )
            for shard in raw.addressable_shards
        ]

    @functools.cached_property
    def replica_program(self) -> ReplicaProgram | None:
        """The trace of replicas; None for a strategy of one device."""
        return (
            None
            if self.placement.is_single
            else ReplicaProgram(self.strategy, self.devices)
        )

    @functools.cached_property
    def _run_programs(self) -> RunPrograms:
        return RunPrograms(self.strategy)

    @property
    def program_sharding(self) -> ProgramSharding:
        """Shardings of programs that use this strategy's variables."""
        if self.replica_program is None:
            return ProgramSharding(jax.sharding.SingleDeviceSharding(self.home))
        return self.replica_program.sharding

    @property
    def on_read_values(self) -> OnReadValues | None:
        """The replica values of on-read variables; None with one replica."""
        return (
            None
            if self.replica_program is None
            else self.replica_program.on_read_values
        )

    def run_replicas(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        """See `Engine.run_replicas`."""
        if self.replica_program is None:
            return [run_single_replica(self.strategy, fn, args[0], kwargs[0])]
        if in_trace():
            return self.replica_program(fn, args, kwargs)
        return self._run_programs(fn, args, kwargs)

    def colocated_with_variable(self, variable: Any, tensor: Any) -> Any:
        raw = raw_value(variable)
        if in_trace() or not isinstance(tensor, jax.Array) or raw is None:
            return tensor
        sharding = raw.sharding
        if isinstance(sharding, jax.NamedSharding):
            sharding = jax.NamedSharding(sharding.mesh, jax.P())
        return jax.device_put(tensor, sharding)

    def local_values(self, variable: Any) -> list[Any]:
        if self.on_read_values is None or not is_local(variable):
            return super().local_values(variable)
        # Each of several devices of a replica has its value.
        shards = self.on_read_values.get(variable).addressable_shards
        parts = {shard.index[0].start or 0: shard.data[0] for shard in shards}
        return [parts[i] for i in sorted(parts)]

    def variable_assigned(self, variable: Any, value: Any) -> None:
        if self.on_read_values is not None:
            self.on_read_values.drop(variable)

    def apply_gradients(
        self,
        optimizer: Any,
        apply: Callable[..., Any],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        aggregate: bool,
    ) -> Any:
        replicas = current_replica_state().replicas
        replicas.apply(
            list(gradients), aggregate, lambda summed: apply(summed, variables)
        )
        return optimizer.iterations


def _cross_worker_shards_of(variable: Any) -> CrossWorkerShards | None:
    strategy = strategy_of(variable)
    return (
        None
        if strategy is None
        else getattr(strategy.trainer, "cross_worker_shards", None)
    )


def _device_names(variable: Any) -> str:
    raw = raw_value(variable)
    return ", ".join(sorted(str(device_of(device)) for device in raw.devices()))
