"""Results of a layer call: unsplit, and joined from parts by their placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_strategies.rows.row_placements import (
    ROWS,
    SAME,
    SUM,
    RowKind,
    RowPlacement,
    RowProof,
)
from row_proofs.case_layers import SIZES


@dataclass
class Numbers:
    """Arrays; gradients are those of the sum of outputs and losses, with factors."""

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
    """Calls a layer, which adds some number of losses, and restores its weights.

    Without factors, those of outputs are `factors_of`, and those of losses one.
    """
    before = _arrays(layer.variables)
    trained = [v for v in layer.trainable_variables if "float" in str(v.dtype)]
    found: dict[str, Any] = {}

    def objective(tensors: list[Any]) -> Any:
        leaves = keras.tree.flatten(layer(*tensors, training=True))
        outputs = found["outputs"] = [o for o in leaves if ops.is_tensor(o)]
        found["losses"] = list(layer.losses)[:losses]
        pairs = zip(outputs, factors or factors_of(outputs), strict=True)
        terms = [
            ops.sum(output * ops.convert_to_tensor(factor, output.dtype))
            for output, factor in pairs
            if "float" in keras.backend.standardize_dtype(output.dtype)
        ]
        pairs = zip(found["losses"], loss_factors or [1.0] * losses, strict=True)
        terms += [ops.cast(ops.sum(loss), "float32") * factor for loss, factor in pairs]
        return sum(ops.cast(term, "float32") for term in terms)

    gradients = _gradients(objective, values, trained)
    after = _arrays(layer.variables)
    for variable, value in zip(layer.variables, before, strict=True):
        variable.assign(value)
    results = _arrays(found["outputs"]), _arrays(found["losses"])
    return Numbers(*results, after, *gradients)


def _arrays(tensors: Sequence[Any]) -> list[Any]:
    return [np.copy(ops.convert_to_numpy(each)) for each in tensors]


def _gradients(
    objective: Any, values: Sequence[Any], trained: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Arrays of the gradients of float arguments and of variables, or None."""
    tensors = [ops.convert_to_tensor(value) for value in values]
    pairs = zip(tensors, values, strict=True)
    floats = [t for t, v in pairs if np.issubdtype(np.asarray(v).dtype, np.floating)]
    sources = [*floats, *(variable.value for variable in trained)]
    found: Sequence[Any] = [None] * len(sources)
    if keras.backend.backend() == "torch":
        import torch

        for tensor in floats:
            tensor.requires_grad_(True)
        total = objective(tensors)
        if torch.is_tensor(total) and total.requires_grad:
            found = torch.autograd.grad(total, sources, allow_unused=True)
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(floats)
            total = objective(tensors)
        if tf.is_tensor(total):
            found = tape.gradient(total, sources)
    arrays = [None if each is None else ops.convert_to_numpy(each) for each in found]
    return arrays[: len(floats)], arrays[len(floats) :]


def split_numbers(
    layer: Any,
    values: Sequence[Any],
    has_rows: Sequence[bool],
    sizes: Sequence[int],
    proof: RowProof,
) -> Numbers:
    """The results joined from parts, as the placements of a proof say."""
    placed = [each for each in proof.outputs if each is not None]
    count = len(proof.losses)
    fractions = [size / sum(sizes) for size in sizes]
    # Factors of the unsplit outputs, of which parts get their shares.
    every = factors_of(numbers(layer, values, count).outputs)
    is_split = list(zip(values, has_rows, strict=True))
    parts = []
    for size, end, fraction in zip(sizes, np.cumsum(sizes), fractions, strict=True):
        own = [value[end - size : end] if rows else value for value, rows in is_split]
        factors = [
            _share(factor, placement, end - size, end, fraction)
            for factor, placement in zip(every, placed, strict=True)
        ]
        of_losses = [1.0 if p.kind is RowKind.SUM else fraction for p in proof.losses]
        parts.append(numbers(layer, own, count, factors, of_losses))

    def joined(name: str, placements: Sequence[RowPlacement]) -> list[Any]:
        columns = zip(*(getattr(part, name) for part in parts), strict=True)
        return [
            _joined(column, placement, fractions)
            for column, placement in zip(columns, placements, strict=True)
        ]

    floats = [rows for v, rows in is_split if np.issubdtype(v.dtype, np.floating)]
    return Numbers(
        joined("outputs", placed),
        joined("losses", proof.losses),
        joined("weights", [proof.of_update(v) or SAME for v in layer.variables]),
        joined("argument_gradients", [ROWS if rows else SUM for rows in floats]),
        joined("weight_gradients", [SUM] * len(parts[0].weight_gradients)),
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
            one, other = np.asarray(one, "float64"), np.asarray(other, "float64")
            atol = tolerance * max(1.0, float(np.abs(one).max(initial=0.0)))
            message = f"{name} {i}"
            np.testing.assert_allclose(other, one, tolerance, atol, err_msg=message)


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
