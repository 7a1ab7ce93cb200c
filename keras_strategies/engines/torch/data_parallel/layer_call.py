"""Data-parallel layer calls on Torch: which calls are split over threads."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from keras_strategies.engines.torch.compat import is_transformed
from keras_strategies.engines.torch.data_parallel.call_cost import CallCost, measure
from keras_strategies.engines.torch.data_parallel.call_on_threads import CallOnThreads
from keras_strategies.engines.torch.data_parallel.row_probing import TorchProbes
from keras_strategies.engines.torch.devices import torch_device
from keras_strategies.engines.torch.recorded_calls.recorded_calls import RecordedCalls
from keras_strategies.engines.torch.replicas.replica_random import (
    NoRandom,
    RandomCalls,
    ReplicaRandom,
)
from keras_strategies.engines.torch.replicas.replica_threads import ReplicaThreads
from keras_strategies.engines.torch.replicas.replica_variables import ReplicaVariables
from keras_strategies.engines.torch.tensor_primitives import PRIMITIVES
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import wraps_torch_modules
from keras_strategies.runtime.data_parallel.call_on_replicas import SplitCall
from keras_strategies.runtime.data_parallel.layer_call import (
    CallRoutes,
    DataParallelCall,
)
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.row_checks.layer_probes import flags

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
        routes = CallRoutes(unsplit=RecordedCalls(), split=RecordedCalls())
        super().__init__(strategy, PRIMITIVES, TorchProbes(strategy), routes)
        self._threads = threads
        self._variables = variables
        self._random_calls = RandomCalls(self.placement)
        self._random: ReplicaRandom = NoRandom()
        # On one physical device a small call is faster unsplit and computes the same,
        # unless each replica normalizes by its own batch statistics.
        devices = {torch_device(device) for device in self.placement.replicas}
        self._may_call_unsplit = (
            devices == {torch_device(self.placement.variables)}
            and strategy.sync_batch_norm
            and not strategy.always_split
            and self.placement.workers is None
            and self.reduction is None
        )
        self._costs: weakref.WeakKeyDictionary[Any, CallCost] = (
            weakref.WeakKeyDictionary()
        )
        # For each call of the current step, whether it was small.
        self._were_small: list[bool] = []

    @contextlib.contextmanager
    def step(self, is_small: bool) -> Iterator[Callable[[], bool]]:
        """Context manager around a step.

        A step in which all calls are so small that they run unsplit uses one kernel
        thread: synchronization makes several slower.

        Args:
            is_small: bool, whether the previous step was such a step.

        Returns:
            A callable that returns whether this step is.
        """
        self._were_small = []
        threads = torch.get_num_threads()
        if is_small:
            torch.set_num_threads(1)
        try:
            with layer_calls_through(self):
                yield lambda: bool(self._were_small) and all(self._were_small)
        finally:
            if is_small:
                torch.set_num_threads(threads)

    # Dynamo cannot follow threads; a compiled step runs around this call.
    @torch.compiler.disable
    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with self._random_calls.call(layer, flags(args, kwargs)) as self._random:
            return super().__call__(layer, call, args, kwargs)

    def can_split(self, layer: Any, tensors: Sequence[Any]) -> bool:
        # In transforms of `torch.func`, derivatives have levels of their thread.
        return not is_transformed() and not self.has_foreign_variables(
            layer, wraps_torch_modules, "torch modules"
        )

    def is_faster_unsplit(
        self, layer: Any, rows: int, row_split: RowSplit, call_few: Callable[[], int]
    ) -> bool:
        if not self._may_call_unsplit:
            return False
        try:
            work = self._cost_of(layer, call_few)
        except Exception:
            # A layer may raise any error on a subset of its rows. The row check that
            # follows calls it likewise, reports the error and leaves it unsplit.
            return False
        is_small = not work.worth_splitting(rows, len(row_split.sizes))
        self._were_small.append(is_small)
        if is_small:
            self.strategy.unsplit_calls.add(layer, "call", rows)
        return is_small

    def on_replicas(self, call: SplitCall) -> CallOnThreads:
        return CallOnThreads(call, self._threads, self._variables, self._random)

    def _cost_of(self, layer: Any, call_few: Callable[[], int]) -> CallCost:
        work = self._costs.get(layer)
        if work is None:
            work = self._costs[layer] = measure(call_few)
        return work
