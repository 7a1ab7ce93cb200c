"""Values of small tensors, such as shapes, for each number of rows.

Arithmetic with shapes needs no rules: operations whose inputs are known are computed
for each number of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.graphs import computed_operation
from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    GraphPlacement,
    MixesRowsError,
    of_values,
)
from keras_strategies.engines.tensorflow.row_proofs.node import SMALL, Node

_COMPARISONS = """
    Equal NotEqual Less LessEqual Greater GreaterEqual Maximum Minimum
"""
_FILLING = "Fill BroadcastTo Tile Range"
_COMPUTED = f"""
    {_COMPARISONS} {_FILLING} Pack StridedSlice ConcatV2 Mul AddV2 Add Sub FloorDiv
    RealDiv Div FloorMod Mod Cast Prod Sum Max Min All Any Mean GatherV2 Reshape
    ExpandDims Squeeze Neg BroadcastGradientArgs DynamicStitch ConcatOffset
    InvertPermutation LogicalAnd LogicalOr LogicalNot SelectV2 Select ZerosLike OnesLike
    Slice Split SplitV Unpack Transpose Pow Sqrt Rsqrt Square Cumsum BroadcastArgs Floor
    Ceil Round Reciprocal Exp Log ListDiff Abs Sign PadV2 Pad TruncateDiv
"""
COMPARISONS, FILLING, COMPUTED = (
    frozenset(names.split()) for names in (_COMPARISONS, _FILLING, _COMPUTED)
)


def computed(node: Node) -> list[GraphPlacement] | None:
    """Placements of results with known values; None if they are not computed.

    Raises:
        MixesRowsError: if an operation is possible for some numbers of rows only.
    """
    if node.type not in COMPUTED or not node.inputs:
        return None
    columns = []
    for given in node.inputs:
        if given.values is None or any(v.size > SMALL for v in given.values):
            return None
        columns.append(given.values)
    if node.type in FILLING and not _is_small(node, columns):
        return None
    is_plain = all(given.is_plain for given in node.inputs)
    is_counted = any(given.is_counted for given in node.inputs)
    if is_counted and node.type in COMPARISONS and not node.facts.are_real:
        _check_comparison(node, columns)
    count = 1 if is_plain else len(node.counts)
    results = []
    for i in range(count):
        try:
            results.append(
                computed_operation(node.operation, [column[i] for column in columns])
            )
        except (tf.errors.OpError, ValueError) as error:
            if is_plain:
                return None
            reason = "an operation that depends on the number of rows"
            raise MixesRowsError(reason) from error
    if node.type in FILLING and len({result[0].shape for result in results}) > 1:
        return None
    results *= len(node.counts) // count
    found = [
        of_values([np.asarray(result[k]) for result in results], node.counts)
        for k in range(len(node.operation.outputs))
    ]
    return [each.but(is_counted=each.is_counted or is_counted) for each in found]


def _is_small(node: Node, columns: list[tuple[Any, ...]]) -> bool:
    tensor = node.operation.outputs[0]
    if tensor.shape.is_fully_defined():
        return bool(tensor.shape.num_elements() <= SMALL)
    limits = [
        float(value) for column in columns[:2] for value in column if not value.ndim
    ]
    return node.type == "Range" and max(limits, default=SMALL + 1) <= SMALL


def _check_comparison(node: Node, columns: list[tuple[Any, ...]]) -> None:
    """Raises for comparisons of the number of rows in a graph for any number.

    Their results at a few numbers of rows say nothing about the others, except where
    both sides are equal or do not depend on it, and for comparisons with zero or one.
    """
    if any(len({value.shape for value in column}) > 1 for column in columns):
        raise MixesRowsError("a comparison with the number of rows")
    first, second = map(np.stack, columns)
    if first.ndim != second.ndim:
        first, second = (each.reshape(len(each), -1) for each in (first, second))
    first, second = np.broadcast_arrays(first, second)
    least = 1 if node.type in ("Maximum", "Minimum") else 0
    is_decided = (first == second).all(0) | (_is_fixed(first) & _is_fixed(second))
    for a, b in ((first, second), (second, first)):
        is_decided |= _is_fixed(a) & (a <= least).all(0) & (b >= 1).all(0)
    if not is_decided.all():
        raise MixesRowsError("a comparison with the number of rows")


def _is_fixed(values: Any) -> Any:
    return (values == values[:1]).all(0)
