"""Functions of the last axes, and of batches: images, convolutions, attention."""

from __future__ import annotations

from dataclasses import replace

from keras_strategies.rows.placed import Placed, joined, mixed, not_along
from keras_strategies.rows.propagation import Rule, Step, rule


def _of_last(count: int) -> Rule:
    """A function of the last axes, for each place of those before."""

    def apply(step: Step) -> Placed:
        leaves = step.leaves()
        placed = joined([(each, 0) for each, _ in leaves], 0)
        if not placed.is_rows:
            return placed
        ranks = {rank for each, rank in leaves if each.is_rows}
        if min(ranks) - count <= placed.axis or len(ranks) > 1:
            return mixed("goes over all rows")
        return placed

    return apply


rule("FFT RFFT IRFFT STFT ExtractSequences ViewAsComplex ViewAsReal")(_of_last(1))
rule(
    """Cholesky CholeskyInverse Det Eig Eigh Inv LuFactor Qr Solve SolveTriangular SVD
    MatrixRank Pinv Logdet Slogdet FFT2 IFFT2 ISTFT Tril Triu CDist"""
)(_of_last(2))


def _of_batch(rank: int, others_have_rows: bool = False) -> Rule:
    """A function of each entry of the first axis.

    Args:
        rank: int, the axes of a batch; with fewer, the first is no batch axis.
        others_have_rows: bool, whether other arguments may have an entry for each
            entry, too; they are the same for all otherwise, as kernels.
    """

    def apply(step: Step) -> Placed:
        leaves = step.leaves()
        placed = joined([(each, 0) for each, _ in leaves], 0)
        if not placed.is_rows:
            return placed
        if placed.axis != 0 or leaves[0][1] < rank:
            return mixed("takes the rows for another axis")
        of_others = not others_have_rows and any(p.is_rows for p, _ in leaves[1:])
        if of_others or not leaves[0][0].is_rows:
            return mixed("has another kernel for each row")
        return placed

    return apply


rule(
    """MaxPool AveragePool AdaptiveMaxPool AdaptiveAveragePool Fold Conv DepthwiseConv
    SeparableConv ConvTranspose"""
)(_of_batch(3))
rule("CTCLoss")(_of_batch(2, others_have_rows=True))
rule(
    """Resize ExtractPatches PadImages CropImages RGBToHSV HSVToRGB RGBToGrayscale
    GaussianBlur SobelEdges Unfold DepthToSpace SpaceToDepth"""
)(_of_batch(4))
rule("AffineTransform PerspectiveTransform SSIM")(_of_batch(4, others_have_rows=True))


@rule("CTCDecode")
def _decoded(step: Step) -> list[Placed]:
    placed = _of_batch(3, others_have_rows=True)(step)
    return [placed.at(1), placed]


@rule("ScaleAndTranslate")
def _scaled(step: Step) -> Placed:
    placed = step.placed("images", "scale", "translation")
    found = joined([(each, 0) for each in placed], 0)
    if found.is_rows and not all(each.is_constant for each in placed[1:]):
        return mixed("is scaled by rows")
    return not_along(found, list(step.attribute("spatial_dims")), step.rank("images"))


@rule("DotProductAttention")
def _attention(step: Step) -> Placed:
    leaves = step.leaves("query", "key", "value")
    more = step.leaves("bias") + step.leaves("mask") + step.leaves("scale")
    if any(each.is_rows and rank < 4 for each, rank in leaves + more):
        return mixed("has arguments of fewer axes")
    placed = joined([(each, 0) for each, _ in leaves + more], 0)
    if placed.is_rows and not all(each.is_rows for each, _ in leaves):
        return mixed("attends with constants")
    return mixed("attends to other rows") if placed.axis else placed


@rule("Lstsq")
def _least_squares(step: Step) -> Placed:
    (a,), (b,) = step.placed("a"), step.placed("b")
    if a.is_constant and b.is_rows and b.axis == 1 and not b.power:
        return replace(b, axis=step.out_rank - 1)
    if a.is_rows or b.is_rows:
        return mixed("fits rows")
    return joined([(a, 0), (b, 0)], 0)


@rule("MapCoordinates Diag Diagflat Vander Correlate Meshgrid Bincount")
@rule("Linspace Logspace Geomspace Arange Full UnravelIndex ElasticTransform")
def _of_one_row(step: Step) -> Placed:
    """Without a batch: in the body of a map over rows, or of what has no rows."""
    placed = joined([(each, 0) for each, _ in step.leaves()], 0)
    if placed.is_rows:
        return mixed("takes the rows for another axis")
    return placed
