"""Rules of loops, branches, calls, lists of tensors, variables and shapes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    SAME,
    ZERO,
    GraphPlacement,
    Kind,
    MixesRowsError,
    NoRuleError,
    joined,
    of_values,
)
from keras_strategies.engines.tensorflow.row_proofs.node import (
    Node,
    Result,
    Rule,
    rules,
)

# Each round changes the placement of a loop variable at most a few times.
_MOST_ROUNDS = 20

EMPTY_LIST = GraphPlacement(Kind.LIST)


def identity(node: Node) -> Result:
    """The input as it is, with its known values."""
    return node.inputs[0]


def call(node: Node) -> Result:
    """`PartitionedCall(args)`, with attribute `f`."""
    return node.walk.call(node, "f", node.inputs)


def call_of_type(node: Node) -> Result:
    """An operation whose type is the name of a function, as older programs have."""
    return node.walk.call(node, None, node.inputs)


def branch(node: Node) -> Result:
    """`If(cond, input)`, with attributes `then_branch` and `else_branch`."""
    condition, *inputs = node.inputs
    if condition.is_lost:
        return condition
    if not condition.is_plain:
        raise MixesRowsError(f"a condition that is {condition}")
    names = ["then_branch", "else_branch"]
    if condition.values is not None and not condition.is_counted:
        names = [names[0] if condition.values[0] else names[1]]
    return _of_branches(node, [node.walk.call(node, n, inputs, 1) for n in names])


def case(node: Node) -> Result:
    """`Case(branch_index, input)`, with attribute `branches`."""
    index, *inputs = node.inputs
    if index.is_lost:
        return index
    if not index.is_plain:
        raise MixesRowsError(f"a condition that is {index}")
    count = len(node.attribute("branches"))
    chosen: Sequence[int] = range(count)
    if index.values is not None and not index.is_counted:
        number = int(index.values[0])
        chosen = [number if 0 <= number < count else count - 1]
    names = [f"branches {i}" for i in chosen]
    return _of_branches(node, [node.walk.call(node, n, inputs, 1) for n in names])


def _of_branches(node: Node, results: list[list[GraphPlacement]]) -> Result:
    found = results[0]
    for other in results[1:]:
        found = [_joined(node, a, b) for a, b in zip(found, other, strict=True)]
    return found


def loop(node: Node) -> Result:
    """`While(input)`, with attributes `cond` and `body`."""
    state = list(node.inputs)
    for _ in range(_MOST_ROUNDS):
        results = node.walk.call(node, "body", state)
        found = [_joined(node, a, b) for a, b in zip(state, results, strict=True)]
        is_stable = found == state and not any(
            _is_less_known(a, b) for a, b in zip(found, state, strict=True)
        )
        state = found
        if is_stable:
            break
    else:
        raise MixesRowsError("a loop in which rows move with each iteration")
    condition = node.walk.call(node, "cond", state)[0]
    if condition.is_lost:
        return condition
    if not condition.is_plain:
        raise MixesRowsError(f"a number of iterations that is {condition}")
    return state


def _joined(node: Node, a: GraphPlacement, b: GraphPlacement) -> GraphPlacement:
    try:
        return joined(a, b)
    except MixesRowsError as error:
        return node.walk.lost(node, error)


def _is_less_known(now: GraphPlacement, before: GraphPlacement) -> bool:
    """Whether values that were known are not known any longer."""
    if now.element is not None and before.element is not None:
        return _is_less_known(now.element, before.element)
    return now.values is None and before.values is not None


def read(node: Node) -> Result:
    return SAME


# Lists of tensors.


def empty_list(node: Node) -> Result:
    return EMPTY_LIST


def reserve_list(node: Node) -> Result:
    """`TensorListReserve(element_shape, num_elements)`."""
    if not node.inputs[1].is_plain:
        raise MixesRowsError("a list with an element for each row")
    return EMPTY_LIST


def set_item(node: Node) -> Result:
    """`TensorListSetItem(list, index, item)`, `TensorListPushBack(list, item)`."""
    given, *index, item = node.inputs
    if not all(each.is_plain for each in index):
        raise MixesRowsError("an element of a list by the number of rows")
    last = len(node.inputs) - 1
    sizes = None
    if item.kind is not Kind.LIST:
        known = node.facts.sizes_of(node.operation.inputs[last])
        sizes = None if known is None else tuple(known)
    if node.type == "TensorListSetItem":
        # Elements that are not set are zero.
        item = item.without_values()
    if given.element is not None:
        item = joined(given.element, item)
    return given.but(element=item, element_sizes=sizes or given.element_sizes)


def pop_item(node: Node) -> Result:
    """`TensorListPopBack(list, element_shape)`."""
    return [node.inputs[0], node.inputs[0].element or ZERO]


def get_item(node: Node) -> Result:
    """`TensorListGetItem(list, index, element_shape)`."""
    if not node.inputs[1].is_plain:
        raise MixesRowsError("an element of a list by the number of rows")
    return (node.inputs[0].element or ZERO).without_values()


def stack_list(node: Node) -> Result:
    """`TensorListStack(list, element_shape)`: the elements along a new axis 0."""
    element = (node.inputs[0].element or ZERO).without_values()
    if element.kind is Kind.LIST:
        raise NoRuleError("a list of lists")
    return element.but(axis=element.axis + 1) if element.has_rows else element


def list_of_tensor(node: Node) -> Result:
    """`TensorListFromTensor(tensor, element_shape)`: its entries along axis 0."""
    given = node.inputs[0].without_values()
    if given.has_rows:
        if not given.axis:
            raise MixesRowsError("a list of rows")
        given = given.but(axis=given.axis - 1)
    sizes = node.facts.sizes_of(node.operation.inputs[0])
    return EMPTY_LIST.but(
        element=given, element_sizes=tuple(sizes[1:]) if sizes else None
    )


def list_length(node: Node) -> Result:
    return SAME


def optional(node: Node) -> Result:
    """`OptionalFromValue(components)`, as a list of one element."""
    if len(node.inputs) != 1:
        raise NoRuleError("several values")
    sizes = node.facts.sizes_of(node.operation.inputs[0])
    return EMPTY_LIST.but(
        element=node.inputs[0].without_values(),
        element_sizes=tuple(sizes) if sizes else None,
    )


def value_of_optional(node: Node) -> Result:
    """`OptionalGetValue(optional)`, where it has one."""
    if node.inputs[0].kind is not Kind.LIST or node.inputs[0].element is None:
        raise NoRuleError("an optional without a value")
    return node.inputs[0].element


# Shapes.


def shape(node: Node) -> Result:
    """`Shape`, `ShapeN`, `Size`, `Rank`."""
    found = []
    dtype = node.operation.outputs[0].dtype.as_numpy_dtype
    for i, given in enumerate(node.inputs):
        shapes = node.shapes(i)
        if shapes is None:
            if given.kind not in (Kind.SAME, Kind.PART):
                raise NoRuleError("a shape with unknown sizes")
            found.append(SAME)
            continue
        results = [_result(node.type, each) for each in shapes]
        values = [np.array(each, dtype) for each in results]
        found.append(of_values(values, node.counts))
    return found


def _result(operation: str, sizes: list[int]) -> list[int] | int:
    if operation == "Size":
        return int(np.prod(sizes))
    return len(sizes) if operation == "Rank" else sizes


_ANY = {"takes_all": True}
CALL_OF_TYPE = Rule(call_of_type, takes_all=True)
RULES: dict[str, Rule] = {
    **rules("Identity StopGradient PreventGradient EnsureShape", identity, **_ANY),
    **rules("PartitionedCall StatefulPartitionedCall", call, **_ANY),
    **rules("If StatelessIf", branch, **_ANY),
    **rules("Case StatelessCase", case, **_ANY),
    **rules("While StatelessWhile", loop, **_ANY),
    **rules("ReadVariableOp VariableShape", read),
    **rules("OptionalNone", empty_list),
    **rules("OptionalFromValue", optional),
    **rules("OptionalGetValue", value_of_optional),
    **rules("EmptyTensorList", empty_list, takes_counts=True),
    **rules("TensorListReserve", reserve_list, takes_counts=True, keeps_outer=True),
    **rules("TensorListSetItem TensorListPushBack", set_item, takes_counts=True),
    **rules("TensorListPopBack", pop_item, takes_counts=True),
    **rules("TensorListGetItem", get_item, takes_counts=True),
    **rules("TensorListStack", stack_list, takes_counts=True),
    **rules("TensorListFromTensor", list_of_tensor, takes_counts=True),
    **rules("TensorListLength TensorListElementShape", list_length),
    **rules(
        "Shape ShapeN Size Rank",
        shape,
        takes_counts=True,
        takes_powers=True,
        keeps_outer=True,
        takes_offsets=True,
    ),
}
