"""Proofs of layer calls by the prover of the backend under test, and trainings.

Results of calls are compared: unsplit, and joined from parts by their placements.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_same, state_of
from keras import ops

import keras_strategies as ks
from keras_strategies.rows.layer_calls import LayerCall, argument_leaves
from keras_strategies.rows.row_placements import ROWS, SAME, SUM, RowKind, RowProof
from keras_strategies.rows.row_prover import RowProver
from row_proofs.case_layers import BATCH, SIZES, Function, Make, RowCase

BACKEND = keras.backend.backend()
#: Backends on which layer calls are split; on JAX a step is one program.
SPLITS = ("tensorflow", "torch")
needs_split = pytest.mark.skipif(BACKEND not in SPLITS, reason="calls are not split")
of_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")


def normal(*shape: int, seed: int = 7) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def one_device() -> ks.OneDeviceStrategy:
    return ks.OneDeviceStrategy("cpu:0")


def mirrored(replicas: int = 2, **options: Any) -> ks.MirroredStrategy:
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], **options)


def prover() -> RowProver:
    """The prover of a strategy on two devices."""
    strategy = mirrored()
    # Keras has been hooked before a strategy proves anything.
    with strategy.scope():
        call = strategy.drivers.fit._call
    found = call._row_proofs._prover
    assert isinstance(found, RowProver)
    return found


def built(case: RowCase, rows: int = BATCH) -> tuple[Any, list[Any]]:
    """The layer of a case, built, and the values of its arguments."""
    layer = case.make()
    random = np.random.default_rng(7)
    values = [argument.value(rows, random) for argument in case.arguments]
    with warnings.catch_warnings():
        # Of Keras, for masks that a layer drops.
        warnings.simplefilter("ignore")
        layer(*map(ops.convert_to_tensor, values), training=True)
    return layer, values


def call_of(layer: Any, values: Sequence[Any], rows: int = BATCH) -> LayerCall:
    """The call `layer(*values, training=True)`."""
    tensors = tuple(map(ops.convert_to_tensor, values))
    kwargs = {"training": True}
    leaves = argument_leaves(tensors, kwargs)
    return LayerCall(layer, layer.__call__, (tensors, kwargs), leaves, rows)


def proof_of(
    layer: Any, values: Any, has_rows: Any = (True,), sizes: Any = SIZES
) -> Any:
    """The proof of a call of a built layer with arrays, of which some have rows.

    Without sizes, the rows of replicas, it is that of a program for any number of rows.
    """
    call = call_of(layer, values, sum(sizes) or BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prover().prove(call, [*has_rows, False], sizes)


def sequential(*parts: Any, columns: int = 6) -> keras.Model:
    return keras.Sequential([keras.Input((columns,)), *parts])


def compiled(make: Make, rate: float, loss: Any = "mse", **options: Any) -> Make:
    """What makes a model, and compiles it."""
    momentum = options.pop("momentum", 0.0)

    def made() -> Any:
        model = make()
        model.compile(keras.optimizers.SGD(rate, momentum), loss, **options)
        return model

    return made


def fits(x: Any, y: Any, batch_size: int, **options: Any) -> Function:
    """What trains a model, with the rows in their order, and returns the history."""
    options = {"batch_size": batch_size, "shuffle": False, "verbose": 0, **options}
    return lambda model: model.fit(x, y, **options).history


def trained(make: Make, fit: Function, strategy: Any) -> tuple[Any, list[str]]:
    """The history and state of a training, and its warnings of unsplit calls."""
    keras.utils.set_random_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with strategy.scope():
            model = make()
        found = {"history": as_arrays(fit(model)), **state_of(model)}
    return found, [str(w.message) for w in caught if "split by rows" in str(w.message)]


def assert_exact(
    make: Make, fit: Function, replicas: int = 2, tolerance: float = 2e-5
) -> list[str]:
    """Fails if replicas train otherwise than one device; returns their warnings.

    The tolerance is relative to the largest magnitude of an array.
    """
    expected, _ = trained(make, fit, one_device())
    found, said = trained(make, fit, mirrored(replicas))
    assert_same(expected, found, tolerance, f"{replicas} replicas")
    return said


#: Arrays by what they are; gradients are those of the sum of outputs and losses, with
#: factors.
Numbers = dict[str, list[Any]]


def factors_of(outputs: Sequence[Any]) -> list[Any]:
    """Factors of the outputs, for which gradients are computed."""
    random = np.random.default_rng(11)
    return [random.normal(size=np.shape(output)) for output in outputs]


def _arrays(tensors: Sequence[Any]) -> list[Any]:
    return [None if t is None else np.copy(ops.convert_to_numpy(t)) for t in tensors]


def numbers(
    layer: Any, values: Any, losses: int, factors: Any = None, loss_factors: Any = None
) -> Numbers:
    """Calls a layer, which adds some number of losses, and restores its weights.

    Without factors, those of outputs are `factors_of`, and those of losses one.
    Gradients are those of float arguments and of variables, or None.
    """
    is_float = keras.backend.is_float_dtype
    before = _arrays(layer.variables)
    tensors = [ops.convert_to_tensor(value) for value in values]
    floats = [tensor for tensor in tensors if is_float(tensor.dtype)]
    trained = [v.value for v in layer.trainable_variables if is_float(v.dtype)]
    context: Any = contextlib.nullcontext()
    if BACKEND == "tensorflow":
        import tensorflow as tf

        context = tf.GradientTape()
    with context as tape:
        for tensor in floats:
            tape.watch(tensor) if tape else tensor.requires_grad_(True)
        leaves = keras.tree.flatten(layer(*tensors, training=True))
        outputs = [leaf for leaf in leaves if ops.is_tensor(leaf)]
        added = list(layer.losses)[:losses]
        pairs = zip(outputs, factors or factors_of(outputs), strict=True)
        terms = [
            ops.sum(o * ops.cast(f, o.dtype)) for o, f in pairs if is_float(o.dtype)
        ]
        pairs = zip(added, loss_factors or [1.0] * losses, strict=True)
        terms += [ops.cast(ops.sum(loss), "float32") * factor for loss, factor in pairs]
        total = sum(ops.cast(term, "float32") for term in terms)
    gradients: Sequence[Any] = [None] * len(floats + trained)
    if tape and ops.is_tensor(total):
        gradients = tape.gradient(total, floats + trained)
    elif getattr(total, "requires_grad", False):
        import torch

        gradients = torch.autograd.grad(total, floats + trained, allow_unused=True)
    after = _arrays(layer.variables)
    for variable, value in zip(layer.variables, before, strict=True):
        variable.assign(value)
    return {
        "outputs": _arrays(outputs),
        "losses": _arrays(added),
        "weights": after,
        "argument gradients": _arrays(gradients[: len(floats)]),
        "weight gradients": _arrays(gradients[len(floats) :]),
    }


def split_numbers(
    layer: Any, values: Any, has_rows: Any, sizes: Any, proof: RowProof
) -> Numbers:
    """The results joined from parts, as the placements of a proof say."""
    placed = [each for each in proof.outputs if each is not None]
    count, fractions = len(proof.losses), [size / sum(sizes) for size in sizes]
    # Factors of the unsplit outputs, of which parts get their shares.
    every = factors_of(numbers(layer, values, count)["outputs"])
    is_split = list(zip(values, has_rows, strict=True))
    parts = []
    for size, end, fraction in zip(sizes, np.cumsum(sizes), fractions, strict=True):
        start = end - size
        own = [value[start:end] if rows else value for value, rows in is_split]
        pairs = zip(every, placed, strict=True)
        factors = [_share(f, p, start, end, fraction) for f, p in pairs]
        of_losses = [1.0 if p.kind is RowKind.SUM else fraction for p in proof.losses]
        parts.append(numbers(layer, own, count, factors, of_losses))
    floats = [rows for v, rows in is_split if np.issubdtype(v.dtype, np.floating)]
    placements = {
        "outputs": placed,
        "losses": proof.losses,
        "weights": [proof.of_update(v) or SAME for v in layer.variables],
        "argument gradients": [ROWS if rows else SUM for rows in floats],
        "weight gradients": [SUM] * len(parts[0]["weight gradients"]),
    }
    joined = {}
    for name, each in placements.items():
        columns = zip(*(part[name] for part in parts), strict=True)
        pairs = zip(columns, each, strict=True)
        joined[name] = [_joined(column, kind, fractions) for column, kind in pairs]
    return joined


def _share(factor: Any, placement: Any, start: int, end: int, fraction: float) -> Any:
    if placement.kind is RowKind.ROWS:
        return factor[start * placement.multiple : end * placement.multiple]
    return factor if placement.kind is RowKind.SUM else factor * fraction


def _joined(column: Sequence[Any], placement: Any, fractions: Sequence[float]) -> Any:
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
    assert expected.keys() == found.keys()
    for name in expected:
        pairs = zip(expected[name], found[name], strict=True)
        for message, (one, other) in ((f"{name} {i}", p) for i, p in enumerate(pairs)):
            if one is None or other is None:
                assert one is other, message
                continue
            one, other = np.asarray(one, "float64"), np.asarray(other, "float64")
            atol = tolerance * max(1.0, float(np.abs(one).max(initial=0.0)))
            np.testing.assert_allclose(other, one, tolerance, atol, err_msg=message)


def assert_parts_equal(
    layer: Any,
    values: Any,
    proof: RowProof,
    has_rows: Any = (True,),
    sizes: Any = SIZES,
) -> None:
    """Fails if the results joined from parts are not those of the unsplit call."""
    expected = numbers(layer, values, len(proof.losses))
    assert_equal(expected, split_numbers(layer, values, has_rows, sizes, proof))
