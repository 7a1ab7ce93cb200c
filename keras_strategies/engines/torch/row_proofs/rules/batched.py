"""Operations on each entry of a batch: normalization, pooling, images, matrices."""

from __future__ import annotations

from collections.abc import Sequence

from keras_strategies.engines.torch.row_proofs.recorded_operation import (
    Operand,
    Operation,
)
from keras_strategies.engines.torch.row_proofs.rules.elementwise import (
    combined,
    tensors,
)
from keras_strategies.engines.torch.row_proofs.rules.reductions import require_plain
from keras_strategies.engines.torch.row_proofs.rules.registry import rule
from keras_strategies.engines.torch.row_proofs.rules.shapes import along
from keras_strategies.engines.torch.row_proofs.value_placements import (
    SAME,
    SUM,
    MixesRows,
    Placed,
)


def batched(op: Operation, operands: Sequence[Operand], own_axes: int) -> Placed:
    """The placement of a nonlinear operation on each entry of the leading axes.

    Args:
        op: the operation.
        operands: its operands with these leading axes.
        own_axes: int, how many of the last axes are of one entry.
    """
    for operand in operands:
        require_plain(operand.placed)
    return linear_batched(op, operands, own_axes).changed(is_zero=False)


def linear_batched(op: Operation, operands: Sequence[Operand], own_axes: int) -> Placed:
    """The same for an operation that is linear in its first operand."""
    for operand in operands[1:]:
        require_plain(operand.placed)
    first = next((o.placed for o in operands if o.placed.is_rows), None)
    if first is None:
        return operands[0].placed
    for operand in operands:
        placed = operand.placed
        alike = (placed.kind, placed.axis, placed.layout)
        if alike != (first.kind, first.axis, first.layout):
            raise MixesRows("of rows with other rows")
        if placed.axis >= operand.rank - own_axes:
            raise MixesRows("along the rows")
    return first.changed(power=operands[0].placed.power, is_zero=False)


# Normalization.


@rule("native_layer_norm _fused_rms_norm", sizes=[])
def _layer_norm(op: Operation) -> Placed:
    op.require_equal("weight", "bias")
    return batched(op, [op["input"]], len(op["normalized_shape"]))


@rule("native_layer_norm_backward _fused_rms_norm_backward")
def _layer_norm_gradient(op: Operation) -> Sequence[Placed]:
    op.require_equal("weight", "bias")
    own_axes = len(op["normalized_shape"])
    # Mean and deviation have all axes, those that are normalized of length one.
    operands = [o for n in ("input", "mean", "rstd") if (o := op.get(n)) is not None]
    gradient = linear_batched(op, [op["grad_out"], *operands], own_axes)
    of_weights = _summed(gradient)
    return [gradient, of_weights, of_weights][: len(op.results)]


def _summed(gradient: Placed) -> Placed:
    return SUM.changed(power=gradient.power) if gradient.is_rows else gradient


@rule("native_group_norm", sizes=["N"])
def _group_norm(op: Operation) -> Placed:
    op.require_equal("weight", "bias")
    source = op["input"]
    return batched(op, [source], source.rank - 1)


@rule("native_group_norm_backward", sizes=["N"])
def _group_norm_gradient(op: Operation) -> Sequence[Placed]:
    op.require_equal("weight")
    source = op["input"]
    require_plain(source.placed)
    gradient = linear_batched(op, [op["grad_out"], source], source.rank - 1)
    if gradient.is_rows and op["mean"].placed.layout != source.placed.layout:
        raise MixesRows("of rows with other rows")
    return [gradient, _summed(gradient), _summed(gradient)]


@rule("linalg_matrix_exp logdet")
def _matrix(op: Operation) -> Placed:
    return batched(op, [op["self"]], 2)


# Images: channels and positions are the last axes.


def _spatial(name: str) -> int:
    return next(int(n) for n in "123" if f"{n}d" in name)


@rule(
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d "
    "adaptive_max_pool3d max_pool2d max_pool3d"
)
def _max_pool(op: Operation) -> Placed:
    return batched(op, [op["self"]], _spatial(op.name))


@rule(
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool3d "
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa"
)
def _average_pool(op: Operation) -> Placed:
    source = op["self"] if "self" in op.arguments else op["input"]
    return along(op, source, _last(source, _spatial(op.name)))


def _last(operand: Operand, count: int) -> range:
    return range(operand.rank - count, operand.rank)


@rule(
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
    "adaptive_max_pool2d_backward adaptive_max_pool3d_backward"
)
def _max_pool_gradient(op: Operation) -> Placed:
    operands = [op["grad_output"], op["self"], op["indices"]]
    return linear_batched(op, operands, _spatial(op.name))


@rule(
    "avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward "
    "_adaptive_avg_pool3d_backward adaptive_avg_pool3d_backward"
)
def _average_pool_gradient(op: Operation) -> Placed:
    # Only the shape of the source is used.
    return linear_batched(op, [op["grad_output"]], _spatial(op.name))


@rule(
    "upsample_linear1d_backward upsample_bilinear2d_backward "
    "upsample_bicubic2d_backward upsample_trilinear3d_backward "
    "upsample_nearest1d_backward upsample_nearest2d_backward "
    "upsample_nearest3d_backward _upsample_nearest_exact1d_backward "
    "_upsample_nearest_exact2d_backward _upsample_nearest_exact3d_backward "
    "_upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward "
    "_upsample_lanczos2d_aa_backward",
    sizes=["input_size"],
)
def _upsample_gradient(op: Operation) -> Placed:
    gradient = op["grad_output"]
    return along(op, gradient, _last(gradient, _spatial(op.name)))


