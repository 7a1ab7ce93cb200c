"""Copies of the operations that one replica has added to a graph.

Replicas run the same Python code on slices of the same shape, so their operations
differ only in their inputs. Tracing a second replica would cost as much as the first;
importing a copy of the first replica's operations takes a fraction of that.

At a collective, the operations of the first replica so far are copied for all others,
and the collective combines the values of the copies like those of traced replicas.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from keras_strategies.engines.tensorflow.compat.gradients import without_recording
from keras_strategies.engines.tensorflow.replicas.lockstep_replicas import Combine
from keras_strategies.errors import ReplicaMismatchError
from keras_strategies.keras_compat.models.layers import (
    get_logits,
    set_logits,
    set_mask,
)
from keras_strategies.runtime.random_numbers.row_draws import OwnRows
from keras_strategies.runtime.state.replica_state import ReplicaResult, ReplicaState


class TracedOperations:
    """The operations added to the current graph during a trace, in segments."""

    def __init__(self) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        self._ranges: list[tuple[int, int]] = []
        self._start = self.graph.num_operations()

    def skip(self, start: int) -> None:
        """Leaves out the operations from number `start` to the last one."""
        self._ranges.append((self._start, start))
        self._start = self.graph.num_operations()

    def segment(self) -> list[Any]:
        """The operations since the trace or the last segment began."""
        self.skip(self.graph.num_operations())
        every = self.graph.get_operations()
        ranges, self._ranges = self._ranges, []
        # Placeholders are captures of the graph, which all copies share.
        return [
            operation
            for start, end in ranges
            for operation in every[start:end]
            if operation.type != "Placeholder"
        ]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the operations that are added in the context."""
        start = self.graph.num_operations()
        yield
        self.skip(start)


def _can_be_copied(operations: Sequence[Any]) -> bool:
    """Whether a copy computes the same as a new trace.

    It does not for stateful operations: random numbers with a seed in the operation,
    reads of variables that are not Keras's, Python functions.
    """
    kinds = {operation.type: operation for operation in operations}
    return not any(map(_cannot_be_copied, kinds.values()))


def _cannot_be_copied(operation: Any) -> bool:
    definition = operation.op_def
    # The gradient of a loop, branch or function adds outputs to its operation, which
    # copies made before the backward pass lack.
    has_functions = any("func" in attribute.type for attribute in definition.attr)
    return bool(definition.is_stateful or has_functions)


class GraphCopy:
    """A second replica's copies of the operations and tensors of a first replica.

    Args:
        device: str, the device of the first replica, as TensorFlow names it.
    """

    def __init__(self, device: str):
        self._device = _kind_and_index(device)
        # By the id of the tensor, which is referenced here so that the id stays unique.
        self._copies: dict[int, tuple[Any, Any]] = {}

    def set(self, tensor: Any, copy: Any) -> None:
        """Sets the copy of a tensor of the first replica."""
        self._copies[id(tensor)] = (tensor, copy)

    def of(self, value: Any) -> Any:
        """The copy of a tensor or of slices; the value itself if it has none."""
        if isinstance(value, tf.IndexedSlices):
            parts = (value.values, value.indices, value.dense_shape)
            return tf.IndexedSlices(*map(self.of, parts))
        return self._copies.get(id(value), (value, value))[1]

    def add(self, operations: Sequence[Any]) -> None:
        """Copies operations of the current graph, on the current device."""
        if not operations:
            return
        graph = tf.compat.v1.get_default_graph()
        names = {operation.name for operation in operations}
        captured = self._captured(graph)
        definition = graph_pb2.GraphDef()
        definition.versions.CopyFrom(graph.graph_def_versions)
        inputs: dict[str, Any] = {}
        for operation in operations:
            node = definition.node.add()
            node.CopyFrom(operation.node_def)
            node.attr.pop("_class", None)
            if node.device and _kind_and_index(node.device) == self._device:
                node.device = ""
            for tensor in operation.inputs:
                if tensor.op.name not in names:
                    inputs[tensor.name] = captured.get(id(tensor), self.of(tensor))
            for other in operation.control_inputs:
                if other.name not in names:
                    node.input.remove(f"^{other.name}")
        copied = tf.graph_util.import_graph_def(
            definition,
            inputs,
            [operation.name for operation in operations],
            name="copy",
        )
        for operation, copy in zip(operations, copied, strict=True):
            for before, after in zip(operation.outputs, copy.outputs, strict=True):
                after.set_shape(before.shape)
                self.set(before, after)

    def _captured(self, graph: Any) -> dict[int, Any]:
        """In a program of gradients, copies of what it captures of the forward one."""
        return {
            id(inner): graph.capture(self.of(outer))
            for outer, inner in list(getattr(graph, "captures", ()))
            if id(outer) in self._copies
        }


