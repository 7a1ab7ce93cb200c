"""Data-parallel layer calls on TensorFlow: which layers replicas can call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.data_parallel.call_in_lockstep import (
    CallInLockstep,
)
from keras_strategies.engines.tensorflow.data_parallel.elastic_steps import (
    TensorFlowElasticSteps,
)
from keras_strategies.engines.tensorflow.data_parallel.zero_rows import (
    fails_on_zero_rows,
)
from keras_strategies.engines.tensorflow.intercepted_draws import intercept_draws
from keras_strategies.engines.tensorflow.replicas.lockstep_replicas import (
    NestedCollectiveError,
    ReplicaEngine,
)
from keras_strategies.engines.tensorflow.row_proofs.prover import (
    TensorFlowRowProver,
)
from keras_strategies.engines.tensorflow.tensor_primitives import PRIMITIVES
from keras_strategies.engines.tensorflow.workers.worker_collectives import workers_of
from keras_strategies.keras_compat.backends.keras_on_tensorflow import (
    holds_tf_variables,
)
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.runtime.data_parallel.call_on_replicas import SplitCall
from keras_strategies.runtime.data_parallel.layer_call import DataParallelCall
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.row_proofs.layer_calls import LayerCall
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TensorFlowDataParallelCall(DataParallelCall):
    """Calls layers on the replicas of a strategy.

    Args:
        strategy: the strategy.
        engine: the replicas' threads.
    """

    def __init__(self, strategy: StrategyCore, engine: ReplicaEngine):
        super().__init__(strategy, PRIMITIVES, TensorFlowRowProver(strategy))
        intercept_draws()
        self._engine = engine
        #: The rollback of steps of elastic workers; None for a fixed group.
        self.elastic: TensorFlowElasticSteps | None = None
        workers = workers_of(self.placement)
        if workers is not None and workers.elastic is not None:
            self.elastic = TensorFlowElasticSteps(self._row_proofs, workers)

    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            return super().__call__(layer, call, args, kwargs)
        except NestedCollectiveError:
            warn_user(
                f"Layer {layer.name!r} ({type(layer).__name__}) calls a collective "
                "of the replicas in a loop or a branch, for example by batch "
                "normalization, which TensorFlow does not support. It is called on one "
                "device with the unsplit batch, which is exact but not parallel. Move "
                "the collective out of the loop to run the layer on all replicas."
            )
            self._not_by_rows.add(layer)
        with layer_calls_through(None):
            return call(*args, **kwargs)

    def can_split(self, layer: Any, tensors: Sequence[Any]) -> bool:
        kinds = (tf.RaggedTensor, tf.SparseTensor)
        if any(isinstance(tensor, kinds) for tensor in tensors):
            return False
        return not self.has_foreign_variables(
            layer, holds_tf_variables, "variables or modules of TensorFlow"
        )

    def on_replicas(self, call: SplitCall) -> CallInLockstep:
        return CallInLockstep(call, self._engine)

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

    def takes(self, layer_call: LayerCall, row_split: RowSplit) -> bool:
        return row_split.all_have_rows or not fails_on_zero_rows(layer_call)

    def _at_least_one_each(self, layer: Any, rows: Any) -> Any:
        count = self.placement.replica_counts.total
        message = (
            f"Layer {layer.name!r} was called on fewer rows than the {count} replicas, "
            "in a program for any number of rows. It contains convolutions or max "
            "pooling: their TensorFlow kernels fail on a replica without rows. Call it "
            f"on {count} rows or more, or use ks.OneDeviceStrategy."
        )
        check = tf.debugging.Assert(rows >= count, [message, rows])
        with tf.control_dependencies([check]):
            return tf.identity(rows)
