"""Results of a layer call: unsplit, and joined from parts by their placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_strategies.rows.row_placements import (
    ROWS,
    SAME,
    RowKind,
    RowPlacement,
    RowProof,
)
from row_proofs.row_case import SIZES


@dataclass
class Numbers:
    """Arrays: outputs, losses, weights after the call, and gradients.

    The gradients are those of the sum of all outputs and losses, with factors.
    """

    outputs: list[Any]
    losses: list[Any]
    weights: list[Any]
    argument_gradients: list[Any]
    weight_gradients: list[Any]


def factors_of(outputs: Sequence[Any]) -> list[Any]:
    """Factors of the outputs, for which gradients are computed."""
    random = np.random.default_rng(11)
    return [random.normal(size=np.shape(output)) for output in outputs]


def numbers(
    layer: Any,
    values: Sequence[Any],
    losses: int,
    factors: Sequence[Any] | None = None,
    loss_factors: Sequence[float] | None = None,
) -> Numbers:
    """Calls a layer, and restores its weights.

    Args:
        layer: the layer.
        values: arrays, the arguments.
        losses: int, how many losses the call adds.
        factors: a factor for each output; None for `factors_of`.
        loss_factors: one for each loss; None for ones.
    """
    before = [np.copy(v) for v in map(keras.ops.convert_to_numpy, layer.variables)]
    trained = [v for v in layer.trainable_variables if "float" in str(v.dtype)]
    leaves: dict[str, Any] = {}

    def objective(tensors: list[Any]) -> Any:
        outputs = keras.tree.flatten(layer(*tensors, training=True))
        leaves["outputs"] = [o for o in outputs if keras.ops.is_tensor(o)]
        leaves["losses"] = list(layer.losses)[:losses]
        weights = factors or factors_of(leaves["outputs"])
        terms = [
            keras.ops.sum(output * keras.ops.convert_to_tensor(factor, output.dtype))
            for output, factor in zip(leaves["outputs"], weights, strict=True)
            if _is_float(output)
        ]
        terms += [
            keras.ops.cast(keras.ops.sum(loss), "float32") * factor
            for loss, factor in zip(
                leaves["losses"], loss_factors or [1.0] * losses, strict=True
            )
        ]
        return sum(keras.ops.cast(term, "float32") for term in terms)

    of_arguments, of_weights = _gradients(objective, values, trained)
    after = [np.copy(v) for v in map(keras.ops.convert_to_numpy, layer.variables)]
    for variable, value in zip(layer.variables, before, strict=True):
        variable.assign(value)
    return Numbers(
        [keras.ops.convert_to_numpy(each) for each in leaves["outputs"]],
        [keras.ops.convert_to_numpy(each) for each in leaves["losses"]],
        after,
        of_arguments,
        of_weights,
    )


def _is_float(tensor: Any) -> bool:
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return bool(keras.backend.is_float_dtype(dtype))


def _gradients(
    objective: Any, values: Sequence[Any], trained: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    tensors = [keras.ops.convert_to_tensor(value) for value in values]
    is_float = [np.issubdtype(np.asarray(value).dtype, np.floating) for value in values]
    floats = [t for t, own in zip(tensors, is_float, strict=True) if own]
    if keras.backend.backend() == "torch":
        return _torch_gradients(objective, tensors, floats, trained)
    import tensorflow as tf

    with tf.GradientTape() as tape:
        tape.watch(floats)
        total = objective(tensors)
    sources = [*floats, *(variable.value for variable in trained)]
    found = (
        tape.gradient(total, sources) if tf.is_tensor(total) else [None] * len(sources)
    )
    arrays = [None if g is None else tf.convert_to_tensor(g).numpy() for g in found]
    return arrays[: len(floats)], arrays[len(floats) :]


def _torch_gradients(
    objective: Any, tensors: list[Any], floats: list[Any], trained: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    import torch

    for tensor in floats:
        tensor.requires_grad_(True)
    total = objective(tensors)
    sources = [*floats, *(variable.value for variable in trained)]
    if not torch.is_tensor(total) or not total.requires_grad:
        return [None] * len(floats), [None] * len(trained)
    found = torch.autograd.grad(total, sources, allow_unused=True)
    arrays = [None if g is None else g.detach().numpy() for g in found]
    return arrays[: len(floats)], arrays[len(floats) :]


def split_numbers(
    layer: Any,
    values: Sequence[Any],
    has_rows: Sequence[bool],
    sizes: Sequence[int],
    proof: RowProof,
) -> Numbers:
    """The results joined from parts, as the placements of a proof say."""
    total = sum(sizes)
    placed = [each for each in proof.outputs if each is not None]
    count = len(proof.losses)
    loss_kinds = [each.kind for each in proof.losses]
    ends = np.cumsum(sizes)
    # Factors of the unsplit outputs, of which parts get their shares.
    unsplit = numbers(layer, values, count)
    every = factors_of(unsplit.outputs)
    parts = []
    for size, end in zip(sizes, ends, strict=True):
        own = [
            value[end - size : end] if rows else value
            for value, rows in zip(values, has_rows, strict=True)
        ]
        factors = [
            _share(factor, placement, end - size, end, size / total)
            for factor, placement in zip(every, placed, strict=True)
        ]
        of_losses = [
            1.0 if kind is RowKind.SUM else size / total for kind in loss_kinds
        ]
        parts.append(numbers(layer, own, count, factors, of_losses))
    fractions = [size / total for size in sizes]

    def joined(name: str, placements: Sequence[RowPlacement]) -> list[Any]:
        columns = zip(*(getattr(part, name) for part in parts), strict=True)
        return [
            _joined(column, placement, fractions)
            for column, placement in zip(columns, placements, strict=True)
        ]

    floats = [
        rows
        for value, rows in zip(values, has_rows, strict=True)
        if np.issubdtype(value.dtype, np.floating)
    ]
    total_sum = RowPlacement(RowKind.SUM)
    return Numbers(
        joined("outputs", placed),
        joined("losses", proof.losses),
        joined("weights", [proof.of_update(v) or SAME for v in layer.variables]),
        joined("argument_gradients", [ROWS if rows else total_sum for rows in floats]),
        joined("weight_gradients", [total_sum] * len(parts[0].weight_gradients)),
    )


def _share(
    factor: Any, placement: RowPlacement, start: int, end: int, fraction: float
) -> Any:
    if placement.kind is RowKind.ROWS:
        return factor[start * placement.multiple : end * placement.multiple]
    return factor if placement.kind is RowKind.SUM else factor * fraction


def _joined(
    column: Sequence[Any], placement: RowPlacement, fractions: Sequence[float]
) -> Any:
    if any(each is None for each in column):
        assert all(each is None for each in column)
        return None
    if placement.kind is RowKind.ROWS:
        return np.concatenate(column)
    if placement.kind is RowKind.SUM:
        return np.sum(column, axis=0)
    if placement.kind is RowKind.MEAN:
        return sum(a * f for a, f in zip(column, fractions, strict=True))
    return column[0]


def assert_equal(expected: Numbers, found: Numbers, tolerance: float = 1e-4) -> None:
    for name in vars(expected):
        pairs = zip(getattr(expected, name), getattr(found, name), strict=True)
        for i, (one, other) in enumerate(pairs):
            if one is None or other is None:
                assert one is other, f"{name} {i}"
                continue
            np.testing.assert_allclose(
                np.asarray(other, "float64"),
                np.asarray(one, "float64"),
                rtol=tolerance,
                atol=tolerance * max(1.0, float(np.abs(one).max(initial=0.0))),
                err_msg=f"{name} {i}",
            )


def assert_parts_equal(
    layer: Any,
    values: Sequence[Any],
    proof: RowProof,
    has_rows: Sequence[bool] = (True,),
    sizes: Sequence[int] = SIZES,
) -> None:
    """Fails if the results joined from parts are not those of the unsplit call."""
    expected = numbers(layer, values, len(proof.losses))
    assert_equal(expected, split_numbers(layer, values, has_rows, sizes, proof))
