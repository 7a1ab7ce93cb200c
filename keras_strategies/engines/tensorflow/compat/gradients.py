"""Tapes, and gradients from the operations of a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import (
    gradients_util,
)

from keras_strategies.keras_compat.private_names import Private

_PYTHON = "tensorflow.python"

PRIVATE_NAMES = (
    Private(
        f"{_PYTHON}.framework.ops.EagerTensor",
        ("_id",),
        "The identity of a tensor on a tape, and in a trace.",
    ),
    Private(
        f"{_PYTHON}.framework.ops.Graph",
        ("_override_gradient_function",),
        "Gradient functions freed with their graph.",
    ),
    Private(
        f"{_PYTHON}.eager.record",
        (
            "could_possibly_record",
            "record_operation",
            "should_record_backprop",
            "stop_recording",
        ),
        "Gradients between the global batch and the replicas.",
    ),
    Private(
        f"{_PYTHON}.eager.backprop.GradientTape",
        ("_persistent",),
        "Whether a tape can compute gradients twice.",
    ),
    Private(
        f"{_PYTHON}.ops.gradients_util",
        ("_GradientsHelper",),
        "Gradients from the operations of a graph, without a tape.",
    ),
)


def record_operation(
    name: str,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    gradient: Callable[..., list[Any]],
) -> None:
    """Records outputs as those of an operation on the active tapes.

    Args:
        name: str, the operation's type.
        outputs: tensors.
        inputs: tensors or handles of variables.
        gradient: callable from the outputs' gradients to the list of the inputs'.
    """
    record.record_operation(name, outputs, inputs, gradient)


def without_recording() -> contextlib.AbstractContextManager[None]:
    """A context in which no tape records."""
    context: contextlib.AbstractContextManager[None] = record.stop_recording()
    return context


def is_any_tape_active() -> bool:
    return bool(record.could_possibly_record())


def is_recorded(tensors: Sequence[Any]) -> bool:
    """Whether a tape records what is computed from some of the tensors."""
    return bool(record.should_record_backprop(tensors))


def is_persistent(tape: tf.GradientTape) -> bool:
    """Whether a tape can compute gradients more than once."""
    return bool(tape._persistent)


def graph_gradients(
    targets: Sequence[Any], sources: Sequence[Any], given: Sequence[Any], graph: Any
) -> list[Any]:
    """Gradients from the operations of a graph, as `tf.gradients`.

    Args:
        targets: tensors of the graph, with their gradients in `given`.
        sources: tensors of the graph that gradients are returned of.
        given: tensors of the graph or of one inside of it.
        graph: the `tf.Graph`.
    """
    return list(
        gradients_util._GradientsHelper(targets, sources, given, src_graph=graph)
    )


def with_gradient(
    tensors: Sequence[Any], gradient: Callable[..., list[Any]]
) -> list[Any]:
    """The tensors, with a gradient function that is freed with their graph.

    Args:
        tensors: tensors of the current graph.
        gradient: callable from the results' gradients to the list of the tensors'.
    """

    def of_operation(operation: Any, *gradients: Any) -> list[Any]:
        return gradient(*gradients)

    graph = tf.compat.v1.get_default_graph()
    with graph._override_gradient_function({"IdentityN": of_operation}):
        outputs = tf.identity_n(tensors)
    record_gradient(outputs, tensors, gradient)
    return list(outputs)


def record_gradient(
    outputs: Sequence[Any], inputs: Sequence[Any], gradient: Callable[..., list[Any]]
) -> None:
    """Makes tapes compute gradients of some tensors from those of others.

    Args:
        outputs: tensors.
        inputs: the tensors that they are computed from.
        gradient: callable from the outputs' gradients to the list of the inputs'. They
            can be objects that convert to tensors, which arrive as they are unless
            several are added.
    """
    record.record_operation("CustomGradient", list(outputs), list(inputs), gradient)


def tape_id(tensor: Any) -> Any:
    """The number by which tapes know a tensor."""
    return tensor._id
