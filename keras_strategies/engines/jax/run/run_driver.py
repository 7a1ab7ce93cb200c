"""`Strategy.run` on JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from keras_strategies.engines.jax.devices import jax_device
from keras_strategies.engines.jax.function.program_sharding import ProgramSharding
from keras_strategies.engines.jax.function.state_refs import (
    OnReadValues,
    ProgramDriver,
)
from keras_strategies.engines.jax.function.trace_state import (
    in_trace,
    sees_all_replicas,
)
from keras_strategies.engines.jax.run.replica_program import (
    ReplicaProgram,
    run_single_replica,
)
from keras_strategies.engines.jax.run.run_programs import RunPrograms
from keras_strategies.engines.jax.run.traced_replica_state import current_replica_state
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.variables.values import raw_value

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class JaxRun(ProgramDriver):
    """Runs functions on the replicas of one strategy.

    Args:
        strategy: the strategy.
        mesh: returns the mesh of the replicas, see `ReplicaProgram`; None for a
            strategy of one device.
        sharding_of: see `ReplicaProgram`.
    """

    def __init__(
        self,
        strategy: StrategyCore,
        mesh: Callable[[], jax.sharding.Mesh] | None = None,
        sharding_of: Callable[[Any], jax.sharding.Sharding] | None = None,
    ):
        self._strategy = strategy
        self._mesh = mesh
        self._sharding_of = sharding_of

    @functools.cached_property
    def _replica_program(self) -> ReplicaProgram | None:
        """The trace of replicas; None for a strategy of one device."""
        if self._mesh is None:
            return None
        return ReplicaProgram(self._strategy, self._mesh(), self._sharding_of)

    @functools.cached_property
    def _programs(self) -> RunPrograms:
        assert self._replica_program is not None
        return RunPrograms(self._strategy, self._replica_program)

    @property
    def program_sharding(self) -> ProgramSharding:
        """Shardings of programs that use this strategy's variables."""
        if self._replica_program is None:
            home = jax_device(self._strategy.placement.variables)
            return ProgramSharding(jax.sharding.SingleDeviceSharding(home))
        return self._replica_program.sharding

    @property
    def on_read_values(self) -> OnReadValues | None:
        """The replica values of on-read variables; None with one replica."""
        program = self._replica_program
        if program is None or program.on_read_values.count == 1:
            return None
        return program.on_read_values

    def workers_changed(self) -> None:
        self.__dict__.pop("_replica_program", None)
        self.__dict__.pop("_programs", None)

    @property
    def sees_all_replicas(self) -> bool:
        return sees_all_replicas(self._strategy)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        workers = self._strategy.workers
        if workers is not None and workers.replica_counts.span > 1:
            raise ContextError(
                f"`run` was called under {self._strategy!r}, where a replica "
                "takes the devices of several workers; a replica function runs on one "
                "worker. Use `fit` with a custom `train_step`, or a `model_parallel` "
                "that divides the number of devices of each worker."
            )
        if self._replica_program is None:
            return [run_single_replica(self._strategy, fn, args[0], kwargs[0])]
        if in_trace():
            return self._replica_program(fn, args, kwargs)
        return self._programs(fn, args, kwargs)

    def apply_gradients(
        self,
        apply: Callable[[Sequence[Any], Sequence[Any] | None], Any],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        aggregate: bool,
    ) -> None:
        current_replica_state().replicas.apply(
            list(gradients), aggregate, lambda summed: apply(summed, variables)
        )

    def local_values(self, variable: Any) -> Sequence[Any]:
        assert self.on_read_values is not None
        # Each of several devices of a replica has its value.
        shards = self.on_read_values.get(variable).addressable_shards
        parts = {shard.index[0].start or 0: shard.data[0] for shard in shards}
        return [parts[i] for i in sorted(parts)]

    def variable_assigned(self, variable: Any) -> None:
        if self.on_read_values is not None:
            self.on_read_values.drop(variable)

    def colocated_with_variable(self, variable: Any, tensor: Any) -> Any:
        raw = raw_value(variable)
        if in_trace() or not isinstance(tensor, jax.Array) or raw is None:
            return tensor
        sharding = raw.sharding
        if isinstance(sharding, jax.NamedSharding):
            sharding = jax.NamedSharding(sharding.mesh, jax.P())
        return jax.device_put(tensor, sharding)
