"""Operations of proofs alone: layers that are known by type, and collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.graphs import new_graph
from keras_strategies.engines.tensorflow.data_parallel.custom_gradient import (
    custom_gradient,
)
from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    PART,
    ROWS,
    SAME,
    NoRuleError,
)
from keras_strategies.engines.tensorflow.row_proofs.node import (
    Node,
    Result,
    Rule,
)
from keras_strategies.engines.tensorflow.row_proofs.traced_collectives import (
    COLLECTIVE,
    GRADIENT,
    collective,
    gradient_of_collective,
)
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import get_mask, set_mask
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime import context
from keras_strategies.runtime.replicas.collectives import SingleReplica
from keras_strategies.runtime.row_proofs.known_calls import (
    KnownArguments,
    KnownResults,
    UnknownUse,
)
from keras_strategies.runtime.state.replica_state import CallState, ReplicaState

# The type of operation that stands for calls. No program runs it: the graph is only
# walked. Its token has the name, how many inputs have rows, and how many outputs are
# updates; words are separated by a space.
_TYPE = "PyFuncStateless"
_CALL = "known_layer"
_GRADIENT = "gradient_of_known_layer"


def is_of_proof(definition: Any) -> bool:
    """Whether the definition of an operation is that of such a call or collective."""
    name = definition.attr["token"].s.decode().partition(" ")[0]
    return definition.op == _TYPE and name in _APPLIED


def traced_known_call(
    state: CallState,
    arguments: KnownArguments,
    known: KnownResults,
    weights: Any,
    rows: int | None,
) -> Any:
    """Adds a call to the graph, as one operation.

    Args:
        state: the variables of the traced call.
        arguments: the arguments of the layer.
        known: what its call gives.
        weights: a scalar that stands for the layer's weights, which is watched.
        rows: int, the number of rows; None for any number.

    Returns:
        The outputs.
    """
    given = [*arguments.tensors, *arguments.masks]
    assigned = [
        tf.convert_to_tensor(state.updates[id(variable)][1])
        for variable in known.reads
        if id(variable) in state.updates
    ]
    masks = [mask for mask in known.masks if mask is not None]
    traits = [*known.outputs, *masks]
    shapes = [([rows, *each.shape], each.dtype) for each in traits]
    shapes += [(raw.shape, raw.dtype) for raw in map(raw_value, known.updates)]
    floats = [tensor for tensor in given if tensor.dtype.is_floating]

    def call(weights: Any, *watched: Any) -> Any:
        values = iter(watched)
        every = [next(values) if t.dtype.is_floating else t for t in given]
        token = f"{_CALL} {len(every)} {len(known.updates)}"
        results = _operation(token, [*every, *assigned], shapes)

        def gradient(*gradients: Any) -> list[Any]:
            of_results = [
                each
                for each, (_, dtype) in zip(gradients, shapes, strict=True)
                if each is not None and dtype.is_floating
            ]
            of = [([], tf.float32), *((each.shape, each.dtype) for each in watched)]
            return _operation(f"{_GRADIENT} 0 0", of_results, of)

        return results, gradient

    found = iter(custom_gradient(call)(weights, *floats))
    outputs = [next(found) for _ in known.outputs]
    for output, mask in zip(outputs, known.masks, strict=True):
        if mask is not None:
            set_mask(output, next(found))
    for variable, value in zip(known.updates, found, strict=True):
        state.assign(variable, value)
    return known.packed(outputs)


def _operation(token: str, inputs: list[Any], results: list[Any]) -> list[Any]:
    found = tf.raw_ops.PyFuncStateless(
        input=inputs, token=token, Tout=[dtype for _, dtype in results]
    )
    for tensor, (shape, _) in zip(found, results, strict=True):
        tensor.set_shape(shape)
    return list(found)


def run_in_own_graph(
    strategy: Any,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rows: int | None,
) -> KnownResults | None:
    """Traces a layer's code in a graph of its own.

    Args:
        strategy: the strategy.
        call: the layer's `__call__`.
        args: its arguments.
        kwargs: its keyword arguments.
        rows: int, the number of rows; None for any number.

    Returns:
        What the call gives; None if it adds losses, assigns trained variables, or
        returns what is no tensor with the rows.
    """
    graph = new_graph("known_layer")

    def copy(variable: Any) -> Any:
        raw = raw_value(variable)
        if raw is None:
            return None
        with graph.as_default():
            return tf.raw_ops.Placeholder(dtype=raw.dtype, shape=raw.shape)

    state = ReplicaState(copy)
    # Batch normalization has no collectives on one of one.
    replica = context.ReplicaContext(strategy, 0, SingleReplica(), num_replicas=1)
    with (
        graph.as_default(),
        state.scope() as scope,
        context.on_replica(replica),
        layer_calls_through(None),
    ):
        args, kwargs = keras.tree.map_structure(_argument, (args, kwargs))
        outputs = call(*args, **kwargs)
    return KnownResults.of(
        outputs,
        scope,
        state,
        lambda leaf: _has_rows(leaf, graph, rows),
        lambda variable: bool(variable.trainable),
    )


def _argument(leaf: Any) -> Any:
    if not tf.is_tensor(leaf):
        return leaf
    found = tf.raw_ops.Placeholder(dtype=leaf.dtype, shape=leaf.shape)
    mask = get_mask(leaf)
    if mask is not None:
        set_mask(found, tf.raw_ops.Placeholder(dtype=mask.dtype, shape=mask.shape))
    return found


def _has_rows(leaf: Any, graph: Any, rows: int | None) -> bool:
    return (
        isinstance(leaf, tf.Tensor)
        and getattr(leaf, "graph", None) is graph
        and leaf.shape.rank not in (None, 0)
        and leaf.shape[0] == rows
    )


# The rule.


def _of_proof(node: Node) -> Result:
    name = node.attribute("token").decode().partition(" ")[0]
    if name not in _APPLIED:
        raise NoRuleError("itself")
    return _APPLIED[name](node)


def _known_layer(node: Node) -> Result:
    count = len(node.operation.outputs)
    for given in node.inputs:
        if given.is_lost:
            return [given.but(least=None)] * count
    _, with_rows, updates = node.attribute("token").decode().split()
    rows, assigned = node.inputs[: int(with_rows)], node.inputs[int(with_rows) :]
    is_known = all(given.but(is_zero=False, least=None) == ROWS for given in rows)
    if not is_known or not all(given.is_plain for given in assigned):
        raise UnknownUse
    return [ROWS] * (count - int(updates)) + [SAME] * int(updates)


def _gradient(node: Node) -> Result:
    """That of the weights is a sum over rows, those of arguments are by rows."""
    for each in node.inputs:
        if each.is_lost:
            return [each.but(least=None)] * len(node.operation.outputs)
    given = [each for each in node.inputs if not each.is_zero]
    powers = {each.power for each in given}
    is_by_rows = all(each.but(power=0, least=None) == ROWS for each in given)
    if len(powers) > 1 or not is_by_rows:
        raise UnknownUse
    power, is_zero = (powers.pop(), False) if powers else (0, True)
    weights = PART.but(power=power, is_zero=is_zero)
    rows = ROWS.but(power=power, is_zero=is_zero)
    return [weights] + [rows] * (len(node.operation.outputs) - 1)


_APPLIED: dict[str, Callable[[Node], Result]] = {
    _CALL: _known_layer,
    _GRADIENT: _gradient,
    COLLECTIVE: collective,
    GRADIENT: gradient_of_collective,
}
RULES: dict[str, Rule] = {_TYPE: Rule(_of_proof, takes_all=True)}
