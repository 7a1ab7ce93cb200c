"""Training on JAX: one compiled program computes the global batch."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from keras_strategies.engines.jax.array_placement import spans_processes
from keras_strategies.engines.jax.batch_placement import (
    BuildingBatches,
    HostBatches,
    JaxBatchPlacer,
)
from keras_strategies.engines.jax.devices import default_device, device_of, jax_device
from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.padded_rows import GatherRows
from keras_strategies.engines.jax.sharding import orbax_checkpoints
from keras_strategies.engines.jax.sharding.cross_worker_shards import (
    CrossWorkerShards,
    place_variable,
    variable_reader,
)
from keras_strategies.engines.jax.strategy_distribution import StrategyDistribution
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.keras_compat.backends.keras_on_jax import (
    hook_jax_placement,
    restore_jax_state,
    sync_jax_state,
)
from keras_strategies.keras_compat.models.building import is_built
from keras_strategies.keras_compat.models.input_adapters import (
    BatchPlacer,
    batches_placed_by,
)
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.strategy_variables import (
    set_variable_strategy,
)
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.drivers import CheckpointDriver, FitDriver, RollbackDriver
from keras_strategies.runtime.placement import (
    StepCost,
    VariableCopy,
    mirrored_step_cost,
)

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class JaxTrainer(FitDriver, CheckpointDriver):
    """Base of the trainers of one device and of a mesh.

    Args:
        strategy: the strategy.
        placer: the transfer of batches to the devices.
    """

    #: Where the state of a loop begins; None for the devices of the variables. JAX
    #: compiles separately for committed arrays, as programs return them, and for
    #: uncommitted ones, as of initializers.
    state_sharding_of_loops: jax.sharding.Sharding | None = None
    #: Where steps may be repeated with other workers; else None.
    rollback: RollbackDriver | None = None

    def __init__(self, strategy: StrategyCore, placer: JaxBatchPlacer):
        super().__init__(strategy.placement)
        self.strategy = strategy
        self.placer = placer
        self.home = jax_device(self.placement.variables)
        # Of the outermost open scope, if it has made `home` the default device.
        self._entered_home: contextlib.ExitStack | None = None

    @property
    def input_placer(self) -> BatchPlacer:
        """The transfer of the batches that Keras's loops read."""
        if self.rollback is None:
            return self.placer
        # A repeated step places its batch on the devices of the remaining workers.
        return HostBatches()

    @property
    def distribution(self) -> StrategyDistribution | None:
        """The layouts of batches and variables; None on one device."""
        return None

    def step_cost(self, model: Any, batch: Any) -> StepCost:
        return mirrored_step_cost(self.placement, model)

    @abc.abstractmethod
    def step(self, model: Any, kind: str) -> compiled_steps.Step:
        """One step on a batch that is on the devices."""

    def prepared(self, state: Any) -> Any:
        """The state for the first step of a loop, from the variables."""
        state = compiled_steps.unshared(state)
        to = self.state_sharding_of_loops
        return state if to is None else jax.device_put(state, to)

    @abc.abstractmethod
    def is_placed(self, variable: Any) -> bool:
        """Whether a variable has the placement of the strategy."""

    @abc.abstractmethod
    def place(self, variable: Any) -> None:
        """Moves a variable made outside of the scope to the strategy's devices."""

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        if self.placement.workers is not None or self.placement.mesh is not None:
            hook_jax_placement(
                place_variable,
                spans_processes,
                variable_reader(_cross_worker_shards_of),
            )
        with contextlib.ExitStack() as stack:
            stack.enter_context(batches_placed_by(self.input_placer))
            stack.enter_context(self._default_device())
            if self.distribution is not None:
                stack.enter_context(self.distribution.scope())
            yield

    @contextlib.contextmanager
    def _default_device(self) -> Iterator[None]:
        """Makes the device of the variables that of arrays without a placement."""
        if default_device() == self.home:
            yield
            return
        with contextlib.ExitStack() as self._entered_home:
            self._entered_home.enter_context(jax.default_device(self.home))
            try:
                yield
            finally:
                self._entered_home = None

    def replace_home(self, home: jax.Device) -> None:
        """Replaces the device of the variables, in the open scope too."""
        self.home = home
        if self._entered_home is not None:
            self._entered_home.close()
            self._entered_home.enter_context(jax.default_device(home))

    @contextlib.contextmanager
    def method(self, model: Any, name: str) -> Iterator[None]:
        # A callback of `fit` may call `evaluate`, and `fit` empties the variables.
        sync_jax_state(model)
        self._place_weights(model)
        with contextlib.ExitStack() as stack:
            if name == "predict" and not is_built(model):
                # Keras calls the model on a batch first.
                placer = BuildingBatches(self.input_placer, lambda: not is_built(model))
                stack.enter_context(batches_placed_by(placer))
            try:
                yield
            except BaseException:
                restore_jax_state(model)
                raise

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        if kind != "predict":
            self._place_compiled(model)
        setattr(model, f"{kind}_function", self.loop_function(model, kind))

    def loop_function(self, model: Any, kind: str) -> Callable[..., Any]:
        """The function that Keras calls for each item of its loop."""
        workers = self.placement.workers
        return compiled_steps.loop_function(
            model,
            kind,
            self.step(model, kind),
            self.prepared,
            self.placer,
            None if workers is None else workers.steps,
            self.gather_rows,
        )

    @property
    def gather_rows(self) -> GatherRows | None:
        """The gathering of outputs from other workers; None without a cluster."""
        workers = self.placement.workers
        if workers is None:
            return None
        assert isinstance(workers, JaxCommunicator)
        return workers.gather_rows_on_host

    def _place_weights(self, model: Any) -> None:
        """Takes layers that were made outside of the scope, or given variables later.

        A layer may be shared with a model of another strategy, whose methods move it
        back.
        """
        self._take((*model.trainable_variables, *model.non_trainable_variables))

    def _place_compiled(self, model: Any) -> None:
        """Takes an optimizer and metrics that were built before `compile`."""
        optimizer = getattr(model, "optimizer", None)
        slots = [] if optimizer is None else optimizer.variables
        self._take((*slots, *model.metrics_variables))

    def _take(self, variables: Iterable[Any]) -> None:
        for variable in variables:
            if not self.is_placed(variable):
                self.place(variable)
            if strategy_of(variable) is None:
                # Without one, values on devices of several processes are not read.
                set_variable_strategy(variable, self.strategy)

    def save_sharded(self, model: Any, directory: Path, keep: int) -> int:
        sync_jax_state(model)
        self._place_compiled(model)
        with self._barriers(f"save_sharded to {str(directory)!r}"):
            return orbax_checkpoints.save(model, directory, keep)

    def load_sharded(self, model: Any, directory: Path) -> int:
        sync_jax_state(model)
        self._place_compiled(model)
        with self._barriers(f"load_sharded from {str(directory)!r}"):
            return orbax_checkpoints.load(model, directory, self._sharding_now)

    @contextlib.contextmanager
    def _barriers(self, what: str) -> Iterator[None]:
        """Barriers before and after a block; an absent worker is named in the error."""
        workers = self.placement.workers
        if workers is None:
            yield
            return
        assert isinstance(workers, JaxCommunicator)
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


def _cross_worker_shards_of(variable: Any) -> CrossWorkerShards | None:
    strategy = strategy_of(variable)
    return (
        None
        if strategy is None
        else getattr(strategy.drivers.fit, "cross_worker_shards", None)
    )
