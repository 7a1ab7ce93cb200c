"""Layer calls with operations that fail on zero rows (`FAILING_KERNELS`).

Operations count, not layers: a layer or a functional model may call `keras.ops.conv`
itself.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.graphs import new_graph
from keras_strategies.engines.tensorflow.compat.operations import FAILING_KERNELS
from keras_strategies.engines.tensorflow.random_numbers.global_random import (
    operation_seeds_restored,
)
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import get_mask, set_mask
from keras_strategies.keras_compat.variables.generator_seeds import (
    substitute_global_generator,
)
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.rows.layer_calls import LayerCall
from keras_strategies.rows.python_state import PythonState
from keras_strategies.runtime.random_numbers.process_numbers import NumbersOfProcess
from keras_strategies.runtime.state.replica_state import ReplicaState


def fails_on_zero_rows(layer_call: LayerCall) -> bool:
    """Whether a layer call has operations that fail on zero rows."""
    state, numbers = (
        PythonState(layer_call.layer, layer_call.leaves),
        NumbersOfProcess(),
    )
    operations = _operations(layer_call)
    state.change()  # Restores what the trace has changed.
    numbers.restore()
    # Without known operations, every replica must have a row.
    return operations is None or not operations.isdisjoint(FAILING_KERNELS.values())


def _operations(layer_call: LayerCall) -> set[str] | None:
    """The types of the operations of a call, also in its loops and functions.

    None if it cannot be traced: a layer may raise any error in another graph.
    """
    try:
        return _traced_operations(layer_call)
    except Exception:
        return None


def _traced_operations(layer_call: LayerCall) -> set[str]:
    graph = new_graph("operations")
    with (
        layer_calls_through(None),
        operation_seeds_restored(),
        substitute_global_generator(),
        ReplicaState(raw_value).scope(),
        graph.as_default(),
    ):
        args, kwargs = layer_call.arguments(
            [_placeholder(leaf) for leaf in layer_call.leaves]
        )
        layer_call.call(*args, **kwargs)
    definition = graph.as_graph_def()
    found = {node.op for node in definition.node}
    for function in definition.library.function:
        found |= {node.op for node in function.node_def}
    return found


def _placeholder(leaf: Any) -> Any:
    if not keras.ops.is_tensor(leaf):
        return leaf
    placeholder = tf.compat.v1.placeholder(leaf.dtype, leaf.shape)
    mask = get_mask(leaf)
    if mask is not None:
        set_mask(placeholder, tf.compat.v1.placeholder(mask.dtype, mask.shape))
    return placeholder
