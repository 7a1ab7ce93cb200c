"""Rules of reductions, matrix products, einsums and convolutions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    PART,
    ROWS,
    SAME,
    GraphPlacement,
    Kind,
    MixesRowsError,
    NoRuleError,
)
from keras_strategies.engines.tensorflow.row_proofs.node import (
    Node,
    Result,
    Rule,
    rules,
)

#: An axis of an operand: equal labels are multiplied, and summed if not in the result.
Label = Any


def reduce_sum(node: Node) -> Result:
    """`Sum`, `Mean`: `(input, axes)`."""
    given = node.inputs[0]
    if given.kind in (Kind.PART, Kind.SAME):
        if not node.inputs[1].is_plain:
            raise NoRuleError("axes that depend on the number of rows")
        return given.but(values=None, is_zero=False)
    if given.axis not in node.axes(1, node.rank(0)):
        return _reduced(node)
    return PART.but(power=given.power - (node.type == "Mean"))


def reduce(node: Node) -> Result:
    """Other reductions: `(input, axes)`."""
    given = node.inputs[0]
    if given.kind is Kind.PART or given.power:
        raise MixesRowsError(f"of {given}")
    if given.axis in node.axes(1, node.rank(0)):
        raise MixesRowsError("over the rows")
    return _reduced(node)


def _reduced(node: Node) -> GraphPlacement:
    given = node.inputs[0]
    keeps = "keep_dims" in node.operation.node_def.attr and node.attribute("keep_dims")
    gone = [] if keeps else node.axes(1, node.rank(0))
    axis = given.axis - sum(k < given.axis for k in set(gone))
    return given.but(axis=axis, values=None, is_zero=False)


def contract(
    node: Node,
    operands: Sequence[int],
    labels: Sequence[Sequence[Label]],
    result: Sequence[Label],
    rows_only: Label = None,
) -> GraphPlacement:
    """The placement of a sum of products, as `einsum` computes.

    Args:
        node: Node.
        operands: the inputs that are multiplied.
        labels: for each operand the labels of its axes.
        result: the labels of the result's axes.
        rows_only: the one label that rows can have; None for all.
    """
    given = [node.inputs[i] for i in operands]
    power = sum(each.power for each in given)
    parts = [each for each in given if each.kind is Kind.PART]
    if parts:
        if len(parts) == 1 and all(
            each.kind is Kind.SAME for each in given if each is not parts[0]
        ):
            return PART.but(power=power)
        raise MixesRowsError("a product of " + ", ".join(map(str, given)))
    placed = [(p, own) for p, own in zip(given, labels, strict=True) if p.has_rows]
    if not placed:
        return SAME.but(power=power)
    first, own = placed[0]
    label = own[first.axis]
    if rows_only is not None and label != rows_only:
        raise MixesRowsError("rows that are not along its batch axis")
    if any(
        names[each.axis] != label or each.multiple != first.multiple
        for each, names in placed
    ):
        raise MixesRowsError("a product of rows with other rows")
    for each, names in zip(given, labels, strict=True):
        if not each.has_rows and label in names:
            raise MixesRowsError("a product of rows with a tensor that has as many")
    if label not in result:
        return PART.but(power=power)
    return first.but(
        axis=list(result).index(label), power=power, values=None, is_zero=False
    )


def matmul(node: Node) -> Result:
    """`MatMul(a, b)`, `BatchMatMulV2(x, y)`, with attributes that transpose."""
    names = ("transpose_a", "transpose_b")
    if node.type not in ("MatMul", "SparseMatMul"):
        names = ("adj_x", "adj_y")
    x_transposed, y_transposed = map(node.attribute, names)
    batch_rank = max(node.rank(0), node.rank(1)) - 2
    x = [*_batch_labels(node, 0, batch_rank), *("ki" if x_transposed else "ik")]
    y = [*_batch_labels(node, 1, batch_rank), *("jk" if y_transposed else "kj")]
    result = [*(f"batch {i}" for i in range(batch_rank)), "i", "j"]
    return contract(node, (0, 1), (x, y), result)


def _batch_labels(node: Node, operand: int, batch_rank: int) -> list[Label]:
    """Labels of batch axes; one of size 1 is broadcast along the other operand's."""
    placement, sizes = node.inputs[operand], node.sizes(operand)
    missing = batch_rank - (len(sizes) - 2)
    return [
        f"batch {missing + i}"
        if size != 1 or (placement.has_rows and placement.axis == i)
        else f"single {i} of {operand}"
        for i, size in enumerate(sizes[:-2])
    ]


