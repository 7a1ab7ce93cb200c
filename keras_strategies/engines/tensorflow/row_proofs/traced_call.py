"""The graph of a layer call and of its backward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.gradients import (
    drop_custom_gradients,
)
from keras_strategies.engines.tensorflow.compat.graphs import new_graph
from keras_strategies.engines.tensorflow.compat.operations import kernels_alone
from keras_strategies.engines.tensorflow.compat.programs import functions_copied
from keras_strategies.engines.tensorflow.intercepted_draws import (
    TracedDraws,
    recording,
)
from keras_strategies.engines.tensorflow.row_proofs.proof_operations import (
    run_in_own_graph,
    traced_known_call,
)
from keras_strategies.engines.tensorflow.row_proofs.traced_collectives import (
    traced_collectives,
)
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import (
    get_logits,
    get_mask,
    set_logits,
    set_mask,
)
from keras_strategies.keras_compat.variables.generator_seeds import seed_generators
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime import context
from keras_strategies.runtime.row_proofs.known_calls import (
    KnownCalls,
    KnownCallsOfTrace,
    known_arguments,
)
from keras_strategies.runtime.row_proofs.layer_calls import LayerCall, argument_leaves
from keras_strategies.runtime.state.replica_state import (
    AddedState,
    CallState,
    ReplicaState,
    has_rows,
)


@dataclass
class GradientSource:
    """A tensor that gradients are computed of.

    Args:
        name: str, for messages.
        tensor: the tensor of the graph.
        has_rows: bool, whether it has the rows of the call.
        gradient: its gradient; None if no result depends on it.
    """

    name: str
    tensor: Any
    has_rows: bool
    gradient: Any = None


@dataclass
class TracedResult:
    """An output or a loss, and its gradient, which is an input of the backward pass."""

    tensor: Any
    gradient: Any


@dataclass(frozen=True)
class InnerCall:
    """A traced call of a layer in the call.

    Args:
        call: the call.
        with_rows: for each leaf of its arguments, whether it has the rows.
        results: the tensors among its outputs, and the losses that it adds.
    """

    call: LayerCall
    with_rows: list[bool]
    results: list[Any]

    @property
    def arguments(self) -> list[tuple[Any, bool]]:
        """Tensors that it gets, and whether they have the rows."""
        found = []
        for leaf, is_rows in zip(self.call.leaves, self.with_rows, strict=True):
            if is_dense(leaf):
                given = (leaf, get_mask(leaf), get_logits(leaf))
                found += [(each, is_rows) for each in given if each is not None]
        return found


@dataclass
class TracedCall:
    """A layer call in a graph of its own.

    Args:
        graph: the graph.
        with_rows: placeholders of arguments, and of their masks, that have rows.
        the_same: placeholders of other arguments and of variables.
        sources: tensors that gradients are computed of.
        targets: float outputs and losses, in that order.
        outputs: the leaves of the outputs.
        masks: the mask of each output, or None.
        losses: the added losses.
        updates: pairs of a variable and its assigned value.
        inner: the calls of layers in it, without those that are one operation.
        is_backward: bool, whether the backward pass is traced.
        add_gradients: callable without arguments, which traces the backward pass.
        draws: the draws of random numbers; None before the call is traced.
    """

    graph: Any
    with_rows: list[Any] = field(default_factory=list)
    the_same: list[Any] = field(default_factory=list)
    sources: list[GradientSource] = field(default_factory=list)
    targets: list[TracedResult] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    updates: list[tuple[Any, Any]] = field(default_factory=list)
    inner: list[InnerCall] = field(default_factory=list)
    is_backward: bool = False
    add_gradients: Callable[[], None] = lambda: None
    draws: Any = None
    _calls: list[tuple[int, int, Any]] = field(default_factory=list)

    def close(self) -> None:
        """Lets go of the tape, which no search for garbage goes through.

        The gradients that functions in the graph define are registered for ever.
        """
        self.add_gradients = lambda: None
        drop_custom_gradients(self.graph)

    def place_of(self, operation: Any) -> str:
        """The innermost layer that made an operation, as the end of a sentence."""
        layer = self._layer_of(operation)
        if layer is None:
            return ""
        return f", in layer {layer.name!r} ({type(layer).__name__})"

    def _layer_of(self, operation: Any) -> Any:
        if operation.graph is self.graph and "gradient_tape" not in operation.name:
            position = self.graph.get_operations().index(operation)
            around = [call for call in self._calls if call[0] <= position < call[1]]
            if around:
                return min(around, key=lambda call: call[1] - call[0])[2]
        # Gradients and functions: the layers are name scopes.
        layers = {layer.name: layer for _, _, layer in self._calls}
        for scope in reversed(operation.name.split("/")[:-1]):
            if scope in layers:
                return layers[scope]
        return None

    def add_call(self, start: int, layer: Any) -> None:
        """Notes that a layer made the operations since the one of number `start`."""
        self._calls.append((start, self.graph.num_operations(), layer))


def traced(
    strategy: Any,
    call: LayerCall,
    with_rows: Sequence[bool],
    rows: int | None,
    known_calls: KnownCalls | None,
) -> TracedCall:
    """Traces a call. `add_gradients` of what is returned adds its backward pass.

    Args:
        strategy: the strategy.
        call: the call.
        with_rows: for each leaf, whether it has the rows.
        rows: int, the number of rows; None for any number.
        known_calls: the calls of layers that are known by type; None to trace their
            operations.
    """
    in_order = None if known_calls is None else known_calls.in_order()
    found = TracedCall(new_graph("row_proof"))
    found.draws = TracedDraws(found.graph, tf.executing_eagerly())
    with (
        recording(found.draws),
        found.graph.as_default(),
        tf.GradientTape() as tape,
    ):
        leaves = [
            _argument(found, tape, call, i, leaf, has_rows, rows)
            for i, (leaf, has_rows) in enumerate(
                zip(call.leaves, with_rows, strict=True)
            )
        ]
        args, kwargs = call.arguments(leaves)
        state = _state(found, tape, call)
        replicas = strategy.num_replicas_in_sync
        collectives = traced_collectives(found, rows, call.rows, replicas)
        replica = context.ReplicaContext(strategy, 0, collectives, 2, is_proof=True)
        scope = state.scope()
        route = _recorded(found, tape, strategy, state, scope, call, rows, in_order)
        with (
            scope,
            context.on_replica(replica),
            layer_calls_through(route),
            functions_copied(),
        ):
            outputs = call.call(*args, **kwargs)
        found.outputs = keras.tree.flatten(outputs)
        found.masks = [get_mask(leaf) for leaf in found.outputs]
        found.losses = [tf.convert_to_tensor(loss) for loss in scope.losses]
        found.updates = [
            (variable, tf.convert_to_tensor(value, raw_dtype(variable)))
            for variable, value in state.updates.values()
        ]

    def add_gradients() -> None:
        found.is_backward = found.draws.is_backward = True
        with (
            recording(found.draws),
            found.graph.as_default(),
            context.on_replica(replica),
        ):
            _add_gradients(found, tape)

    found.add_gradients = add_gradients
    return found


def raw_dtype(variable: Any) -> Any:
    return tf.as_dtype(raw_value(variable).dtype)


def is_dense(leaf: Any) -> bool:
    """Whether an output is a plain tensor."""
    return isinstance(leaf, tf.Tensor)


def _argument(
    found: TracedCall,
    tape: Any,
    call: LayerCall,
    i: int,
    leaf: Any,
    has_rows: bool,
    rows: int | None,
) -> Any:
    if not keras.ops.is_tensor(leaf):
        return leaf
    tensor = _placeholder(found, leaf, has_rows, rows)
    mask = get_mask(leaf)
    if mask is not None:
        set_mask(tensor, _placeholder(found, mask, has_rows, rows))
    logits = get_logits(leaf)
    if logits is not None:
        set_logits(tensor, _argument(found, tape, call, i, logits, has_rows, rows))
    if tensor.dtype.is_floating and i not in call.constants:
        tape.watch(tensor)
        found.sources.append(GradientSource(f"argument {i}", tensor, has_rows))
    return tensor


def _placeholder(
    found: TracedCall, given: Any, has_rows: bool, rows: int | None
) -> Any:
    shape = given.shape
    if has_rows:
        shape = [rows, *shape[1:]]
    tensor = tf.raw_ops.Placeholder(dtype=given.dtype, shape=shape)
    (found.with_rows if has_rows else found.the_same).append(tensor)
    return tensor


def _state(found: TracedCall, tape: Any, call: LayerCall) -> CallState:
    """Variables are inputs of the graph; what is assigned is stored."""
    if call.only_adds:
        return AddedState()

    def copy(variable: Any) -> Any:
        raw = raw_value(variable)
        if raw is None:
            return None
        if call.adds:
            with found.graph.as_default():
                return tf.zeros(raw.shape, raw_dtype(variable))
        # A variable that is first read in a loop is an input of the call's graph too.
        with found.graph.as_default():
            tensor = tf.raw_ops.Placeholder(dtype=raw_dtype(variable), shape=raw.shape)
            found.the_same.append(tensor)
            if variable.trainable and tensor.dtype.is_floating:
                tape.watch(tensor)
                found.sources.append(GradientSource(variable.path, tensor, False))
        return tensor

    return ReplicaState(copy)


def _recorded(
    found: TracedCall,
    tape: Any,
    strategy: Any,
    state: CallState,
    scope: Any,
    call: LayerCall,
    rows: int | None,
    known_calls: KnownCallsOfTrace | None,
) -> Callable[..., Any]:
    """A route of layer calls that notes which layer makes which operations.

    The call of a known layer is one operation.
    """

    def route(layer: Any, original: Any, args: Any, kwargs: Any) -> Any:
        start = found.graph.num_operations()
        try:
            known = arguments = None
            # Not in the body of a loop or a function.
            is_in_graph = tf.compat.v1.get_default_graph() is found.graph
            if known_calls is not None:
                # Draws are recorded singly.
                if is_in_graph and not seed_generators(layer):
                    arguments = known_arguments(layer, args, kwargs, rows)
                known = known_calls.results(
                    layer,
                    arguments,
                    lambda: run_in_own_graph(strategy, original, args, kwargs, rows),
                )
            if known is None or arguments is None:
                added = len(scope.losses)
                outputs = original(*args, **kwargs)
                if is_in_graph:
                    results = [*keras.tree.flatten(outputs), *scope.losses[added:]]
                    found.inner.append(
                        _inner_call(call, layer, original, args, kwargs, results, rows)
                    )
                return outputs
            weights = tf.raw_ops.Placeholder(dtype=tf.float32, shape=())
            found.the_same.append(weights)
            if known.is_trained:
                tape.watch(weights)
                source = GradientSource(f"layer {layer.name!r}", weights, False)
                found.sources.append(source)
            return traced_known_call(state, arguments, known, weights, rows)
        finally:
            found.add_call(start, layer)

    return route


def _inner_call(
    around: LayerCall,
    layer: Any,
    original: Callable[..., Any],
    args: Any,
    kwargs: Any,
    results: Sequence[Any],
    rows: int | None,
) -> InnerCall:
    leaves = argument_leaves(args, kwargs)
    return InnerCall(
        LayerCall(layer, original, (args, kwargs), leaves, around.rows),
        [
            is_dense(leaf) and bool(leaf.shape.rank) and has_rows(leaf, rows)
            for leaf in leaves
        ],
        [each for each in results if is_dense(each)],
    )


def _add_gradients(found: TracedCall, tape: Any) -> None:
    """Adds the backward pass, of all outputs and losses at once."""
    results = [
        tensor
        for tensor in (*found.outputs, *found.losses)
        if is_dense(tensor) and tensor.dtype.is_floating and tensor.graph is found.graph
    ]
    found.targets = [
        TracedResult(each, tf.raw_ops.Placeholder(dtype=each.dtype, shape=each.shape))
        for each in results
    ]
    if not found.sources or not found.targets:
        return
    gradients = tape.gradient(
        [target.tensor for target in found.targets],
        [source.tensor for source in found.sources],
        output_gradients=[target.gradient for target in found.targets],
    )
    for source, gradient in zip(found.sources, gradients, strict=True):
        source.gradient = gradient


@contextlib.contextmanager
def eager_arithmetic() -> Iterator[None]:
    """Small eager operations on the CPU, outside of a program that is being traced."""
    with tf.init_scope(), tf.device("CPU:0"), kernels_alone():
        yield
