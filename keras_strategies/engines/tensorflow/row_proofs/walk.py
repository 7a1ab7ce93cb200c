"""The walk over a graph: the placement of each tensor that a result depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.graphs import (
    called_graph,
    calls_its_type,
    constant_value,
    inferred_shapes,
)
from keras_strategies.engines.tensorflow.row_proofs import proof_operations
from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    SAME,
    GraphPlacement,
    Kind,
    MixesRowsError,
    NoRuleError,
    are_equal,
    of_values,
)
from keras_strategies.engines.tensorflow.row_proofs.known_values import computed
from keras_strategies.engines.tensorflow.row_proofs.lockstep import (
    Columns,
    GraphsDifferError,
    are_constant,
)
from keras_strategies.engines.tensorflow.row_proofs.node import (
    SMALL,
    Facts,
    Node,
    Rule,
)
from keras_strategies.engines.tensorflow.row_proofs.rules import (
    contractions,
    control_flow,
    elementwise,
    gathers,
    random_draws,
    recurrent,
    row_by_row,
    shapes,
    slices,
)

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **shapes.RULES,
    **slices.RULES,
    **contractions.RULES,
    **gathers.RULES,
    **row_by_row.RULES,
    **random_draws.RULES,
    **recurrent.RULES,
    **control_flow.RULES,
    **proof_operations.RULES,
}
# Results of these are not what their inputs are, also if these are all the same.
_NEVER_PLAIN = frozenset(("Fill", "ZerosLike", "OnesLike"))
_NOT_SHAPED = (tf.resource, tf.variant)


@dataclass
class SharedWork:
    """What the walks over a call's graph and the functions in it share.

    Args:
        facts: Facts.
        place_of: callable of an operation, the layer that it belongs to, as the end of
            a sentence.
    """

    facts: Facts
    place_of: Callable[[Any], str]
    # Operations of function graphs at each number of rows, by `id` of the graphs.
    columns: dict[tuple[int, ...], Columns] = field(default_factory=dict)


class GraphWalk:
    """Placements of the tensors of a graph, computed when they are asked for.

    Args:
        graphs: the graph for each number of rows; one graph for any number of rows.
        work: SharedWork.
    """

    def __init__(self, graphs: Sequence[Any], work: SharedWork):
        self._graphs = graphs
        self._work = work
        self._facts = work.facts
        self._placements: dict[int, GraphPlacement] = {}
        key = tuple(map(id, graphs))
        if key not in work.columns:
            work.columns[key] = Columns(graphs)
        self._columns = work.columns[key]

    def place(self, tensors: Sequence[Any], placement: GraphPlacement) -> None:
        """Sets the placement of an argument.

        Args:
            tensors: the argument in each graph.
            placement: its placement.
        """
        self._columns.match(tensors)
        self._placements[id(tensors[0])] = placement

    def apart(self) -> GraphWalk:
        """A walk over the same graphs, in which nothing is placed."""
        facts = self._facts.apart()
        return GraphWalk(
            self._graphs, SharedWork(facts, self._work.place_of, self._work.columns)
        )

    def placements(self, columns: Sequence[Sequence[Any]]) -> list[GraphPlacement]:
        """Placements of results.

        Args:
            columns: for each result the tensor in each graph.

        Raises:
            GraphsDifferError: if they do not have the same operations.
        """
        for tensors in columns:
            self._columns.match(tensors)
        targets = [tensors[0] for tensors in columns]
        self._walk([t.op for t in targets if id(t) not in self._placements])
        return [self._placements[id(tensor)] for tensor in targets]

    def _walk(self, targets: Sequence[Any]) -> None:
        # Inputs first. Their order in the graph is another: a loop gets inputs that
        # were made after it.
        remaining = list(targets)
        while remaining:
            operation = remaining[-1]
            missing = [
                tensor.op
                for tensor in self._columns.matched_inputs(operation)
                if id(tensor) not in self._placements
            ]
            if missing:
                remaining += missing
                continue
            remaining.pop()
            if any(id(t) not in self._placements for t in operation.outputs):
                self._visit(operation)

    def _visit(self, operation: Any) -> None:
        read = self._columns.matched_inputs(operation)
        inputs = [self._placements[id(tensor)] for tensor in read]
        column = self._columns.of(operation)
        node = Node(self, self._facts, column, tuple(inputs))
        try:
            found = _results(node)
        except (MixesRowsError, NoRuleError) as error:
            found = [self.lost(node, error)] * len(operation.outputs)
        _infer_sizes(node, found)
        for tensor, placement in zip(operation.outputs, found, strict=True):
            self._placements.setdefault(id(tensor), placement)

    # For rules.

    def lost(self, node: Node, error: MixesRowsError | NoRuleError) -> GraphPlacement:
        """A placement that says why the value of the global batch is unknown."""
        where = self._work.place_of(node.operation)
        if isinstance(error, NoRuleError):
            cause = f"operation {node.type} has no rule for {error}{where}"
            return GraphPlacement(Kind.UNKNOWN, cause=cause)
        cause = f"operation {node.type}, {error}{where}"
        return GraphPlacement(Kind.MIXED, cause=cause)

    def call(
        self,
        node: Node,
        function: str | None,
        inputs: Sequence[GraphPlacement],
        first_argument: int = 0,
    ) -> list[GraphPlacement]:
        graphs = [called_graph(each, function) for each in node.operations]
        inner = GraphWalk(graphs, self._work)
        given = list(node.operation.inputs)[first_argument:]
        own_inputs = zip(*(graph.inputs for graph in graphs), strict=True)
        for column, outer, placement in zip(own_inputs, given, inputs, strict=True):
            own = column[0]
            inner.place(column, placement)
            sizes = None if outer.dtype in _NOT_SHAPED else self._facts.sizes_of(outer)
            if sizes is not None:
                self._facts.sizes[id(own)] = sizes
        if len({len(graph.outputs) for graph in graphs}) > 1:
            raise GraphsDifferError
        results = list(zip(*(graph.outputs for graph in graphs), strict=True))
        if function == "f":
            # A gradient has added outputs to the function since, at its end.
            results = results[: len(node.operation.outputs)]
        found = inner.placements(results)
        if function != "cond":
            outputs = zip(results, node.operation.outputs, strict=True)
            for (own, *_), outer in outputs:
                if own.dtype not in _NOT_SHAPED and id(own) in self._facts.sizes:
                    self._facts.sizes[id(outer)] = self._facts.sizes[id(own)]
        return found


def _rule(operation: Any) -> Rule | None:
    found = RULES.get(operation.type)
    if found is None and calls_its_type(operation):
        return control_flow.CALL_OF_TYPE
    return found


def _results(node: Node) -> list[GraphPlacement]:
    """Placements of the results of an operation."""
    rule, count = _rule(node.operation), len(node.operation.outputs)
    if node.type == "Const" or are_constant(node.operations):
        return [_constant(node)]
    if rule is not None and rule.takes_all:
        return _as_list(rule.apply(node), count)
    for given in node.inputs:
        if given.is_lost:
            if rule is not None and rule.takes_lost:
                return _as_list(rule.apply(node), count)
            return [given.but(least=None)] * count
    known = computed(node)
    if known is not None:
        return known
    passed = _passed(node, rule)
    if passed is not None:
        return [passed] * count
    if rule is None:
        raise NoRuleError(", ".join(dict.fromkeys(map(str, node.inputs))) or "itself")
    _check_inputs(node, rule)
    found = _as_list(rule.apply(node), count)
    outer = max((p.outer for p in node.inputs if p.has_rows), default=1)
    if outer > 1 and node.type != "BatchToSpaceND":
        found = [p.but(outer=outer) if p.has_rows else p for p in found]
    return found


def _as_list(
    found: GraphPlacement | list[GraphPlacement], count: int
) -> list[GraphPlacement]:
    return [found] * count if isinstance(found, GraphPlacement) else found


def _passed(node: Node, rule: Rule | None) -> GraphPlacement | None:
    """The placement of results that is that of the inputs, whatever the operation."""
    is_plain = [given.is_plain for given in node.inputs]
    if all(is_plain):
        is_function = not node.operation.op_def.is_stateful
        is_list = any(t.dtype == tf.variant for t in node.operation.outputs)
        is_passed = is_function and not is_list and node.type not in _NEVER_PLAIN
        return SAME if is_passed else None
    if rule is None or rule.moves is None:
        return None
    moved = node.inputs[rule.moves]
    if sum(is_plain) < len(is_plain) - 1 or moved.is_plain:
        return None
    is_float = not node.operation.inputs[rule.moves].dtype.is_integer
    if moved.kind is Kind.PART or (moved.kind is Kind.SAME and is_float):
        return moved.without_values()
    return None


def _check_inputs(node: Node, rule: Rule) -> None:
    """Raises for inputs that a rule does not expect."""
    for given, tensor in zip(node.inputs, node.operation.inputs, strict=True):
        is_number = (
            given.kind is Kind.SAME and given.power and not tensor.dtype.is_floating
        )
        if given.kind is Kind.COUNT and not rule.takes_counts:
            raise MixesRowsError(str(given))
        if is_number and not (rule.takes_counts or rule.takes_powers):
            raise MixesRowsError(str(given))
        if given.offset and not rule.takes_offsets:
            raise MixesRowsError("numbers of rows")
    outer = {given.outer for given in node.inputs if given.has_rows}
    if outer - {1} and (len(outer) > 1 or not rule.keeps_outer):
        raise MixesRowsError("rows that are repeated along their axis")


def _constant(node: Node) -> GraphPlacement:
    values = [constant_value(each) for each in node.operations]
    first = values[0]
    if len(values) == 1 or all(
        value.shape == first.shape and are_equal(value, first) for value in values
    ):
        is_zero = first.dtype.kind in "iuf" and not first.any()
        known = (first,) * len(node.counts) if first.size <= SMALL else None
        return SAME.but(is_zero=is_zero, values=known)
    if all(value.shape == first.shape for value in values):
        if first.size > SMALL:
            raise MixesRowsError("a constant that depends on the number of rows")
        return of_values(values, node.counts)
    axis = node.row_axis([value.shape for value in values])
    # As `np.zeros((rows, columns))`: only equal rows are the rows of all replicas.
    if axis is None or any(
        not are_equal(value, np.broadcast_to(value.take([0], axis.axis), value.shape))
        for value in values
    ):
        raise MixesRowsError("a constant with as many entries as rows")
    return axis.but(is_zero=first.dtype.kind in "iuf" and not first.any())


def _infer_sizes(node: Node, found: Sequence[GraphPlacement]) -> None:
    """Infers sizes again, which TensorFlow did not since it does not know shapes.

    The operation is made in another graph, with the known values as constants.
    """
    operation = node.operation
    unknown = [
        k
        for k, (tensor, placement) in enumerate(
            zip(operation.outputs, found, strict=True)
        )
        if tensor.dtype not in _NOT_SHAPED and _is_unknown(tensor, placement)
    ]
    if not unknown:
        return
    inferred: list[Any] | None = None
    for k in unknown:
        tensor, placement = operation.outputs[k], found[k]
        if placement.values is not None:
            node.facts.sizes[id(tensor)] = list(placement.values[0].shape)
            continue
        if id(tensor) in node.facts.sizes:
            continue
        sizes = _list_sizes(node)
        if sizes is None and inferred is None:
            inferred = _inferred(node)
        if sizes is None and inferred:
            sizes = inferred[k]
        if sizes is not None:
            node.facts.sizes[id(tensor)] = list(sizes)


def _is_unknown(tensor: Any, placement: GraphPlacement) -> bool:
    if tensor.shape.is_fully_defined():
        return False
    if tensor.shape.rank is None:
        return True
    return any(
        size is None and not (placement.has_rows and i == placement.axis)
        for i, size in enumerate(tensor.shape.as_list())
    )


def _list_sizes(node: Node) -> Sequence[int | None] | None:
    """Sizes of what is read from a list."""
    if not node.inputs or node.inputs[0].kind is not Kind.LIST:
        return None
    sizes = node.inputs[0].element_sizes
    if sizes is None:
        return None
    return [None, *sizes] if node.type == "TensorListStack" else sizes


def _inferred(node: Node) -> list[Any]:
    operation = node.operation
    if any(tensor.dtype in _NOT_SHAPED for tensor in operation.inputs):
        return []
    given = []
    for i, placement in enumerate(node.inputs):
        sizes = node.facts.sizes_of(operation.inputs[i])
        if placement.has_rows and sizes is not None:
            sizes = list(sizes)
            rows = placement.outer * placement.multiple * node.counts[0]
            sizes[placement.axis] = rows
        value = None if placement.values is None else placement.values[0]
        given.append((value, sizes))
    return inferred_shapes(operation, given)
