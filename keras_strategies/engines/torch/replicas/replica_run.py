"""`Strategy.run` on Torch."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from keras_strategies.engines.torch.compat import is_transformed, version_of
from keras_strategies.engines.torch.confirmed_steps import confirmed
from keras_strategies.engines.torch.data_parallel.layer_call_driver import (
    TorchLayerCalls,
)
from keras_strategies.engines.torch.devices import moved, torch_device
from keras_strategies.engines.torch.random_numbers.replica_generators import (
    ReplicaGenerators,
)
from keras_strategies.engines.torch.random_numbers.row_numbers import seeing_draws
from keras_strategies.engines.torch.replicas.left_gradients import (
    LeftGradients,
    ReplicaFunctions,
    ReplicaGradients,
    current_gradients,
)
from keras_strategies.engines.torch.replicas.replica_threads import ReplicaThreads
from keras_strategies.engines.torch.replicas.replica_variables import ReplicaVariables
from keras_strategies.engines.torch.replicas.shared_steps import steps_taken_once
from keras_strategies.engines.torch.replicas.thread_collectives import (
    ThreadCollectives,
)
from keras_strategies.engines.torch.tensor_primitives import PRIMITIVES
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.thread_state import outside_stateless_scopes
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.replicas.replica_run import MergeContext, ReplicaRun
from keras_strategies.runtime.state.local_values import TensorStorage
from keras_strategies.runtime.state.run_state import CreatedVariables, RunState
from keras_strategies.values import map_structure

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TorchRun(ReplicaRun):
    """Runs functions on the replicas of one strategy.

    Args:
        strategy: the strategy.
        threads: the threads of the replicas.
        variables: the replicas' copies of variables.
    """

    def __init__(
        self,
        strategy: StrategyCore,
        threads: ReplicaThreads,
        variables: ReplicaVariables,
    ):
        self._devices = [torch_device(each) for each in strategy.placement.replicas]
        self._kinds = sorted({device.type for device in self._devices})
        super().__init__(
            strategy,
            PRIMITIVES,
            TensorStorage(self._placed),
            TorchLayerCalls(strategy, threads, variables),
        )
        self._threads = threads
        self._variables = variables
        # Variables that have had gradients of `backward()`, by id.
        self._with_gradients: dict[int, weakref.ref[Any]] = {}

    def _placed(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Values on the devices of the replicas."""
        pairs = zip(values, self._devices, strict=True)
        return [value.detach().to(device) for value, device in pairs]

    # Dynamo cannot follow threads: a compiled step runs around this call.
    @torch.compiler.disable
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        if is_transformed():
            raise ContextError(
                f"`run` of {getattr(fn, '__qualname__', fn)!r} was called in a "
                "transform of `torch.func` or in `torch.autograd.forward_ad`, whose "
                "derivatives do not pass through replicas. Call the transform inside "
                "of the function."
            )
        rows = self.rows_of(args, kwargs)
        if not self.knows_rows(()):
            rows = functools.partial(_refuse_draws, self._kinds)
        args = self._on_replicas(args)
        kwargs = self._on_replicas(kwargs)
        count = len(self.placement.replicas)
        left = LeftGradients(self._variables, self._with_gradients, count)
        merging = MergeContext(self, left)
        # Replicas share the objects that a function changes, so they take turns.
        collectives = ThreadCollectives(
            self.placement.replicas,
            True,
            self.replica_set,
            merging,
        )
        made = CreatedVariables()
        tasks = self.tasks(fn, args, kwargs, rows, collectives, merging, made)
        with (
            confirmed(lambda: merging.written, self.placement.workers),
            patching.installed_while(*RunState.patches),
            steps_taken_once(),
            left,
        ):
            if len(tasks) == 1:
                # It runs on this thread, which may be in a step of `fit`.
                with layer_calls_through(None):
                    results = self._threads.run(tasks, collectives)
            else:
                with collectives.drawing_from(ReplicaGenerators(self._devices)):
                    results = self._threads.run(tasks, collectives)
            with self._variables.in_step():
                self.commit(merging)
        return results

    def _on_replicas(self, arguments: Sequence[Any]) -> list[Any]:
        """Arguments with their tensors on the devices of the replicas."""
        return [
            map_structure(
                lambda leaf, device=device: (
                    moved(leaf, device) if isinstance(leaf, torch.Tensor) else leaf
                ),
                own,
            )
            for own, device in zip(arguments, self._devices, strict=True)
        ]

    def knows_rows(self, own: Sequence[Any]) -> bool:
        return len(self._kinds) == 1

    def outside_replicas(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @contextlib.contextmanager
    def creating_variable(self) -> Iterator[None]:
        with outside_stateless_scopes(), self.strategy.drivers.fit.scope():
            yield

    @contextlib.contextmanager
    def seeing_draws(self, state: RunState) -> Iterator[None]:
        assert isinstance(state.record, ReplicaGradients)
        with seeing_draws(), ReplicaFunctions(state.record):
            yield

    def are_sums(
        self, gradients: Sequence[Any], variables: Sequence[Any] | None
    ) -> bool:
        if self.replica_set.counts.total == 1:
            return False
        return current_gradients().are_sums(gradients, variables)

    def copier(self, replica_id: int) -> Callable[[Any], Any]:
        return functools.partial(self._variables.copy, replica_id)

    def assigned_value(self, variable: Any, value: torch.Tensor) -> torch.Tensor:
        # A leaf of the autograd graph: assignments have no gradient.
        leaf = value.detach()
        if raw_value(variable).requires_grad:
            # A copy: the value may be another variable's memory.
            leaf = leaf.clone().requires_grad_()
        return leaf

    @contextlib.contextmanager
    def merged(self) -> Iterator[None]:
        with self.strategy.drivers.fit.scope(), self._variables.in_step():
            yield

    def updating(self) -> contextlib.AbstractContextManager[Any]:
        return torch.no_grad()

    def version(self, variable: Any) -> tuple[int, int]:
        raw = raw_value(variable)
        return id(raw), version_of(raw)


def _refuse_draws(kinds: Sequence[str]) -> NoReturn:
    """In place of the rows of a run, which its first draw asks for."""
    raise ContextError(
        "Random numbers are drawn on replicas with devices of different kinds "
        f"({', '.join(kinds)}), which have other generators. Give the strategy devices "
        "of one kind, or draw outside of `run` and pass the numbers as an argument."
    )
