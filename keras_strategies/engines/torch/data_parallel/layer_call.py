"""Data-parallel layer calls on Torch: which calls are split over threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import torch

from keras_strategies.engines.torch.compat import (
    is_transformed,
    saved_tensors_hooks_of_thread,
)
from keras_strategies.engines.torch.data_parallel.call_on_threads import CallOnThreads
from keras_strategies.engines.torch.data_parallel.row_parts import joined
from keras_strategies.engines.torch.replicas.replica_threads import ReplicaThreads
from keras_strategies.engines.torch.replicas.replica_variables import ReplicaVariables
from keras_strategies.engines.torch.row_proofs.torch_row_prover import TorchRowProver
from keras_strategies.engines.torch.tensor_primitives import PRIMITIVES
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import wraps_torch_modules
from keras_strategies.runtime.data_parallel.call_on_replicas import SplitCall
from keras_strategies.runtime.data_parallel.layer_call import DataParallelCall

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TorchDataParallelCall(DataParallelCall):
    """Calls layers on the threads of a strategy.

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
        shards = variables.shards
        super().__init__(
            strategy,
            PRIMITIVES,
            TorchRowProver(strategy),
            None if shards is None else shards.call_on_all_rows,
        )
        self._threads = threads
        self._variables = variables

    # Dynamo cannot follow threads; a compiled step runs around this call.
    @torch.compiler.disable
    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if layer in self.in_unsplit_calls and self._saves_for_users():
            # It may be rematerialized, and saves the same tensors in both passes.
            with layer_calls_through(None):
                return call(*args, **kwargs)
        return super().__call__(layer, call, args, kwargs)

    def _saves_for_users(self) -> bool:
        hooks, shards = saved_tensors_hooks_of_thread(), self._variables.shards
        return hooks is not None and (shards is None or not shards.saves(hooks))

    @torch.compiler.disable
    def with_joined_outputs(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a layer; no output stays on its replicas."""
        return keras.tree.map_structure(joined, self(layer, call, args, kwargs))

    def can_split(self, layer: Any, tensors: Sequence[Any]) -> bool:
        # In transforms of `torch.func`, derivatives have levels of their thread.
        return not is_transformed() and not self.has_foreign_variables(
            layer, wraps_torch_modules, "torch modules"
        )

    def on_replicas(self, call: SplitCall) -> CallOnThreads:
        return CallOnThreads(call, self._threads, self._variables)
