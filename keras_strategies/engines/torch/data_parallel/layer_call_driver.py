"""Data-parallel layer calls on Torch: which calls are split over threads."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from keras_strategies.engines.torch.compat import (
    changed_buffers,
    has_global_hooks,
    is_in_checkpoint,
    is_transformed,
    module_copy,
    module_hooks,
    saved_tensors_hooks_of_thread,
)
from keras_strategies.engines.torch.data_parallel.call_on_threads import CallOnThreads
from keras_strategies.engines.torch.data_parallel.compiled_calls import CompiledCalls
from keras_strategies.engines.torch.devices import torch_device
from keras_strategies.engines.torch.random_numbers.replica_generators import (
    generator_of,
)
from keras_strategies.engines.torch.rematerialization import rematerialized
from keras_strategies.engines.torch.replicas.replica_threads import ReplicaThreads
from keras_strategies.engines.torch.replicas.replica_variables import ReplicaVariables
from keras_strategies.keras_compat.backends.keras_on_torch import hook_torch_modules
from keras_strategies.keras_compat.backends.rematerialization import hook_remat
from keras_strategies.keras_compat.models.layers import (
    sublayers,
    torch_module_wrappers,
)
from keras_strategies.rows.declarations import is_declared
from keras_strategies.rows.row_placements import RowProof
from keras_strategies.runtime.data_parallel.replica_executor import LayerCallDriver
from keras_strategies.runtime.data_parallel.split_plan import SplitPlan
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


#: Draws that take more numbers for some parameters than for others.
_OF_PARAMETERS = frozenset(["beta", "binomial", "gamma"])
_IN_CHECKPOINT = (
    "A layer is called in `torch.utils.checkpoint.checkpoint` by a step. Its backward "
    "pass calls the layer again, which replicas cannot do each by itself, so the layer "
    "runs on one device with the unsplit batch, which is exact but not parallel. Call "
    "the checkpoint inside the layer's `call`, or use `keras.RematScope`, to run it on "
    "all replicas."
)


class TorchLayerCalls(LayerCallDriver):
    """Layer calls on the threads of a strategy.

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
        self._strategy = strategy
        self._threads = threads
        self._variables = variables
        self._compiled = CompiledCalls()
        self._has_warned = False
        hook_torch_modules(module_copy, changed_buffers)
        hook_remat(rematerialized)

    def can_split(self, tensors: Sequence[Any]) -> bool:
        if is_in_checkpoint():
            if not self._has_warned:
                self._has_warned = True
                warn_user(_IN_CHECKPOINT)
            return False
        # In transforms of `torch.func`, derivatives have levels of their thread.
        return not is_transformed()

    def foreign_variables(self, layer: Any) -> str | None:
        wrappers = [] if is_declared(layer) else torch_module_wrappers(layer)
        return None if all(map(is_declared, wrappers)) else "torch modules"

    def executor(self, plan: SplitPlan) -> CallOnThreads:
        return CallOnThreads(plan, self._threads, self._variables, self._compiled)

    def unsplit(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        shards = self._variables.shards
        if shards is None:
            return call(*args, **kwargs)
        return shards.call_on_all_rows(layer, call, args, kwargs)

    def why_unsplit(self, layer: Any, proof: RowProof | None) -> str:
        if proof is not None:
            return self._why_draws_differ(proof)
        if has_global_hooks() or any(map(any, map(module_hooks, sublayers(layer)))):
            return "it has hooks of torch, which would see the rows of one replica"
        return ""

    def _why_draws_differ(self, proof: RowProof) -> str:
        kinds = {device.kind for device in self._strategy.placement.replicas}
        if proof.draws and len(kinds) > 1:
            return (
                "it draws random numbers, and replicas are on devices of different "
                f"kinds ({', '.join(sorted(kinds))}), which have other generators"
            )
        if not self._strategy.partitions_draws:
            for name, multiple in zip(proof.drawn, proof.draws, strict=True):
                if multiple and name in _OF_PARAMETERS:
                    return (
                        f"random numbers of {name!r} depend on the parameters of rows "
                        "before them"
                    )
        return ""

    @contextlib.contextmanager
    def tracing(self, note: Callable[[str], None]) -> Iterator[None]:
        devices = {
            torch.device("cpu"),
            torch_device(self._strategy.placement.variables),
        }
        before = [(g, g.get_state()) for g in map(generator_of, devices)]
        try:
            # Hooks of the user's see no tensors of a comparison.
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            for generator, state in before:
                if not torch.equal(generator.get_state(), state):
                    generator.set_state(state)
                    note("draws random numbers of torch")

    def may_recompute(self) -> bool:
        hooks, shards = saved_tensors_hooks_of_thread(), self._variables.shards
        return hooks is not None and (shards is None or not shards.saves(hooks))