@rule("grid_sampler_2d grid_sampler_3d")
def _grid_sample(op: Operation) -> Placed:
    operands = [op["input"], op["grid"]]
    require_plain(op["grid"].placed)
    return linear_batched(op, operands, op["input"].rank - 1)


@rule("grid_sampler_2d_backward grid_sampler_3d_backward")
def _grid_sample_gradient(op: Operation) -> Placed:
    operands = [op["grad_output"], op["input"], op["grid"]]
    return linear_batched(op, operands, op["input"].rank - 1)


@rule("affine_grid_generator", sizes=["size"])
def _affine_grid(op: Operation) -> Placed:
    return linear_batched(op, [op["theta"]], 2)


@rule("affine_grid_generator_backward", sizes=["size"])
def _affine_grid_gradient(op: Operation) -> Placed:
    gradient = op["grad"]
    return linear_batched(op, [gradient], gradient.rank - 1)


@rule("_ctc_loss")
def _ctc_loss(op: Operation) -> Sequence[Placed]:
    """Logits have positions first; one loss for each row of targets."""
    logits, targets = op["log_probs"], op["targets"]
    for operand in op.operands:
        require_plain(operand.placed)
    if not logits.placed.is_rows:
        raise MixesRows("of rows with other rows")
    if (logits.placed.axis, targets.rank) != (1, 2):
        raise MixesRows("along the rows")
    for operand in tensors(op, "log_probs"):
        if operand.placed != targets.placed or operand.placed.axis:
            raise MixesRows("of rows with other rows")
    if targets.placed.layout != logits.placed.layout:
        raise MixesRows("of rows with other rows")
    found = targets.placed.changed(is_zero=False)
    return [found, found]


@rule("_ctc_loss_backward")
def _ctc_loss_gradient(op: Operation) -> Placed:
    """The gradient of the logits, linear in that of the losses."""
    logits, gradient = op["log_probs"], op["grad"]
    others = tensors(op, "grad")
    for operand in others:
        require_plain(operand.placed)
    layouts = {operand.placed.layout for operand in op.operands}
    if not all(operand.placed.is_rows for operand in op.operands) or len(layouts) > 1:
        raise MixesRows("of rows with other rows")
    if any(o.placed.axis != (1 if o is logits else 0) for o in op.operands):
        raise MixesRows("along the rows")
    return logits.placed.changed(power=gradient.placed.power)  # type: ignore


# Linear algebra: matrices are the last two axes.


@rule(
    "linalg_cholesky_ex linalg_inv_ex linalg_qr _linalg_svd _linalg_eigh _linalg_det "
    "_linalg_slogdet linalg_lu linalg_lu_factor_ex linalg_eig linalg_eigvals "
    "cholesky cholesky_inverse geqrf linalg_householder_product linalg_ldl_factor_ex"
)
def _factorization(op: Operation) -> Placed:
    source = op.operands[0]
    return batched(op, op.operands, 2).at(source.placed.axis)


@rule(
    "linalg_solve_triangular _linalg_solve_ex triangular_solve cholesky_solve "
    "linalg_lu_solve"
)
def _solve(op: Operation) -> Placed:
    """Solutions for right sides that are vectors or matrices."""
    ranks = {operand.rank for operand in op.operands}
    if len(ranks) == 1:
        return batched(op, op.operands, 2)
    if any(o.placed.is_rows and o.placed.axis for o in op.operands):
        raise MixesRows("along the rows")
    return batched(op, op.operands, min(ranks) - 1)


@rule("linalg_lstsq")
def _least_squares(op: Operation) -> Sequence[Placed]:
    """Solutions, residuals, ranks and singular values; right sides are columns."""
    matrices, sides = op["self"], op["b"]
    require_plain(matrices.placed)
    if matrices.placed.is_same and sides.placed.is_rows:
        if sides.placed.axis != sides.rank - 1 or matrices.rank != 2:
            raise MixesRows("along the rows")
        return [sides.placed.changed(is_zero=False), SAME, SAME, SAME]
    found = batched(op, [matrices, sides], 2)
    return [found, SAME, found, SAME]


@rule("linalg_pinv")
def _pseudo_inverse(op: Operation) -> Placed:
    op.require_equal("atol", "rtol", "rcond")
    return batched(op, [op["self"]], 2)


@rule("lu_unpack")
def _unpacked_factors(op: Operation) -> Placed:
    factors, pivots = op["LU_data"], op["LU_pivots"]
    batched(op, [pivots], 1)
    if factors.placed.is_rows and factors.placed != pivots.placed:
        raise MixesRows("of rows with other rows")
    return batched(op, [factors], 2)


@rule("linalg_cross")
def _cross(op: Operation) -> Placed:
    """Linear in each of its operands."""
    axis = op.axis("dim", op.rank)
    for operand in op.operands:
        along(op, operand, [axis])
    return combined(op, "multiply", op.operands)


@rule("_fft_r2c _fft_c2c _fft_c2r")
def _fourier(op: Operation) -> Placed:
    source = op["self"]
    return along(op, source, op.axes("dim", source.rank))
