"""The data-parallel call of a layer, for engines with separate replicas.

# Why the call, and not the step

A step of `Model.fit` runs once, on the global batch, as Keras or its user wrote
it. Only the outermost calls of layers in it (`self(x, training=True)`) are
parallel: the rows of their arguments are split over the replicas, each replica
calls the layer on its rows, and the outputs are joined to one global batch. The
loss, its reduction and masks, every metric, `add_loss`, clipping, accumulation and
the optimizer get the same values as on one device, so they need no distributed
version, and a custom `train_step` is exact whatever it computes. In the backward
pass the outputs' gradient is split by rows, each replica runs its own backward
pass, and the gradients of the variables are summed.

Only results of code *inside* the layer have to be combined: batch statistics (see
`training/batch_norm.py`), losses that layers add, and state that they update.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.input.row_splits import split_sizes
from keras_strategies.keras_compat.models.building import is_built
from keras_strategies.keras_compat.models.layer_calls import (
    CallRoute,
    direct_call,
    layer_calls_through,
)
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.data_parallel.call_on_replicas import (
    CallOnReplicas,
    SplitCall,
)
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.runtime.row_checks.layer_checks import RowChecks
from keras_strategies.runtime.row_checks.layer_probes import (
    LayerCall,
    LayerProbes,
    argument_leaves,
)
from keras_strategies.runtime.state.replica_state import ReplicaState, has_rows
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

# Number of rows for measuring the arithmetic of a layer.
_MEASURED_ROWS = 4


@dataclass(frozen=True)
class CallRoutes:
    """Functions that call a layer's own code, like `direct_call`.

    Args:
        unsplit: for calls of one device with all rows.
        split: for those of replicas with their rows, which may contain collectives.
    """

    unsplit: CallRoute = direct_call
    split: CallRoute = direct_call


class DataParallelCall(abc.ABC):
    """Calls a layer on all replicas, each on its rows of the global batch.

    Args:
        strategy: the strategy.
        primitives: the functions of the framework's tensors.
        probes: the framework's calls on a few rows.
        routes: how the layer's code is called.
    """

    def __init__(
        self,
        strategy: StrategyCore,
        primitives: TensorPrimitives,
        probes: LayerProbes,
        routes: CallRoutes | None = None,
    ):
        self._routes = routes or CallRoutes()
        self.strategy = strategy
        self.placement = strategy.placement
        #: The strategy's `CrossDeviceOps`, None for the framework's own sums.
        self.reduction = LocalReduction.of(strategy)
        self.probes = probes
        self._primitives = primitives
        self._not_by_rows: weakref.WeakSet[Any] = weakref.WeakSet()
        self._foreign: weakref.WeakKeyDictionary[Any, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._row_checks = RowChecks(strategy.placement.workers)

    # Provided by an engine.

    @abc.abstractmethod
    def can_split(self, layer: Any, tensors: Sequence[Any]) -> bool:
        """Whether replicas can call a layer, with copies of all of its variables."""

    @abc.abstractmethod
    def on_replicas(self, call: SplitCall) -> CallOnReplicas:
        """A call on the replicas that have rows."""

    def is_faster_unsplit(
        self, layer: Any, rows: int, row_split: RowSplit, call_few: Callable[[], int]
    ) -> bool:
        """Whether one device calls a layer in less time than the replicas.

        `call_few()` calls the layer on a few rows without changing its state, and
        returns their number.
        """
        return False

    def sizes_in_program(self, layer_call: LayerCall, count: int) -> list[Any]:
        """Rows for each replica, in a program for any number of rows."""
        raise NotImplementedError

    def workers_changed(self) -> None:
        """Drops the results of row checks, which workers agree on."""
        self._row_checks.clear()

    def has_foreign_variables(
        self, layer: Any, is_foreign: Callable[[Any], bool], what: str
    ) -> bool:
        """Whether a layer has variables without copies on replicas; warns once.

        Args:
            layer: the layer.
            is_foreign: callable of a layer, the check of the framework.
            what: str, the framework's objects that have such variables.
        """
        known = self._foreign.get(layer)
        if known is None:
            known = self._foreign[layer] = is_foreign(layer)
            if known:
                warn_user(
                    f"Layer {layer.name!r} contains {what}. Replicas cannot have "
                    "copies of their variables, so the layer is called on one device "
                    "with the unsplit batch, which is exact but not parallel. Use "
                    "`add_weight` and Keras layers to run it on all replicas."
                )
        return known

    # The call.

    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with layer_calls_through(None):
            leaves = argument_leaves(args, kwargs)
            if layer in self._not_by_rows or not is_built(layer):
                return call(*args, **kwargs)
            if any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                return call(*args, **kwargs)
            leaves = [_as_tensor(leaf) for leaf in leaves]
            rows = _rows(leaves)
            if rows is None:
                return call(*args, **kwargs)
            layer_call = LayerCall(layer, call, (args, kwargs), leaves, rows)
            row_split = self._row_split(layer_call)
            if row_split is None:
                return self._routes.unsplit(layer, call, args, kwargs)
            check, is_new = self._row_checks.check(self.probes, layer_call)
            if check.problem is not None:
                outputs = call(*args, **kwargs)
                if is_new:
                    self._row_checks.add(layer_call, check)
                    self._warn_of(layer, check.problem)
                return outputs
            split_call = SplitCall(
                self.strategy,
                layer_call,
                row_split,
                self.reduction,
                self._routes.split,
            )
            result = self.on_replicas(split_call).outputs(check.loss_kinds)
            if result is None:
                self._not_by_rows.add(layer)
                return call(*args, **kwargs)
            return result[0]

    def _row_split(self, layer_call: LayerCall) -> RowSplit | None:
        """The rows of each replica that takes part; None to call the layer unsplit."""
        layer, rows = layer_call.layer, layer_call.rows
        tensors = [leaf for leaf in layer_call.leaves if has_rows(leaf, rows)]
        if not self.can_split(layer, tensors):
            return None
        total, workers = self.placement.replica_counts.total, self.placement.workers
        if isinstance(rows, int):
            every: list[Any] = split_sizes(rows, total)
        else:
            every = self.sizes_in_program(layer_call, total)
        # Replicas without rows do not participate.
        if workers is None:
            row_split = RowSplit.local(self._primitives, every)
        else:
            found = RowSplit.over(self._primitives, every, workers)
            if found is None:
                # Fewer rows than workers: each worker computes all rows.
                return None
            row_split = found
        replicas, lead = self.placement.replicas, self.placement.variables
        is_alone = len(row_split.every) == 1 and replicas[0] == lead
        if not row_split.sizes or (is_alone and self.reduction is None):
            return None

        def call_few() -> int:
            few = [
                self.probes.first_rows(leaf, _MEASURED_ROWS)
                if has_rows(leaf, rows)
                else leaf
                for leaf in layer_call.leaves
            ]
            args, kwargs = layer_call.arguments(few)
            with ReplicaState(raw_value).scope():
                layer_call.call(*args, **kwargs)
            return min(rows, _MEASURED_ROWS)

        if self.is_faster_unsplit(layer, rows, row_split, call_few):
            return None
        return row_split

    def _warn_of(self, layer: Any, problem: str) -> None:
        warn_user(
            f"Layer {layer.name!r} ({type(layer).__name__}) cannot be split by rows: "
            f"{problem}. It is called on one device with the unsplit batch instead, "
            "which is exact but not parallel. To run it on all replicas of "
            f"{self.strategy!r}, compute each row from its own inputs, and move "
            "computations on the full batch out of the layer, for example to the loss."
        )


def _as_tensor(leaf: Any) -> Any:
    """Converts NumPy arrays to tensors; other leaves are returned unchanged."""
    if hasattr(leaf, "__array__") and not keras.ops.is_tensor(leaf):
        if isinstance(leaf, keras.Variable):
            return leaf
        return keras.ops.convert_to_tensor(leaf)
    return leaf


def _rows(leaves: list[Any]) -> Any:
    """The rows of the first tensor with a batch axis; None without one."""
    for leaf in leaves:
        if keras.ops.is_tensor(leaf) and len(leaf.shape) > 0:
            return keras.ops.shape(leaf)[0]
    return None