def einsum(node: Node) -> Result:
    """`Einsum(inputs)`, with attribute `equation`."""
    equation = node.attribute("equation").decode().replace(" ", "")
    operands, result = equation.split("->")
    terms = operands.split(",")
    for term in (*terms, result):
        letters = term.replace("...", "")
        if len(letters) != len(set(letters)):
            raise NoRuleError("a diagonal in an einsum")
    ranks = [node.rank(i) for i in range(len(terms))]
    hidden = [
        rank - len(term) + 3
        for rank, term in zip(ranks, terms, strict=True)
        if "..." in term
    ]
    broadcast_rank = max(hidden, default=0)

    def labels(term: str, rank: int) -> list[Label]:
        if "..." not in term:
            return list(term)
        head, tail = term.split("...")
        count = rank - len(head) - len(tail)
        middle = [f"batch {broadcast_rank - count + i}" for i in range(count)]
        return [*head, *middle, *tail]

    own = [labels(term, rank) for term, rank in zip(terms, ranks, strict=True)]
    found = labels(result, node.output_rank())
    for i, names in enumerate(own):
        # Axes of size 1 are broadcast.
        given, sizes = node.inputs[i], node.sizes(i)
        for axis, size in enumerate(sizes):
            is_own = given.has_rows and given.axis == axis
            if size == 1 and not is_own and str(names[axis]).startswith("batch"):
                names[axis] = f"single {axis} of {i}"
    return contract(node, range(len(terms)), own, found)


def convolution(first: int, second: int) -> Callable[[Node], Result]:
    """The rule of a convolution or of its gradients, of two of the inputs.

    Axis 0 of images is the batch; the others are spatial, or channels.
    """

    def apply(node: Node) -> Result:
        images: list[Label] = ["rows", 1, 2, 3, 4]
        filters: list[Label] = ["f0", "f1", "f2", "f3", "f4"]
        if (first, second) == (0, 1):  # Images and filters.
            labels, result = [images, filters], images[:1]
        elif (first, second) == (1, 2):  # Filters and the result's gradient.
            labels, result = [filters, images], images[:1]
        else:  # Images and the result's gradient.
            labels, result = [images, images], filters
        return contract(node, (first, second), labels, result, rows_only="rows")

    return apply


def bias_add(node: Node) -> Result:
    """`BiasAdd(value, bias)`."""
    value, bias = node.inputs
    channel = _channel_axis(node)
    if value.kind is Kind.PART or bias.kind is not Kind.SAME:
        raise MixesRowsError(f"{value} plus a bias that is {bias}")
    if value.power or bias.power or (value.has_rows and value.axis == channel):
        raise MixesRowsError(f"{value} plus a bias that is {bias}")
    return value.but(is_zero=False, values=None)


def bias_add_gradient(node: Node) -> Result:
    """`BiasAddGrad(out_backprop)`."""
    given = node.inputs[0]
    if not given.has_rows:
        return given.without_values()
    if given.axis == _channel_axis(node):
        return ROWS.but(power=given.power, multiple=given.multiple)
    return PART.but(power=given.power)


def _channel_axis(node: Node) -> int:
    return 1 if node.attribute("data_format") == b"NCHW" else node.rank(0) - 1


_CONVOLUTION = {"takes_counts": True, "keeps_outer": True}
RULES: dict[str, Rule] = {
    **rules("Sum Mean", reduce_sum),
    **rules("Max Min Prod All Any ArgMax ArgMin EuclideanNorm", reduce),
    **rules("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3", matmul),
    **rules("Einsum", einsum),
    **rules("Conv2D Conv3D DepthwiseConv2dNative", convolution(0, 1), **_CONVOLUTION),
    **rules(
        "Conv2DBackpropInput Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput",
        convolution(1, 2),
        **_CONVOLUTION,
    ),
    **rules(
        "Conv2DBackpropFilter Conv3DBackpropFilterV2 "
        "DepthwiseConv2dNativeBackpropFilter",
        convolution(0, 2),
        **_CONVOLUTION,
    ),
    **rules("BiasAdd", bias_add, keeps_outer=True),
    **rules("BiasAddGrad", bias_add_gradient, keeps_outer=True),
}
