"""Proofs of layer calls by the prover of the backend under test, and trainings."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_same, state_of

import keras_strategies as ks
from keras_strategies.rows.layer_calls import LayerCall, argument_leaves
from keras_strategies.rows.row_placements import RowPlacement, RowProof
from keras_strategies.rows.row_prover import RowProver
from row_proofs.case_layers import BATCH, SIZES, RowCase

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
        layer(*map(keras.ops.convert_to_tensor, values), training=True)
    return layer, values


def call_of(layer: Any, values: Sequence[Any], rows: int = BATCH) -> LayerCall:
    """The call `layer(*values, training=True)`."""
    tensors = tuple(map(keras.ops.convert_to_tensor, values))
    kwargs = {"training": True}
    leaves = argument_leaves(tensors, kwargs)
    return LayerCall(layer, layer.__call__, (tensors, kwargs), leaves, rows)


def proof_of(
    layer: Any,
    values: Sequence[Any],
    has_rows: Sequence[bool] = (True,),
    sizes: Sequence[int] = SIZES,
) -> RowProof:
    """The proof of a call of a built layer with arrays, of which some have rows.

    Without sizes, the rows of replicas, it is that of a program for any number of rows.
    """
    call = call_of(layer, values, sum(sizes) or BATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return prover().prove(call, [*has_rows, False], sizes)


def placed_updates(layer: Any, proof: RowProof) -> list[RowPlacement]:
    """Placements of the assigned values in the order of variables, without seeds."""
    own = [id(v) for v in layer.variables if "seed" not in v.path]
    return [proof.updates[each] for each in own if each in proof.updates]


def sequential(*parts: Any, columns: int = 6) -> keras.Model:
    return keras.Sequential([keras.Input((columns,)), *parts])


def compiled(
    make: Callable[[], Any], rate: float, loss: Any = "mse", **options: Any
) -> Callable[[], Any]:
    """What makes a model, and compiles it."""
    momentum = options.pop("momentum", 0.0)

    def made() -> Any:
        model = make()
        model.compile(keras.optimizers.SGD(rate, momentum), loss, **options)
        return model

    return made


def fits(x: Any, y: Any, batch_size: int, **options: Any) -> Callable[[Any], Any]:
    """What trains a model, with the rows in their order, and returns the history."""
    options = {"batch_size": batch_size, "shuffle": False, "verbose": 0, **options}
    return lambda model: model.fit(x, y, **options).history


def trained(
    make: Callable[[], Any], fit: Callable[[Any], Any], strategy: Any = None
) -> tuple[Any, list[str]]:
    """The history and state of a training, and its warnings of unsplit calls."""
    keras.utils.set_random_seed(3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with strategy.scope() if strategy else contextlib.nullcontext():
            model = make()
        found = {"history": as_arrays(fit(model)), **state_of(model)}
    return found, [str(w.message) for w in caught if "split by rows" in str(w.message)]


def assert_exact(
    make: Callable[[], Any],
    fit: Callable[[Any], Any],
    replicas: int = 2,
    tolerance: float = 2e-5,
) -> list[str]:
    """Fails if replicas train otherwise than one device; returns their warnings.

    The tolerance is relative to the largest magnitude of an array.
    """
    expected, _ = trained(make, fit, one_device())
    found, said = trained(make, fit, mirrored(replicas))
    assert_same(expected, found, tolerance, f"{replicas} replicas")
    return said
