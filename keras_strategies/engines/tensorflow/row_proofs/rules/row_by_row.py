"""Rules of operations that treat each row, or each vector or matrix, separately."""

from __future__ import annotations

from keras_strategies.engines.tensorflow.row_proofs.graph_placements import (
    HANDLE,
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

#: Axis 0 is the batch.
BATCHED = """
    MaxPool MaxPool3D MaxPoolV2 MaxPoolWithArgmax LRN LRNGrad ExtractImagePatches
    SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits
    AdjustContrastv2 RGBToHSV HSVToRGB AdjustHue AdjustSaturation
    NonMaxSuppressionV5 Dilation2D DataFormatVecPermute
"""
#: The same, and linear in the input of this number.
BATCHED_AND_LINEAR = {
    0: """
        AvgPool AvgPool3D ResizeNearestNeighbor ResizeBilinear ResizeBicubic ResizeArea
        DepthToSpace SpaceToDepth ResizeNearestNeighborGrad ResizeBilinearGrad
        ResizeBicubicGrad ScaleAndTranslate ScaleAndTranslateGrad
        ImageProjectiveTransformV2 ImageProjectiveTransformV3
    """,
    1: "AvgPoolGrad AvgPool3DGrad",
    2: "MaxPoolGrad MaxPool3DGrad MaxPoolGradV2",
}
#: Each vector along the last axis, or each matrix along the last two, is separate.
LAST_AXES = {
    1: """
        Softmax LogSoftmax TopKV2 TopK FFT IFFT RFFT IRFFT InTopKV2 NthElement
    """,
    2: """
        MatrixInverse Cholesky CholeskyGrad Qr Svd MatrixDeterminant
        LogMatrixDeterminant SelfAdjointEigV2 Eig FFT2D IFFT2D RFFT2D IRFFT2D
        MatrixBandPart MatrixSolve
        MatrixTriangularSolve MatrixSolveLs MatrixExponential MatrixLogarithm
        MatrixSquareRoot Lu
    """,
    3: "FFT3D IFFT3D RFFT3D IRFFT3D",
}


def batched(linear: int | None = None) -> Rule:
    """The rule of operations on each entry of axis 0.

    Args:
        linear: int, the input that it is linear in; None for other operations.
    """

    def apply(node: Node) -> Result:
        placed = [each for each in node.inputs if each.has_rows]
        if any(each.kind is Kind.PART for each in node.inputs) or not placed:
            raise MixesRowsError(", ".join(map(str, node.inputs)))
        if any(each.axis or each.multiple != placed[0].multiple for each in placed):
            raise MixesRowsError("rows that are not along its batch axis")
        if any(
            (each.has_rows or not each.is_plain) and each.power and i != linear
            for i, each in enumerate(node.inputs)
            if i > 0 or linear is None or linear == 0
        ):
            raise MixesRowsError("a multiple of the number of rows")
        _check_batches(node)
        power = 0 if linear is None else node.inputs[linear].power
        return placed[0].but(power=power, values=None, is_zero=False)

    return Rule(apply, takes_counts=linear in (1, 2))


def _check_batches(node: Node) -> None:
    """Raises for a tensor with as many entries as rows that are not its rows.

    Sizes, boxes and the like are vectors; batches have a rank of at least three.
    """
    for i, each in enumerate(node.inputs):
        if each.is_plain and node.rank(i) >= 3:
            raise MixesRowsError("rows are combined with a tensor that has as many")


def crossentropy(node: Node) -> Result:
    """`SoftmaxCrossEntropyWithLogits(features, labels)` and its sparse form."""
    if any(not each.has_rows for each in node.inputs):
        raise MixesRowsError("rows are combined with a tensor that has as many")
    return batched().apply(node)


def crop_and_resize(node: Node) -> Result:
    """`CropAndResize(image, boxes, box_ind, crop_size)` addresses rows by number."""
    raise MixesRowsError("rows are chosen by their number")


def last_axes(count: int) -> Rule:
    """The rule of operations on the last axes of their inputs."""

    def apply(node: Node) -> Result:
        if any(each.power or each.kind is Kind.PART for each in node.inputs):
            raise MixesRowsError("of " + ", ".join(map(str, node.inputs)))
        placed = [(i, each) for i, each in enumerate(node.inputs) if each.has_rows]
        first, given = placed[0]
        rank = node.rank(first)
        if given.axis >= rank - count:
            raise MixesRowsError("along the rows")
        for _, each in placed:
            if (each.axis, each.multiple) != (given.axis, given.multiple):
                raise MixesRowsError("rows are combined with other rows")
        for i, each in enumerate(node.inputs):
            # Parameters, such as the k of `top_k`, are scalars and vectors.
            own_axis = given.axis - (rank - node.rank(i))
            is_parameter = each.has_rows or node.rank(i) <= count or own_axis < 0
            if not is_parameter and node.sizes(i)[own_axis] != 1:
                raise MixesRowsError("rows are combined with a tensor that has as many")
        return given.but(values=None, is_zero=False)

    return Rule(apply)


def one_hot(node: Node) -> Result:
    """`OneHot(indices, depth, on_value, off_value)`, with attribute `axis`."""
    given = node.inputs[0]
    if any(not each.is_plain for each in node.inputs[1:]) or given.power:
        raise MixesRowsError("as many classes as rows")
    new = node.attribute("axis") % (node.rank(0) + 1)
    return given.but(axis=given.axis + (new <= given.axis), values=None, is_zero=False)


def search_sorted(node: Node) -> Result:
    """`LowerBound`, `UpperBound`: `(sorted_inputs, values)`, both of rank 2."""
    bins, values = node.inputs
    if bins.power or values.power or Kind.PART in (bins.kind, values.kind):
        raise MixesRowsError(f"{values} in bins that are {bins}")
    if not (bins.has_rows and values.has_rows):
        # `(1, bins)` and `(1, flattened values)`.
        if values.has_rows and values.axis == 1 and node.sizes(0)[0] == 1:
            return values.but(values=None, is_zero=False)
        raise MixesRowsError("rows are combined with a tensor that has as many")
    if bins.axis or values.axis or bins.multiple != values.multiple:
        raise MixesRowsError("rows are combined with other rows")
    return values.but(values=None, is_zero=False)


def diagonal(node: Node) -> Result:
    """`MatrixDiagV3` and `MatrixDiagPartV3`: the last axis, or the last two."""
    given = node.inputs[0]
    if given.kind is Kind.PART or given.power:
        raise MixesRowsError(f"of {given}")
    if not given.has_rows or any(not each.is_plain for each in node.inputs[1:]):
        raise MixesRowsError("a diagonal that is computed from rows")
    lowest = node.numbers(1)[0]
    several = len(lowest) > 1 and lowest[0] != lowest[-1]
    own = 2 if node.type.startswith("MatrixDiagPart") or several else 1
    if given.axis >= node.rank(0) - own:
        raise MixesRowsError("along the rows")
    return given.but(values=None, is_zero=False)


def set_diagonal(node: Node) -> Result:
    """`MatrixSetDiagV3(input, diagonal, k)`."""
    given, values = node.inputs[:2]
    if given.power or values.power or Kind.PART in (given.kind, values.kind):
        raise MixesRowsError(f"{values} on the diagonal of {given}")
    if not (given.has_rows and values.has_rows) or given.axis != values.axis:
        raise MixesRowsError("rows are combined with a tensor that has as many")
    if given.axis >= node.rank(0) - 2 or given.multiple != values.multiple:
        raise MixesRowsError("along the rows")
    return given.but(values=None, is_zero=False)


def cross(node: Node) -> Result:
    """`Cross(a, b)`, of vectors along the last axis: linear in each of them."""
    a, b = node.inputs
    are_alike = (
        a.has_rows and b.has_rows and (a.axis, a.multiple) == (b.axis, b.multiple)
    )
    if not are_alike:
        raise MixesRowsError(f"of {a} and {b}")
    if a.axis == node.rank(0) - 1:
        raise MixesRowsError("along the rows")
    return a.but(power=a.power + b.power, values=None, is_zero=False)


def bincount(node: Node) -> Result:
    """`DenseBincount(input, size, weights)`: of each row, for inputs of rank 2."""
    given, size, weights = node.inputs
    if not size.is_plain or given.power or weights.power:
        raise MixesRowsError("as many bins as rows")
    if not given.has_rows or given.axis or node.rank(0) != 2:
        raise MixesRowsError("counts over the rows")
    if weights.kind is not Kind.SAME and not (
        weights.has_rows and weights.axis == 0 and weights.multiple == given.multiple
    ):
        raise MixesRowsError(f"weights that are {weights}")
    if weights.kind is Kind.SAME and 0 not in node.sizes(2):
        raise MixesRowsError("rows are combined with a tensor that has as many")
    return given.but(values=None, is_zero=False)


def fused_batch_norm(node: Node) -> Result:
    """`FusedBatchNormV3(x, scale, offset, mean, variance)`: statistics, if training."""
    if node.attribute("is_training"):
        raise MixesRowsError("statistics of the batch")
    x, *parameters = node.inputs
    if not x.has_rows or x.axis or x.power or any(not p.is_plain for p in parameters):
        raise NoRuleError("batch normalization of something that is no batch")
    kept = GraphPlacement()
    rows = x.but(values=None, is_zero=False)
    return [rows, *[kept] * (len(node.operation.outputs) - 1)]


def fused_batch_norm_gradient(node: Node) -> Result:
    """`FusedBatchNormGradV3(y_backprop, x, scale, ...)`."""
    if node.attribute("is_training"):
        raise MixesRowsError("statistics of the batch")
    gradient, x = node.inputs[:2]
    if not (gradient.has_rows and x.has_rows) or gradient.axis or x.axis or x.power:
        raise NoRuleError("batch normalization of something that is no batch")
    part = GraphPlacement(Kind.PART, power=gradient.power)
    plain = GraphPlacement()
    return [gradient.but(values=None, is_zero=False), part, part, plain, plain]


def where(node: Node) -> Result:
    """`Where(condition)`: positions, as many as are true."""
    raise MixesRowsError("positions among rows")


def always_mixes(reason: str) -> Rule:
    def apply(node: Node) -> Result:
        raise MixesRowsError(reason)

    return Rule(apply)


def table_lookup(node: Node) -> Result:
    """`LookupTableFindV2(table, keys, default)`: each key by itself."""
    _, keys, default = node.inputs
    if keys.has_rows and not keys.power and default.is_plain:
        return keys.but(values=None, is_zero=False)
    return keys if keys.is_plain and default.is_plain else _not_rows(keys)


def _not_rows(keys: GraphPlacement) -> GraphPlacement:
    raise MixesRowsError(f"keys that are {keys}")


def resource(node: Node) -> Result:
    return HANDLE


RULES: dict[str, Rule] = {
    **dict.fromkeys(BATCHED.split(), batched()),
    **{
        name: batched(linear)
        for linear, names in BATCHED_AND_LINEAR.items()
        for name in names.split()
    },
    **{
        name: last_axes(count)
        for count, names in LAST_AXES.items()
        for name in names.split()
    },
    **rules(
        "SparseSoftmaxCrossEntropyWithLogits SoftmaxCrossEntropyWithLogits",
        crossentropy,
    ),
    **rules("CropAndResize", crop_and_resize),
    **rules("OneHot", one_hot),
    **rules("LowerBound UpperBound", search_sorted),
    **rules("MatrixDiagV3 MatrixDiagPartV3", diagonal),
    **rules("MatrixSetDiagV3", set_diagonal),
    **rules("DenseBincount", bincount),
    **rules("Cross", cross),
    **rules("FusedBatchNormV3 FusedBatchNormV2 FusedBatchNorm", fused_batch_norm),
    **rules("FusedBatchNormGradV3", fused_batch_norm_gradient),
    **rules("Where", where),
    **rules("LookupTableFindV2", table_lookup),
    **dict.fromkeys(
        ("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2", "Bincount"),
        always_mixes("values of all rows"),
    ),
    **rules("VarHandleOp HashTableV2 MutableHashTableV2", resource),
}
