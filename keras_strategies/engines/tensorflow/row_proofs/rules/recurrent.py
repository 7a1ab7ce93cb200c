"""Rules of recurrent networks that a GPU computes in one operation (cuDNN)."""

from __future__ import annotations

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    PART,
    SAME,
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


def _batch_axis(node: Node) -> int:
    """The axis of the rows in inputs and outputs: `(time, rows, units)` by default."""
    attributes = node.operation.node_def.attr
    if "time_major" in attributes and not node.attribute("time_major"):
        return 0
    return 1


def _check(node: Node, rows_along: dict[int, int]) -> None:
    """Raises unless inputs have rows along these axes, or are empty or zero."""
    for i, axis in rows_along.items():
        given = node.inputs[i]
        is_absent = given.is_plain and 0 in [s or 1 for s in node.sizes(i)]
        if is_absent or (given.is_plain and node.rank(i) < 2 and not axis):
            continue
        if not given.has_rows or (given.axis, given.multiple) != (axis, 1):
            raise MixesRowsError(f"{given} in a recurrent layer")
        if given.power:
            raise MixesRowsError(f"{given} in a recurrent layer")


def cudnn(node: Node) -> Result:
    """`CudnnRNN(input, input_h, input_c, params)`; V3 has `sequence_lengths` too.

    The states have the shape `(layers, rows, units)`. Results: `output`, `output_h`,
    `output_c`, `reserve_space`, and in V2 and V3 `host_reserved`.
    """
    axis = _batch_axis(node)
    rows_along = {0: axis, 1: axis, 2: axis}
    if node.type == "CudnnRNNV3":
        rows_along[4] = 0
    _check(node, rows_along)
    if not node.inputs[3].is_plain:
        raise NoRuleError(f"weights that are {node.inputs[3]}")
    rows = node.inputs[0].but(values=None, is_zero=False)
    cell = rows if node.attribute("rnn_mode") == b"lstm" else SAME
    # The reserved space is read by the gradient only.
    reserved = [SAME] * (len(node.operation.outputs) - 3)
    return [rows, rows, cell, *reserved]


def cudnn_gradient(node: Node) -> Result:
    """`CudnnRNNBackpropV3(input, input_h, input_c, params, ...)`.

    V3 has `sequence_lengths` before `output`; then the results and their gradients.
    Results: gradients of input, of both states, and of the weights.
    """
    axis = _batch_axis(node)
    first = 5 if node.type == "CudnnRNNBackpropV3" else 4
    is_lstm = node.attribute("rnn_mode") == b"lstm"
    output, output_h, output_c = range(first, first + 3)
    gradients = range(first + 3, first + (6 if is_lstm else 5))
    rows_along = dict.fromkeys((0, 1, output, output_h), axis)
    if is_lstm:
        rows_along |= dict.fromkeys((2, output_c), axis)
    if first == 5:
        rows_along[4] = 0
    _check(node, rows_along)
    powers = set()
    for i in gradients:
        given = node.inputs[i]
        if given.is_zero:
            continue
        if given.kind is not Kind.ROWS or (given.axis, given.multiple) != (axis, 1):
            raise MixesRowsError(f"a gradient that is {given}")
        powers.add(given.power)
    if len(powers) > 1:
        raise MixesRowsError("gradients with different powers of the number of rows")
    power = powers.pop() if powers else 0
    rows = node.inputs[0].but(values=None, is_zero=False, power=power)
    cell = rows if is_lstm else SAME
    return [rows, rows, cell, PART.but(power=power)]


RULES: dict[str, Rule] = {
    **rules("CudnnRNN CudnnRNNV2 CudnnRNNV3", cudnn),
    **rules("CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3", cudnn_gradient),
}
