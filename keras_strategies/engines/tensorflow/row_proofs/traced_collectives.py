"""Collectives in a traced call: results that are equal on all replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
from keras_strategies.runtime.row_proofs.proof_replica import MarkedCollectives

# The operation that stands for a collective is one that no program runs.
COLLECTIVE = "collective"
GRADIENT = "gradient_of_collective"


class Passes(Protocol):
    """The traced call, which knows whether its backward pass is traced."""

    is_backward: bool


class TracedCollectives(MarkedCollectives):
    """Collectives of a call that is traced.

    Args:
        passes: the traced call.
        rows: int, the number of rows of the trace; None for any number.
        total: int, those of all replicas; other values in a program for any number.
        replicas: int, how many replicas there are.
    """

    def __init__(self, passes: Passes, rows: int | None, total: Any, replicas: int):
        super().__init__(self._marked, _with_gradient)
        self._passes = passes
        self._rows = rows
        self._total = total
        self._replicas = replicas

    def _marked(self, tensor: Any) -> Any:
        return self._collective(tensor, tensor.shape)

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int
    ) -> Sequence[Any]:
        return [self._collective(t, self._gathered(t.shape, axis)) for t in tensors]

    def _gathered(self, shape: Any, axis: int) -> Any:
        sizes = shape.as_list()
        if sizes[axis] is None:
            return shape
        if self._rows is not None and sizes[axis] % self._rows == 0:
            sizes[axis] = sizes[axis] // self._rows * self._total
        else:
            sizes[axis] *= self._replicas
        return tf.TensorShape(sizes)

    def _collective(self, tensor: Any, shape: Any) -> Any:
        # In the backward pass it adds gradients, which have weights there.
        name = GRADIENT if self._passes.is_backward else COLLECTIVE

        @custom_gradient
        def collective(tensor: Any) -> tuple[Any, Callable[[Any], Any]]:
            return _operation(name, tensor, shape), lambda gradient: _operation(
                GRADIENT, gradient, tensor.shape
            )

        return collective(tensor)


def _operation(name: str, tensor: Any, shape: Any) -> Any:
    (found,) = tf.raw_ops.PyFuncStateless(
        input=[tensor], token=name, Tout=[tensor.dtype]
    )
    found.set_shape(shape)
    return found


def _with_gradient(fn: Callable[..., Any], tensor: Any) -> Any:
    def decorated(tensor: Any) -> tuple[Any, Callable[..., Any]]:
        return fn(tensor)

    return custom_gradient(decorated)(tensor)


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
