"""Collectives in a traced call: results that are equal on all replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import keras
import tensorflow as tf

from keras_strategies.engines.tensorflow.data_parallel.custom_gradient import (
    custom_gradient,
)
from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    ROWS,
    SAME,
    GraphPlacement,
    Kind,
    MixesRowsError,
)
from keras_strategies.engines.tensorflow.row_proofs.node import Node, Result
from keras_strategies.runtime.row_proofs.proof_replica import (
    MarkedCollectives,
    gathered_size,
)

# The operation that stands for a collective is one that no program runs.
COLLECTIVE = "collective"
GRADIENT = "gradient_of_collective"


class Passes(Protocol):
    """The traced call, which knows whether its backward pass is traced."""

    is_backward: bool


def traced_collectives(
    passes: Passes, rows: int | None, total: Any, replicas: int
) -> MarkedCollectives:
    """Collectives of a call that is traced.

    Args:
        passes: the traced call.
        rows: int, the number of rows of the trace; None for any number.
        total: int, those of all replicas; other values in a program for any number.
        replicas: int, how many replicas there are.
    """

    def collective(tensor: Any, shape: Any) -> Any:
        # In the backward pass it adds gradients, which have weights there.
        name = GRADIENT if passes.is_backward else COLLECTIVE

        @custom_gradient
        def marked(tensor: Any) -> tuple[Any, Callable[[Any], Any]]:
            return _operation(name, tensor, shape), lambda gradient: _operation(
                GRADIENT, gradient, tensor.shape
            )

        return marked(tensor)

    def reduced(tensor: Any) -> Any:
        return collective(tensor, tensor.shape)

    def gathered(tensor: Any, axis: int, are_equal: bool) -> Any:
        sizes = tensor.shape.as_list()
        if sizes[axis] is not None:
            own = None if are_equal else rows
            sizes[axis] = gathered_size(sizes[axis], own, total, replicas)
        return collective(tensor, tf.TensorShape(sizes))

    def merged(result: Any) -> Any:
        return keras.tree.map_structure(
            lambda leaf: reduced(leaf) if keras.ops.is_tensor(leaf) else leaf, result
        )

    return MarkedCollectives(reduced, gathered, merged, custom_gradient)


def _operation(name: str, tensor: Any, shape: Any) -> Any:
    (found,) = tf.raw_ops.PyFuncStateless(
        input=[tensor], token=name, Tout=[tensor.dtype]
    )
    found.set_shape(shape)
    return found


def collective(node: Node) -> Result:
    """Equal on all replicas, also if the argument is lost."""
    return SAME


def gradient_of_collective(node: Node) -> Result:
    """The gradients of all replicas, added: their own rows of it, or all of it."""
    (given,) = node.inputs
    if given.is_lost:
        return given
    if given.is_zero:
        return _axis(node).but(is_zero=True)
    if given.kind is Kind.PART:
        return _axis(node).but(power=given.power)
    if given.kind is Kind.SAME:
        return _axis(node).but(power=given.power - 1)
    raise MixesRowsError("gradients of rows that are added over replicas")


def _axis(node: Node) -> GraphPlacement:
    """Rows along the axis that has them, of a result with rows."""
    shapes = [operation.outputs[0].shape for operation in node.operations]
    if len(shapes) == 1:
        sizes = shapes[0].as_list()
        return ROWS.but(axis=sizes.index(None)) if None in sizes else SAME
    return node.row_axis([shape.as_list() for shape in shapes]) or SAME
