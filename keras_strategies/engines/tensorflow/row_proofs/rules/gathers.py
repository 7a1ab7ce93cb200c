"""Rules of gathers and scatters."""

from __future__ import annotations

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    PART,
    ZERO,
    GraphPlacement,
    Kind,
    MixesRowsError,
)
from keras_strategies.engines.tensorflow.row_proofs.node import (
    Node,
    Result,
    Rule,
    rules,
)

_BY_NUMBER = "rows are chosen by their number"
_NUMBERS = "numbers of rows"


def gather(node: Node) -> Result:
    """`GatherV2(params, indices, axis)`, with attribute `batch_dims`."""
    params, indices = node.inputs[:2]
    batch = node.attribute("batch_dims")
    axis = node.axes(2, node.rank(0))[0]
    if indices.is_plain:
        if params.kind in (Kind.SAME, Kind.PART):
            return params.without_values()
        if params.axis == axis:
            raise MixesRowsError(_BY_NUMBER)
        moved = node.rank(1) - 1 - batch if params.axis > axis else 0
        return params.but(axis=params.axis + moved, values=None, is_zero=False)
    if not indices.has_rows or indices.power or indices.offset:
        raise MixesRowsError(f"indices that are {indices}")
    if params.kind is Kind.SAME and indices.axis >= batch:
        # One choice for each row from a table.
        return indices.but(
            axis=axis + indices.axis - batch,
            power=params.power,
            values=None,
            is_zero=False,
        )
    is_row_by_row = (
        params.has_rows
        and params.axis == indices.axis < batch
        and params.multiple == indices.multiple
    )
    if is_row_by_row:
        return params.but(values=None, is_zero=False)
    raise MixesRowsError(f"{params} gathered by indices that are {indices}")


def gather_nd(node: Node) -> Result:
    """`GatherNd(params, indices)`."""
    params, indices = node.inputs
    rank, depth = node.rank(1), node.sizes(1)[-1]
    is_choice = indices.has_rows and indices.axis < rank - 1 and not indices.power
    if params.kind is Kind.SAME and is_choice:
        return indices.but(power=params.power, values=None, is_zero=False)
    if params.has_rows and indices.is_plain and depth is not None:
        if params.axis >= depth:
            return params.but(
                axis=params.axis - depth + rank - 1, values=None, is_zero=False
            )
        raise MixesRowsError(_BY_NUMBER)
    raise MixesRowsError(f"{params} gathered by indices that are {indices}")


def segment_sum(node: Node) -> Result:
    """`UnsortedSegmentSum(data, segment_ids, num_segments)`."""
    data, ids, segments = node.inputs
    rank = node.rank(1)
    are_alike = (
        data.has_rows
        and ids.has_rows
        and (data.axis, data.multiple) == (ids.axis, ids.multiple)
    )
    if ids.offset:
        # Entries of flattened rows, by numbers that begin at 0 on each replica.
        is_own = are_alike and not data.axis and segments.values is not None
        if not is_own or node.numbers(2) != [[ids.offset * b] for b in node.counts]:
            raise MixesRowsError(_NUMBERS)
        return data.but(multiple=ids.offset, values=None, is_zero=False)
    if not segments.is_plain:
        raise MixesRowsError("as many segments as rows")
    if are_alike:
        return PART.but(power=data.power)
    if ids.is_plain and data.kind is Kind.PART:
        return data
    if ids.is_plain and data.has_rows and data.axis >= rank:
        return data.but(axis=data.axis - rank + 1, values=None, is_zero=False)
    raise MixesRowsError(f"{data} summed by segments that are {ids}")


def segment_reduce(node: Node) -> Result:
    """`UnsortedSegmentMax` and others: `(data, segment_ids, num_segments)`."""
    data, ids, segments = node.inputs
    rank = node.rank(1)
    if not segments.is_plain or not ids.is_plain or not data.has_rows or data.power:
        raise MixesRowsError(f"{data} reduced by segments that are {ids}")
    if data.axis < rank:
        raise MixesRowsError("over the rows")
    return data.but(axis=data.axis - rank + 1, values=None, is_zero=False)


def scatter(node: Node) -> Result:
    """`ScatterNd(indices, updates, shape)`: sums of updates in a tensor of zeros."""
    indices, updates, _ = node.inputs
    depth = node.sizes(0)[-1]
    if indices.offset:
        is_own = (
            depth == 1
            and updates.has_rows
            and not updates.axis
            and not indices.axis
            and updates.multiple == indices.multiple
        )
        if not is_own or node.numbers(2) != [[indices.offset * b] for b in node.counts]:
            raise MixesRowsError(_NUMBERS)
        return updates.but(multiple=indices.offset, values=None, is_zero=False)
    shapes = node.numbers(2) if node.inputs[2].values is not None else None
    if shapes is not None and any(shape != shapes[0] for shape in shapes):
        return _scattered(node, 0, updates, indices, ZERO)
    are_alike = indices.has_rows and updates.has_rows and not indices.power
    at = (updates.axis, updates.multiple)
    if are_alike and at == (indices.axis, indices.multiple):
        return PART.but(power=updates.power)
    return _scattered(node, 0, updates, indices, ZERO)


def scatter_into(node: Node) -> Result:
    """`TensorScatterAdd`, `TensorScatterUpdate`: `(tensor, indices, updates)`."""
    base, indices, updates = node.inputs
    if indices.offset:
        raise MixesRowsError(_NUMBERS)
    return _scattered(node, 1, updates, indices, base)


def _scattered(
    node: Node,
    indices_input: int,
    updates: GraphPlacement,
    indices: GraphPlacement,
    base: GraphPlacement,
) -> GraphPlacement:
    """Updates with rows along an axis that indices do not address."""
    rank, depth = node.rank(indices_input), node.sizes(indices_input)[-1]
    is_linear = node.type not in ("TensorScatterMax", "TensorScatterMin")
    if indices.is_plain and updates.kind is Kind.PART and base.is_zero and is_linear:
        return updates
    if (
        indices.is_plain
        and updates.has_rows
        and depth is not None
        and updates.axis >= rank - 1
    ):
        axis = updates.axis - (rank - 1) + depth
        is_alike = base.has_rows and (base.axis, base.power, base.multiple) == (
            axis,
            updates.power,
            updates.multiple,
        )
        if base.is_zero or is_alike:
            return updates.but(axis=axis, values=None, is_zero=False)
    raise MixesRowsError(f"{updates} scattered by indices that are {indices}")


RULES: dict[str, Rule] = {
    **rules("GatherV2", gather, takes_offsets=True),
    **rules("GatherNd", gather_nd),
    **rules("UnsortedSegmentSum", segment_sum, takes_counts=True, takes_offsets=True),
    **rules(
        "UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd", segment_reduce
    ),
    **rules("ScatterNd", scatter, takes_counts=True, takes_offsets=True),
    **rules(
        "TensorScatterAdd TensorScatterUpdate TensorScatterMax TensorScatterMin "
        "TensorScatterSub",
        scatter_into,
        takes_offsets=True,
    ),
}
