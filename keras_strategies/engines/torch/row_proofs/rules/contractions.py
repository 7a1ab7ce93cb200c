"""Matrix products and convolutions: sums of products along axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_strategies.engines.torch.row_proofs.recorded_operation import (
    Operand,
    Operation,
)
from keras_strategies.engines.torch.row_proofs.rules.elementwise import combined
from keras_strategies.engines.torch.row_proofs.rules.registry import rule
from keras_strategies.engines.torch.row_proofs.value_placements import (
    SAME,
    SUM,
    MixesRows,
    Placed,
)
from keras_strategies.runtime.row_proofs.row_placements import RowKind


def contracted(
    operands: Sequence[Operand], labels: Sequence[str], result: str
) -> Placed:
    """The placement of a sum of products, axes labelled as in `einsum`.

    Args:
        operands: the two factors.
        labels: for each factor a letter for each axis.
        result: letters of the axes of the result; the others are summed over.
    """
    power = sum(operand.placed.power for operand in operands)
    sums = [operand for operand in operands if operand.placed.is_sum]
    if sums:
        if len(sums) == 1 and all(o.placed.is_same for o in operands if o not in sums):
            return SUM.changed(power=power)
        raise MixesRows("of a sum over rows")
    found: Placed | None = None
    letter = ""
    for operand, own in zip(operands, labels, strict=True):
        placed = operand.placed
        if not placed.is_rows:
            continue
        if found is not None and (
            own[placed.axis] != letter or placed.layout != found.layout
        ):
            raise MixesRows("of rows with other rows")
        found, letter = placed, own[placed.axis]
    if found is None:
        return Placed(RowKind.SAME, power=power)
    for operand, own in zip(operands, labels, strict=True):
        if operand.placed.is_same and letter in own:
            if operand.size(own.index(letter)) != 1:
                raise MixesRows("of rows with a constant that has as many")
            # It broadcasts along the axis, which is then not summed over.
            if letter not in result:
                raise MixesRows("of rows with a constant that has as many")
    if letter not in result:
        return SUM.changed(power=power)
    return found.changed(axis=result.index(letter), power=power, is_zero=False)


def _plus(op: Operation, product: Placed, power: int, bias: Operand | None) -> Placed:
    """A product, times a number of a power of the rows, plus a bias."""
    product = product.changed(power=product.power + power)
    if bias is None:
        return product
    return combined(op, "add", [Operand(product, op.shapes), bias])


_FACTORS: dict[str, tuple[str, str, str, str, str]] = {
    "mm": ("self", "mat2", "ik", "kj", "ij"),
    "bmm": ("self", "mat2", "bik", "bkj", "bij"),
    "mv": ("self", "vec", "ik", "k", "i"),
    "dot": ("self", "tensor", "k", "k", ""),
    "vdot": ("self", "other", "k", "k", ""),
    "addmm": ("mat1", "mat2", "ik", "kj", "ij"),
    "baddbmm": ("batch1", "batch2", "bik", "bkj", "bij"),
    "addbmm": ("batch1", "batch2", "bik", "bkj", "ij"),
    "addmv": ("mat", "vec", "ik", "k", "i"),
    "addr": ("vec1", "vec2", "i", "j", "ij"),
    "outer": ("self", "vec2", "i", "j", "ij"),
}


@rule(" ".join(_FACTORS), sizes=["alpha", "beta"])
def _product(op: Operation) -> Placed:
    one, other, of_one, of_other, result = _FACTORS[op.name]
    product = contracted([op[one], op[other]], [of_one, of_other], result)
    if "beta" not in op.arguments:
        return product
    bias, beta = op["self"], op.of_number(op["beta"]).placed
    alpha = op.of_number(op["alpha"]).placed
    if beta.is_zero:
        return _plus(op, product, alpha.power, None)
    scaled = bias.placed.changed(power=bias.placed.power + beta.power)
    return _plus(op, product, alpha.power, Operand(scaled, bias.shapes))


@rule("linear")
def _linear(op: Operation) -> Placed:
    source, weight = op["input"], op["weight"]
    batch = "abcdefgh"[: source.rank - 1]
    product = contracted([source, weight], [batch + "k", "jk"], batch + "j")
    return _plus(op, product, 0, op.get("bias"))


_IMAGE, _KERNEL = "nxyzw", "oiklm"


def _require_images(*operands: Operand) -> None:
    for operand in operands:
        if operand.placed.is_rows and operand.placed.axis:
            raise MixesRows("of rows that are not the first axis")


def _filtered(images: Operand, kernel: Operand) -> Placed:
    if kernel.placed.is_rows:
        raise MixesRows("with rows as its kernel")
    labels = [_IMAGE[: images.rank], _KERNEL[: kernel.rank]]
    return contracted([images, kernel], labels, "n")


@rule("convolution _convolution")
def _convolution(op: Operation) -> Placed:
    source, bias = op["input"], op.get("bias")
    _require_images(source)
    product = _filtered(source, op["weight"])
    if bias is None:
        return product
    shapes = tuple((*shape, *[1] * (op.rank - 2)) for shape in bias.shapes)
    return _plus(op, product, 0, Operand(bias.placed, shapes))


@rule("convolution_backward")
def _convolution_gradient(op: Operation) -> Sequence[Placed]:
    gradient, source = op["grad_output"], op["input"]
    _require_images(gradient, source)
    labels = [_IMAGE[: gradient.rank], _IMAGE[: source.rank]]
    is_rows = gradient.placed.is_rows
    return [
        _filtered(gradient, op["weight"]),
        contracted([gradient, source], labels, ""),
        SUM.changed(power=gradient.placed.power) if is_rows else gradient.placed,
    ]


# Attention: rows are axes before those of positions and features.

_QUERIES = ("query", "key", "value")


def _attention_operands(op: Operation) -> list[Operand]:
    return [op[name] for name in _QUERIES]


def _attention(op: Operation, operands: Sequence[Any]) -> Placed:
    """The one placement of queries, keys and values along axes of the batch."""
    first = next((o.placed for o in operands if o.placed.is_rows), None)
    for operand in operands:
        placed = operand.placed
        if not (placed.is_same or placed.is_rows):
            raise MixesRows("of a sum over rows")
        if first is None:
            continue
        if not placed.is_rows or (placed.axis, placed.layout) != (
            first.axis,
            first.layout,
        ):
            raise MixesRows("of rows with other rows")
        if placed.axis >= operand.rank - 2:
            raise MixesRows("along the rows")
    return Placed(RowKind.SAME) if first is None else first.changed(power=0)


def _require_mask(op: Operation, placed: Placed, rank: int, mask: Any) -> None:
    if not isinstance(mask, Operand):
        return
    if mask.placed.power or mask.placed.is_sum:
        raise MixesRows("with a mask of the number of rows")
    own = placed.axis - (rank - mask.rank)
    if mask.placed.is_rows:
        is_alike = placed.is_rows and mask.placed.layout == placed.layout
        if not is_alike or mask.placed.axis != own:
            raise MixesRows("of rows with other rows")
    elif placed.is_rows and own >= 0 and mask.size(own) != 1:
        raise MixesRows("of rows with a constant that has as many")


@rule(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_attention_math "
    "_scaled_dot_product_fused_attention_overrideable"
)
def _fused_attention(op: Operation) -> Sequence[Placed]:
    operands = _attention_operands(op)
    if any(operand.placed.power for operand in operands):
        raise MixesRows("with the number of rows")
    placed = _attention(op, operands)
    mask = op.get("attn_mask") if "attn_mask" in op.arguments else op.get("attn_bias")
    _require_mask(op, placed, operands[0].rank, mask)
    return [
        # Random states have no rows.
        placed if shapes is not None and len(shapes[0]) > placed.axis else SAME
        for shapes in op.results
    ]


@rule(
    "_scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention_backward "
    "_scaled_dot_product_fused_attention_overrideable_backward"
)
def _fused_attention_gradient(op: Operation) -> Placed:
    gradient = op["grad_out"] if "grad_out" in op.arguments else op["grad_out_"]
    operands = _attention_operands(op)
    if any(operand.placed.power for operand in operands):
        raise MixesRows("with the number of rows")
    placed = _attention(op, [gradient, *operands])
    mask = op.get("attn_mask") if "attn_mask" in op.arguments else op.get("attn_bias")
    _require_mask(op, placed, operands[0].rank, mask)
    return placed.changed(power=gradient.placed.power)
