"""Data-parallel layer calls on TensorFlow: which layers replicas can call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.data_parallel.call_in_lockstep import (
    CallInLockstep,
)
from keras_strategies.engines.tensorflow.data_parallel.zero_rows import (
    fails_on_zero_rows,
)
from keras_strategies.engines.tensorflow.replicas.lockstep_replicas import ReplicaEngine
from keras_strategies.keras_compat.backends.keras_on_tensorflow import (
    holds_tf_variables,
)
from keras_strategies.keras_compat.backends.rematerialization import hook_remat
from keras_strategies.keras_compat.state_scope import current_policy
from keras_strategies.rows.layer_calls import LayerCall
from keras_strategies.runtime.data_parallel.replica_executor import LayerCallDriver
from keras_strategies.runtime.data_parallel.split_plan import SplitPlan
from keras_strategies.runtime.replicas.replica_set import RowSplit

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TensorFlowLayerCalls(LayerCallDriver):
    """Layer calls on the replicas of a strategy.

    Args:
        strategy: the strategy.
        engine: the replicas' threads.
    """

    #: Seeds of TensorFlow's operations count those of the program before them.
    but_for = " but for numbers that the code draws by `tf.random`"

    def __init__(self, strategy: StrategyCore, engine: ReplicaEngine):
        self._engine = engine
        self._placement = strategy.placement
        hook_remat(_kept_on_replicas)

    def can_split(self, tensors: Sequence[Any]) -> bool:
        kinds = (tf.RaggedTensor, tf.SparseTensor)
        return not any(isinstance(tensor, kinds) for tensor in tensors)

    def foreign_variables(self, layer: Any) -> str | None:
        has_variables = holds_tf_variables(layer)
        return "variables or modules of TensorFlow" if has_variables else None

    def executor(self, plan: SplitPlan) -> CallInLockstep:
        return CallInLockstep(plan, self._engine)

    def unsplit(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return call(*args, **kwargs)

    @contextlib.contextmanager
    def tracing(self, note: Callable[[str], None]) -> Iterator[None]:
        # Constants have values, also while a program is traced.
        with tf.init_scope(), tf.device("CPU:0"):
            yield

    def sizes_in_program(
        self, layer_call: LayerCall, count: int
    ) -> tuple[list[Any], bool]:
        rows = layer_call.rows
        needs_rows = fails_on_zero_rows(layer_call)
        if needs_rows:
            rows = self._at_least_one_each(layer_call.layer, rows)
        base, larger = rows // count, rows % count
        sizes = [base + tf.cast(i < larger, base.dtype) for i in range(count)]
        return sizes, needs_rows

    def accepts_parts(self, layer_call: LayerCall, row_split: RowSplit) -> bool:
        return row_split.all_have_rows or not fails_on_zero_rows(layer_call)

    def _at_least_one_each(self, layer: Any, rows: Any) -> Any:
        count = self._placement.replica_counts.total
        message = (
            f"Layer {layer.name!r} was called on fewer rows than the {count} replicas, "
            "in a program for any number of rows. It contains convolutions or max "
            "pooling: their TensorFlow kernels fail on a replica without rows. Call it "
            f"on {count} rows or more, or use ks.OneDeviceStrategy."
        )
        check = tf.debugging.Assert(rows >= count, [message, rows])
        with tf.control_dependencies([check]):
            return tf.identity(rows)


def _kept_on_replicas(
    original: Callable[..., Any], function: Callable[..., Any]
) -> Callable[..., Any]:
    """`keras.remat`, but for a function of a replica, which keeps its activations.

    `tf.recompute_grad` has gradients of variables that the function reads itself, and
    replicas read tensors in their place.
    """
    return original(function) if current_policy() is None else function
