"""The prover of TensorFlow: rules for the operations of the traced call."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    HANDLE,
    ROWS,
    SAME,
    GraphPlacement,
    Kind,
)
from keras_strategies.engines.tensorflow.row_proofs.lockstep import GraphsDifferError
from keras_strategies.engines.tensorflow.row_proofs.node import Facts
from keras_strategies.engines.tensorflow.row_proofs.proof_operations import is_of_proof
from keras_strategies.engines.tensorflow.row_proofs.traced_call import (
    InnerCall,
    TracedCall,
    eager_arithmetic,
    is_dense,
    traced,
)
from keras_strategies.engines.tensorflow.row_proofs.walk import GraphWalk, SharedWork
from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.keras_compat.variables.generator_seeds import (
    substitute_global_generator,
)
from keras_strategies.runtime.row_proofs.known_calls import (
    KnownCalls,
    UnknownUse,
)
from keras_strategies.runtime.row_proofs.layer_calls import LayerCall, UnsplitCall
from keras_strategies.runtime.row_proofs.row_placements import (
    RowKind,
    RowPlacement,
    RowProof,
)
from keras_strategies.runtime.row_proofs.row_prover import (
    RowProver,
    is_plain_output,
    problem_of_output,
)

#: Numbers of rows at which sizes are compared in a program for any number of rows.
SAMPLED_COUNTS = (7, 2, 3, 97, 503)
#: A number of rows that sizes are recognized by: a prime. Layers of Keras draw tensors
#: with the rows along axis 0, or with one entry. Products with other sizes are int32.
_RECOGNIZED = 2003
#: Operations with effects outside of the graph, or on variables that replicas lack.
_EFFECTS = {
    "PyFunc": "calls a Python function",
    "PyFuncStateless": "calls a Python function",
    "EagerPyFunc": "calls a Python function",
    "AssignVariableOp": "assigns a `tf.Variable` that is no weight",
    "AssignAddVariableOp": "assigns a `tf.Variable` that is no weight",
    "AssignSubVariableOp": "assigns a `tf.Variable` that is no weight",
    "ResourceScatterUpdate": "assigns a `tf.Variable` that is no weight",
    "ResourceScatterAdd": "assigns a `tf.Variable` that is no weight",
}


class NotProvedError(Exception):
    """A call that cannot be split by rows, as far as its operations show."""


class _TraceError(Exception):
    """The call cannot be traced, or not with the same operations for other rows."""


class TensorFlowRowProver(RowProver):
    """Traces a call at each number of rows that replicas have, and walks its graph."""

    def prove(
        self, call: LayerCall, with_rows: Sequence[bool], sizes: Sequence[int]
    ) -> RowProof:
        known_calls = KnownCalls()
        self._made.objects = []
        try:
            return self._proof(call, with_rows, sizes, known_calls)
        except (UnknownUse, _TraceError) as error:
            if isinstance(error, _TraceError) and not known_calls.is_used:
                return RowProof(problem=str(error))
        try:
            return self._proof(call, with_rows, sizes, None)
        except _TraceError as error:
            return RowProof(problem=str(error))

    def _proof(
        self,
        call: LayerCall,
        with_rows: Sequence[bool],
        sizes: Sequence[int],
        known_calls: KnownCalls | None,
    ) -> RowProof:
        counts = _counts(sizes)
        traces: list[TracedCall] = []
        try:
            traced_with = counts if sizes else (None,)
            traces = self._traces(call, with_rows, traced_with, known_calls)
            forward = _Proof(traces, counts, bool(sizes), call.adds)
            try:
                forward.results()
            except NotProvedError as error:
                inner = forward.unsplit_inner_calls()
                return RowProof(problem=str(error), inner=inner)
            self._trace_gradients(traces, traced_with)
            # Gradients of loops change the operations of the loops.
            return _Proof(traces, counts, bool(sizes), call.adds).with_gradients()
        except GraphsDifferError as error:
            text = "its operations depend on the number of rows"
            raise _TraceError(text) from error
        except NotProvedError as error:
            return RowProof(problem=str(error))
        finally:
            self._made.objects += [weakref.ref(trace.graph) for trace in traces]
            _close(traces)

    def draws(
        self, call: LayerCall, with_rows: Sequence[bool], sizes: Sequence[int]
    ) -> RowProof:
        try:
            traced_with = (_RECOGNIZED,)
            (trace,) = self._traces(call, with_rows, traced_with, None)
            _close([trace])
            multiples = _multiples(trace.draws.results)
        except (NotProvedError, _TraceError) as error:
            return RowProof(problem=str(error))
        if multiples is None:
            # Shapes that only the operations show.
            found = self.prove(call, with_rows, sizes)
            return RowProof(problem=found.problem, draws=found.draws)
        return RowProof(draws=multiples)

    def _traces(
        self,
        call: LayerCall,
        with_rows: Sequence[bool],
        counts: Sequence[int | None],
        known_calls: KnownCalls | None,
    ) -> list[TracedCall]:
        """The traces of a call at each number of rows, without its backward pass.

        Raises:
            NotProvedError: if it draws numbers out of order.
            _TraceError: if it cannot be traced.
        """
        traces = list[TracedCall]()
        try:
            with substitute_global_generator() as substitute:
                self._add_traces(traces, call, with_rows, counts, known_calls)
            _check_draws(traces)
        except BaseException:
            _close(traces)
            raise
        if substitute is not None and substitute.was_used:
            _close(traces)
            return self._traces(call, with_rows, counts, known_calls)
        return traces

    def _add_traces(
        self,
        traces: list[TracedCall],
        call: LayerCall,
        with_rows: Sequence[bool],
        counts: Sequence[int | None],
        known_calls: KnownCalls | None,
    ) -> None:
        try:
            for count in counts:
                traces.append(
                    traced(self.strategy, call, with_rows, count, known_calls)
                )
        except (MemoryError, tf.errors.ResourceExhaustedError):
            raise  # Not a property of the layer, which may be split next time.
        except Exception as error:
            # Of the user's code: the unsplit call that follows raises it again, or
            # TensorFlow can run the code in eager mode only.
            raise _TraceError(_failure(error, counts, len(traces))) from error

    def _trace_gradients(
        self, traces: Sequence[TracedCall], counts: Sequence[int | None]
    ) -> None:
        """Adds the backward pass to the traces of a call.

        Raises:
            NotProvedError: if it draws numbers.
            _TraceError: if it cannot be traced.
        """
        with substitute_global_generator():
            for i, trace in enumerate(traces):
                try:
                    trace.add_gradients()
                except Exception as error:
                    raise _TraceError(_failure(error, counts, i)) from error
        _check_draws(traces)

    def has_hooks(self, layer: Any) -> str:
        return ""

    def surroundings(self) -> Any:
        return tf.executing_eagerly()


def _counts(sizes: Sequence[int]) -> tuple[int, ...]:
    """The numbers of rows of the call and of its replicas, each once."""
    if not sizes:
        return SAMPLED_COUNTS
    total = sum(sizes)
    counts = tuple(dict.fromkeys((total, *(size for size in sizes if size))))
    # With all rows on one replica, sizes are compared with those of another batch.
    return counts if len(counts) > 1 else (total, 2 * total)


def _multiples(results: Sequence[Any]) -> list[int] | None:
    """Entries of axis 0 for each row, of what layers of Keras draw.

    Args:
        results: the draws of a call with `_RECOGNIZED` rows.

    Returns:
        list of int; None if shapes do not tell.
    """
    found = []
    for tensor in results:
        if not tensor.shape.is_fully_defined():
            return None
        with_rows = [not size % _RECOGNIZED for size in tensor.shape.as_list()]
        if any(with_rows[1:]):
            return None
        has_rows = bool(with_rows) and with_rows[0]
        found.append(tensor.shape[0] // _RECOGNIZED if has_rows else 0)
    return found


def _failure(error: Exception, counts: Sequence[int | None], position: int) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else ''}"
    if position:
        return f"its call fails with {counts[position]} rows ({text})"
    return f"its call cannot be traced ({text})"


def _close(traces: Sequence[TracedCall]) -> None:
    for trace in traces:
        trace.close()


def _check_draws(traces: Sequence[TracedCall]) -> None:
    for trace in traces:
        if trace.draws.problem:
            raise NotProvedError(trace.draws.problem)


class _Proof:
    """The walk over the graphs of one call.

    Args:
        traces: the call at each number of rows, or for any.
        counts: numbers of rows.
        are_real: bool, whether the call runs with these only.
        adds: bool, whether the call adds to its variables, see `LayerCall`.
    """

    def __init__(
        self,
        traces: Sequence[TracedCall],
        counts: tuple[int, ...],
        are_real: bool,
        adds: bool,
    ):
        self._adds = adds
        self._traces = traces
        self._call = traces[0]
        columns = self._columns(lambda trace: trace.draws.results)
        self._count = len(columns)
        draws = [
            {tensor.op: i for i, tensor in enumerate(trace.draws.results)}
            for trace in traces
        ]
        self._facts = Facts(counts, are_real, draws)
        _check_effects(self._call)
        work = SharedWork(self._facts, self._call.place_of)
        self._walk = GraphWalk([trace.graph for trace in traces], work)
        self._place_inputs(self._walk)

    def results(self) -> RowProof:
        """The proof of what the call gives, without its backward pass."""
        with eager_arithmetic():
            outputs = list(self._outputs())
            losses = [
                self._joined(f"loss {i} that it adds", tensors)
                for i, tensors in enumerate(self._columns(lambda trace: trace.losses))
            ]
            return RowProof(outputs, losses, dict(self._updates()))

    def with_gradients(self) -> RowProof:
        """The proof with the backward pass, which the traces contain."""
        results = self.results()
        with eager_arithmetic():
            self._check_gradients([*results.outputs, *results.losses])
        # What no result depends on is drawn as it is.
        draws = [self._facts.multiples.get(i, 0) for i in range(self._count)]
        return replace(results, draws=draws)

    def unsplit_inner_calls(self) -> list[UnsplitCall]:
        """The calls of layers with layers in them whose results mix rows.

        Their operations are traced, so they need no traces of their own.
        """
        with eager_arithmetic():
            return list(self._unsplit_inner_calls())

    def _unsplit_inner_calls(self) -> Iterator[UnsplitCall]:
        every = (trace.inner for trace in self._traces)
        for calls in zip(*every, strict=False):
            first = calls[0]
            layer, with_rows = first.call.layer, first.with_rows
            if len(sublayers(layer)) > 1 and all(
                each.call.layer is layer and each.with_rows == with_rows
                for each in calls
            ):
                problem = self._problem_of(calls)
                if problem:
                    yield UnsplitCall(first.call, with_rows, problem)

    def _problem_of(self, calls: Sequence[InnerCall]) -> str:
        """Why results of a call mix rows; empty if they do not, or cannot be said to.

        Its arguments have all rows or none, as where the call around it is unsplit.
        """
        walk = self._walk.apart()
        self._place_inputs(walk)
        try:
            for pairs in zip(*(call.arguments for call in calls), strict=False):
                tensors = [tensor for tensor, _ in pairs]
                if self._are_own(tensors):
                    walk.place(tensors, ROWS if pairs[0][1] else SAME)
            for i, results in enumerate(
                zip(*(call.results for call in calls), strict=False)
            ):
                if self._are_own(results):
                    placement = walk.placements([results])[0]
                    if _row_placement(placement) is None:
                        return _reason(f"result {i}", placement)
        except GraphsDifferError:
            return ""
        return ""

    def _place_inputs(self, walk: GraphWalk) -> None:
        for tensors in self._columns(lambda trace: trace.with_rows):
            walk.place(tensors, ROWS)
        for tensors in self._columns(lambda trace: trace.the_same):
            walk.place(tensors, SAME)
        self._place_captured(walk)

    def _columns(
        self, part: Callable[[TracedCall], Sequence[Any]]
    ) -> list[tuple[Any, ...]]:
        """For each entry of a part of the call, that of all traces."""
        every = [part(trace) for trace in self._traces]
        if len({len(each) for each in every}) > 1:
            raise GraphsDifferError
        return list(zip(*every, strict=True))

    def _place_captured(self, walk: GraphWalk) -> None:
        """Tensors from closures and attributes."""
        for pairs in self._columns(lambda trace: trace.graph.captures):
            outer = [each for each, _ in pairs]
            inner = [each for _, each in pairs]
            walk.place(inner, self._captured(outer, outer[0]))

    def _captured(self, tensors: Sequence[Any], first: Any) -> GraphPlacement:
        if first.dtype in (tf.resource, tf.variant):
            return HANDLE
        if not all(hasattr(tensor, "numpy") for tensor in tensors):
            # Also one that the call keeps in an attribute, read with other rows.
            cause = "a tensor of the step that is no argument"
            return GraphPlacement(Kind.UNKNOWN, cause=cause)
        if all(tensor is first for tensor in tensors[1:]):
            return SAME
        # Made in the call, outside of its graph.
        cause = "a constant that depends on the number of rows"
        arrays = [tensor.numpy() for tensor in tensors]
        is_equal = all(np.array_equal(arrays[0], array) for array in arrays[1:])
        return SAME if is_equal else GraphPlacement(Kind.MIXED, cause=cause)

    # Results.

    def _outputs(self) -> Iterator[RowPlacement | None]:
        masks = self._columns(lambda trace: trace.masks)
        for i, leaves in enumerate(self._columns(lambda trace: trace.outputs)):
            first = leaves[0]
            if tf.is_tensor(first):
                if not is_dense(first):
                    kind = type(first).__name__
                    raise NotProvedError(f"its output {i} is a {kind}")
                yield self._joined(f"output {i}", leaves)
                if masks[i][0] is not None:
                    self._joined(f"the mask of output {i}", masks[i])
            elif not is_plain_output(first):
                raise NotProvedError(problem_of_output(first))
            elif any(not _is_equal_leaf(first, other) for other in leaves[1:]):
                raise NotProvedError(
                    f"its output {i} is {first!r}, which depends on it"
                )
            else:
                yield None

    def _joined(self, name: str, tensors: Sequence[Any]) -> RowPlacement:
        """How values of replicas become that of the global batch."""
        placement = self._placement(tensors)
        found = _row_placement(placement)
        if found is None:
            raise NotProvedError(_reason(name, placement))
        return found

    def _placement(self, tensors: Sequence[Any]) -> GraphPlacement:
        if not hasattr(tensors[0], "graph") or not self._are_own(tensors):
            # Of eager code: a tensor from an attribute, that all replicas return.
            is_one = all(tensor is tensors[0] for tensor in tensors)
            cause = "a tensor that is not computed in the call"
            return SAME if is_one else GraphPlacement(Kind.UNKNOWN, cause=cause)
        return self._walk.placements([tensors])[0]

    def _are_own(self, tensors: Sequence[Any]) -> bool:
        pairs = zip(tensors, self._traces, strict=True)
        return all(getattr(t, "graph", None) is trace.graph for t, trace in pairs)

    def _updates(self) -> Iterator[tuple[int, RowPlacement]]:
        for pairs in self._columns(lambda trace: trace.updates):
            variable = pairs[0][0]
            values = [value for _, value in pairs]
            if any(other is not variable for other, _ in pairs):
                raise GraphsDifferError
            if not self._are_own(values):
                raise NotProvedError(f"it assigns {variable.path!r} in a loop")
            found = self._joined(f"the value assigned to {variable.path!r}", values)
            if self._adds:
                if found.kind is RowKind.ROWS:
                    name = variable.path
                    raise NotProvedError(f"the value added to {name!r} has rows")
            elif found.kind not in (RowKind.SAME, RowKind.MEAN):
                raise NotProvedError(
                    f"the value assigned to {variable.path!r} is {found.kind.value}"
                )
            yield id(variable), found

    # The backward pass.

    def _check_gradients(self, results: Sequence[RowPlacement | None]) -> None:
        by_tensor = {
            id(tensor): placement
            for tensor, placement in zip(
                (*self._call.outputs, *self._call.losses), results, strict=True
            )
        }
        for targets in self._columns(lambda trace: trace.targets):
            placement = by_tensor[id(targets[0].tensor)]
            assert placement is not None
            gradients = [target.gradient for target in targets]
            self._walk.place(gradients, _given_gradient(placement))
        for sources in self._columns(lambda trace: trace.sources):
            gradients = [source.gradient for source in sources]
            if any(gradient is not None for gradient in gradients):
                self._check_gradient(sources[0].name, sources[0].has_rows, gradients)

    def _check_gradient(self, name: str, has_rows: bool, column: Sequence[Any]) -> None:
        if len({type(gradient) for gradient in column}) > 1:
            raise GraphsDifferError
        if isinstance(column[0], tf.IndexedSlices):
            values = self._placement([each.values for each in column])
            indices = self._placement([each.indices for each in column])
            if has_rows:
                raise NotProvedError(f"the gradient of {name} is chosen by row numbers")
            is_sum = values.kind is Kind.PART and indices.is_plain
            is_sum |= (
                values.has_rows
                and indices.has_rows
                and not (values.axis or indices.axis or indices.power)
                and values.multiple == indices.multiple
            )
            placement = indices if indices.is_lost else values
            is_right = is_sum and not placement.is_lost and not placement.power
        else:
            placement = self._placement(column)
            if has_rows:
                is_right = placement == ROWS.but(is_zero=placement.is_zero)
            else:
                # Also a multiple of the number of rows adds up.
                is_right = (placement.kind is Kind.PART and not placement.power) or (
                    placement.kind is Kind.SAME and placement.power == 1
                )
            is_right |= placement.is_zero and not placement.is_lost
        if not is_right:
            raise NotProvedError(_reason(f"the gradient of {name}", placement))


def _row_placement(placement: GraphPlacement) -> RowPlacement | None:
    kind = placement.kind
    if placement.has_rows and not (
        placement.axis or placement.power or placement.offset or placement.outer > 1
    ):
        return RowPlacement(RowKind.ROWS, multiple=placement.multiple)
    if placement.is_plain:
        return RowPlacement(RowKind.SAME)
    if kind is Kind.SAME and placement.power == 1:
        # A multiple of the number of rows adds up.
        return RowPlacement(RowKind.SUM)
    if kind is Kind.PART and placement.power in (0, -1):
        return RowPlacement(RowKind.MEAN if placement.power else RowKind.SUM)
    return None


def _given_gradient(placement: RowPlacement) -> GraphPlacement:
    """The placement of a gradient that replicas get of an output or loss."""
    if placement.kind is RowKind.ROWS:
        return ROWS.but(multiple=placement.multiple)
    # Of a mean it is multiplied by the replica's rows, divided by those of the call.
    return SAME if placement.kind is RowKind.SUM else SAME.but(power=1)


def _reason(name: str, placement: GraphPlacement) -> str:
    if placement.is_lost:
        return f"{name} depends on {placement.cause}"
    return f"{name} is {placement}"


def _is_equal_leaf(first: Any, other: Any) -> bool:
    return type(first) is type(other) and bool(np.array_equal(first, other))


def _check_effects(call: TracedCall) -> None:
    definition = call.graph.as_graph_def()
    functions = (function.node_def for function in definition.library.function)
    for node in itertools.chain(definition.node, *functions):
        if node.op in _EFFECTS and not is_of_proof(node):
            raise NotProvedError(f"it {_EFFECTS[node.op]}")
