"""`Model.fit` and its siblings on JAX: one program describes the global batch."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from keras_strategies import keras_compat
from keras_strategies.engines.jax.array_placement import is_spread
from keras_strategies.engines.jax.batch_placement import BatchPlacer
from keras_strategies.engines.jax.devices import default_device, device_of, jax_device
from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.function.program_sharding import Layout
from keras_strategies.engines.jax.function.state_refs import LocalStacks
from keras_strategies.engines.jax.function.trace_scopes import in_trace
from keras_strategies.engines.jax.run.replica_program import JaxRun, run_single_replica
from keras_strategies.engines.jax.run.replica_scope import current_replica_scope
from keras_strategies.engines.jax.run.run_programs import RunPrograms
from keras_strategies.engines.jax.sharding import orbax_checkpoints
from keras_strategies.engines.jax.sharding.cross_worker_shards import (
    Parts,
    put_variable,
    reader,
)
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.errors import ModelScopeError
from keras_strategies.runtime.base import TrainerAdapter, VariableCopy
from keras_strategies.runtime.run_scope import is_local

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy


class JaxTrainer(TrainerAdapter):
    """What training has in common on one device and on many.

    Args:
        strategy: the strategy.
        placer: what puts batches on the devices.
    """

    def __init__(self, strategy: Strategy, placer: BatchPlacer):
        super().__init__(strategy)
        keras_compat.hook_jax_input()
        self.placer = placer
        if self.placement.workers is not None:
            keras_compat.hook_jax_placement(put_variable, is_spread, reader(_parts_of))
        self.home = jax_device(self.placement.variables)
        #: The devices of all replicas, those of other workers too.
        self.devices = [jax_device(device) for device in self.placement.replicas]

    @abc.abstractmethod
    def step(self, model: Any, kind: str) -> compiled_steps.Step:
        """One step on a batch that has been placed."""

    def prepared(self, state: Any) -> Any:
        """The state for the first step after the variables had their values."""
        return compiled_steps.unshared(state)

    @abc.abstractmethod
    def is_in_place(self, variable: Any) -> bool:
        """Whether a variable is one of those that the strategy keeps."""

    @abc.abstractmethod
    def adopt(self, variable: Any) -> None:
        """Moves a variable that was made outside of the scope to its place."""

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(keras_compat.batches_placed_by(self.placer))
            if default_device() != self.home:
                stack.enter_context(jax.default_device(self.home))
            distribution = self.distribution()
            if distribution is not None:
                stack.enter_context(distribution.scope())
            yield

    @contextlib.contextmanager
    def method(self, model: Any, name: str) -> Iterator[None]:
        # A callback of `fit` may call `evaluate` while the variables are empty.
        keras_compat.sync_jax_state(model)
        self.check_model(model)
        try:
            yield
        except BaseException:
            keras_compat.restore_jax_state(model)
            raise

    def step_function(
        self, model: Any, kind: str, make: Callable[[bool], Any], force: bool
    ) -> None:
        name = f"{kind}_function"
        if getattr(model, name) is not None and not force:
            return
        if kind != "predict":
            self._adopt_compiled(model)
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

    def _adopt_compiled(self, model: Any) -> None:
        """Moves what was handed to `compile` ready-made: optimizer and metrics."""
        optimizer = [] if model.optimizer is None else model.optimizer.variables
        for variable in (*optimizer, *model.metrics_variables):
            if not self.is_in_place(variable):
                self.adopt(variable)

    def _placing(self, step: compiled_steps.Step) -> compiled_steps.Step:
        # Keras 3.15 hands the input of `predict_on_batch` over as it is.
        return lambda state, batch: step(state, self.placer.place(batch))

    def check_model(self, model: Any) -> None:
        for variable in (*model.trainable_variables, *model.non_trainable_variables):
            if not self.is_in_place(variable):
                raise ModelScopeError(
                    f"Variable {variable.path!r} of model {model.name!r} lies on "
                    f"{_places(variable)}, but {self.strategy!r} keeps variables on "
                    f"{self._place_of_variables()}: it belongs to a layer that was "
                    "made outside of the strategy's scope. Move the lines that make "
                    "it into `with strategy.scope():`."
                )

    def _place_of_variables(self) -> str:
        return ", ".join(str(device) for device in self.placement.keepers)

    def save_sharded(self, model: Any, directory: Path, keep: int) -> int:
        keras_compat.sync_jax_state(model)
        with self._together(f"save_sharded to {str(directory)!r}"):
            return orbax_checkpoints.save(model, directory, keep)

    def load_sharded(self, model: Any, directory: Path) -> int:
        keras_compat.sync_jax_state(model)
        with self._together(f"load_sharded from {str(directory)!r}"):
            return orbax_checkpoints.load(model, directory, self._sharding_now)

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Entered by all workers; those that do not come are named."""
        workers = self.placement.workers
        if workers is None:
            yield
            return
        assert isinstance(workers, JaxWorkers)
        workers.group.barrier(what)
        with workers.exchange():
            yield
        # Nobody reads what another has not finished.
        workers.group.barrier(f"the end of {what}")

    def _sharding_now(self, variable: Any) -> jax.sharding.Sharding:
        sharding: jax.sharding.Sharding = keras_compat.raw_value(variable).sharding
        return sharding

    def copies(self, variable: Any) -> list[VariableCopy]:
        raw = keras_compat.raw_value(variable)
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
    def run(self) -> JaxRun | None:
        """What traces replicas; None where there is one that does everything."""
        return None if self.placement.is_single else JaxRun(self.strategy, self.devices)

    @functools.cached_property
    def _run_programs(self) -> RunPrograms:
        return RunPrograms(self.strategy)

    @property
    def layout(self) -> Layout:
        """Where programs run that use this strategy's variables."""
        if self.run is None:
            return Layout(jax.sharding.SingleDeviceSharding(self.home))
        return self.run.layout

    @property
    def local_stacks(self) -> LocalStacks | None:
        """The values of on-read variables; None where there is but one."""
        return None if self.run is None else self.run.local_stacks

    def run_replicas(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        """See `Backend.run_replicas`."""
        if self.run is None:
            return [run_single_replica(self.strategy, fn, args[0], kwargs[0])]
        if in_trace():
            return self.run(fn, args, kwargs)
        return self._run_programs(fn, args, kwargs)

    def beside(self, variable: Any, tensor: Any) -> Any:
        raw = keras_compat.raw_value(variable)
        if in_trace() or not isinstance(tensor, jax.Array) or raw is None:
            return tensor
        sharding = raw.sharding
        if isinstance(sharding, jax.NamedSharding):
            sharding = jax.NamedSharding(sharding.mesh, jax.P())
        return jax.device_put(tensor, sharding)

    def local_values(self, variable: Any) -> list[Any]:
        if self.local_stacks is None or not is_local(variable):
            return super().local_values(variable)
        # Of several devices of a replica, each has its value.
        shards = self.local_stacks.get(variable).addressable_shards
        parts = {shard.index[0].start or 0: shard.data[0] for shard in shards}
        return [parts[i] for i in sorted(parts)]

    def variable_assigned(self, variable: Any, value: Any) -> None:
        if self.local_stacks is not None:
            self.local_stacks.drop(variable)

    def apply_gradients(
        self,
        optimizer: Any,
        apply: Callable[..., Any],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        aggregate: bool,
    ) -> Any:
        replicas = current_replica_scope().replicas
        replicas.apply(
            list(gradients), aggregate, lambda summed: apply(summed, variables)
        )
        return optimizer.iterations


def _parts_of(variable: Any) -> Parts | None:
    strategy = keras_compat.strategy_of(variable)
    return None if strategy is None else getattr(strategy.trainer, "parts", None)


def _places(variable: Any) -> str:
    raw = keras_compat.raw_value(variable)
    return ", ".join(sorted(str(device_of(device)) for device in raw.devices()))