@functools.lru_cache(maxsize=64)
def _kind_and_index(device: str) -> tuple[Any, Any]:
    spec = tf.DeviceSpec.from_string(device)
    return spec.device_type, spec.device_index


@dataclass
class ForwardTrace:
    """One replica's call of the layer, in the graph."""

    replica_id: int
    operations: TracedOperations
    # Keras variable, TensorFlow variable and value of each read since the last segment.
    reads: list[tuple[Any, Any, Any]] = field(default_factory=list)
    # The operations after the last collective.
    rest: list[Any] = field(default_factory=list)
    result: Any = None
    can_be_copied: bool = False


class ReplicaTraces:
    """Traces of the replicas of one call, and copies of these traces.

    Args:
        devices: the replicas' devices, as TensorFlow names them.
        slices: for each replica, its slices of the call's inputs.
        read: reads a variable on a replica.
    """

    def __init__(
        self,
        devices: Sequence[str],
        slices: Sequence[Sequence[Any]],
        read: Callable[[int, Any, Any], Any],
    ):
        self._devices = devices
        self._slices = slices
        self._read = read
        #: By replica, its rows, for random numbers: tensors of the graph.
        self.rows: dict[int, OwnRows] = {}
        self._forward: dict[int, ForwardTrace] = {}
        # Replicas whose number or device was read, so that their traces are specific to
        # them and are not copied for others.
        self._reading_id: set[int] = set()
        self._backward: dict[int, tuple[TracedOperations, list[Any], list[Any]]] = {}
        self._copies: dict[int, tuple[int, GraphCopy]] = {}
        self._is_backward = False

    def note_read(self, replica_id: int, name: str) -> None:
        """Called when a property of a replica's context is read that others differ in.

        Args:
            replica_id: int, the number of the local replica.
            name: str, the property.
        """
        self._reading_id.add(replica_id)

    @contextlib.contextmanager
    def tracing(
        self, replica_id: int, was_used_by: Callable[[int], bool]
    ) -> Iterator[ForwardTrace]:
        """Entered in a graph around a replica's call; the caller sets its `result`.

        Args:
            replica_id: int, the number of the local replica.
            was_used_by: see `LockstepCollectives`.
        """
        trace = ForwardTrace(replica_id, TracedOperations())
        self._forward[replica_id] = trace
        self._copies.pop(replica_id, None)
        yield trace
        trace.rest = trace.operations.segment()
        trace.can_be_copied = (
            replica_id not in self._reading_id
            and not was_used_by(replica_id)
            and _can_be_copied(trace.rest)
            and all(_is_simple(leaf) for leaf in trace.result.leaves)
        )

    def read(self, replica_id: int, variable: Any, raw: Any) -> Any:
        """Reads a variable on a replica, in operations that are not copied."""
        trace = self._forward.get(replica_id)
        if trace is None:
            return self._read(replica_id, variable, raw)
        with trace.operations.paused():
            local = self._read(replica_id, variable, raw)
        trace.reads.append((variable, raw, local))
        return local

    def template(self, replica_id: int) -> ForwardTrace | None:
        """The trace of another replica that can be copied for this one, or None."""
        for trace in self._forward.values():
            if trace.can_be_copied and self._are_alike(trace.replica_id, replica_id):
                return trace
        return None

    def _are_alike(self, one: int, other: int) -> bool:
        kinds = [[_kind(part) for part in self._slices[i]] for i in (one, other)]
        return kinds[0] == kinds[1]

    def copied_forward(self, trace: ForwardTrace, replica_id: int) -> ReplicaResult:
        """Results and updates of a replica's call, copied from another replica's."""
        copy = self._add_forward(trace, trace.rest, replica_id)
        return _copied_result(trace.result, copy)

    def _add_forward(
        self, trace: ForwardTrace, operations: Sequence[Any], replica_id: int
    ) -> GraphCopy:
        """Copies the next operations of a replica's call for another replica."""
        template = trace.replica_id
        if replica_id not in self._copies:
            copy = GraphCopy(self._devices[template])
            self._copies[replica_id] = template, copy
            pairs = zip(self._slices[template], self._slices[replica_id], strict=True)
            for before, after in (*pairs, *self._row_counts(template, replica_id)):
                copy.set(before, after)
        _, copy = self._copies[replica_id]
        for variable, raw, local in trace.reads:
            copy.set(local, self._read(replica_id, variable, raw))
        copy.add(operations)
        return copy

    def _row_counts(self, one: int, other: int) -> list[tuple[Any, Any]]:
        """Pairs of tensors with the rows of two replicas."""
        if one not in self.rows:
            return []
        first, second = self.rows[one], self.rows[other]
        pairs = [
            (first.before, second.before),
            (first.own, second.own),
            (first.total, second.total),
        ]
        return [pair for pair in pairs if tf.is_tensor(pair[0])]

    # Collectives.

    def exchange(self, values: Sequence[Any], combine: Combine) -> list[Any] | None:
        """The results of a collective, with copies of replica 0 as the other replicas.

        Args:
            values: the values of replica 0.
            combine: computes the results of all replicas from the values of each.

        Returns:
            The result of each replica; None if another replica cannot be a copy.
        """
        if tf.executing_eagerly():
            return None
        forward = self._forward[0]
        operations = self._backward[0][0] if self._is_backward else forward.operations
        segment = operations.segment()
        if not self._can_follow(forward, segment):
            return None
        every: list[Any] = [values]
        with without_recording(), operations.paused():
            for i in range(1, len(self._slices)):
                with tf.device(self._devices[i]):
                    if self._is_backward:
                        _, copy = self._copies[i]
                        copy.add(segment)
                    else:
                        copy = self._add_forward(forward, segment, i)
                every.append([copy.of(value) for value in values])
            results = list(combine(every))
        forward.reads.clear()
        for i, (_, copy) in self._copies.items():
            parts = tf.nest.flatten(results[0]), tf.nest.flatten(results[i])
            for before, after in zip(*parts, strict=True):
                if isinstance(before, tf.Tensor):
                    copy.set(before, after)
        return results

    def _can_follow(self, forward: ForwardTrace, segment: Sequence[Any]) -> bool:
        """Whether all other replicas are copies of replica 0 up to here."""
        if self._is_backward:
            templates = [template for template, _ in self._copies.values()]
            return templates == [0] * (len(self._slices) - 1)
        return (
            0 not in self._reading_id
            and all(self._are_alike(0, i) for i in range(len(self._slices)))
            and _can_be_copied(segment)
        )

    # Gradients.

    def set_given(self, given: Sequence[Sequence[Any]]) -> None:
        """Sets the gradients of the outputs, for each output one for each replica."""
        self._is_backward = True
        self._backward.clear()
        for replica_id, (template, copy) in self._copies.items():
            for parts in given:
                copy.set(parts[template], parts[replica_id])

    def backward(self, replica_id: int, task: Callable[[], list[Any]]) -> list[Any]:
        """The gradients of a replica, traced or copied as its call was."""
        if tf.executing_eagerly():
            return task()
        if replica_id not in self._copies:
            operations = TracedOperations()
            gradients: list[Any] = []
            rest: list[Any] = []
            self._backward[replica_id] = operations, gradients, rest
            gradients += task()
            rest += operations.segment()
            return gradients
        template, copy = self._copies[replica_id]
        if template not in self._backward:
            raise ReplicaMismatchError(
                "A layer called a collective in its gradient, but none in its forward "
                "pass, which was therefore traced for one replica and copied for the "
                "others. Call a collective in the layer's `call` as well."
            )
        _, gradients, rest = self._backward[template]
        copy.add(rest)
        return [copy.of(gradient) for gradient in gradients]


def _kind(tensor: Any) -> tuple[Any, Any]:
    return tensor.dtype, tensor.shape.as_list()


def _is_simple(leaf: Any) -> bool:
    """Whether an output is a plain tensor, or no value of TensorFlow."""
    return isinstance(leaf, tf.Tensor) or not keras.ops.is_tensor(leaf)


def _copied_result(result: ReplicaResult, copy: GraphCopy) -> ReplicaResult:
    state = ReplicaState(lambda variable: None)
    state.reads = {
        key: (variable, copy.of(local))
        for key, (variable, local) in result.state.reads.items()
    }
    state.updates = {
        key: (variable, copy.of(value))
        for key, (variable, value) in result.state.updates.items()
    }
    leaves = [copy.of(leaf) for leaf in result.leaves]
    for leaf, mask in zip(leaves, result.masks, strict=True):
        if mask is not None:
            set_mask(leaf, copy.of(mask))
    for leaf, original in zip(leaves, result.leaves, strict=True):
        if (logits := get_logits(original)) is not None:
            set_logits(leaf, copy.of(logits))
    outputs = keras.tree.pack_sequence_as(result.outputs, leaves)
    return ReplicaResult(outputs, state, [copy.of(loss) for loss in result.losses])
