"""Cases, proofs of their calls, results joined from parts of calls, and trainings."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_same, state_of
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.rows.layer_calls import LayerCall, argument_leaves
from keras_strategies.rows.row_placements import ROWS, SAME, SUM, RowKind
from keras_strategies.rows.row_prover import RowProver

Function = Callable[..., Any]
Make = Callable[[], Any]
#: Arguments of `add_weight`.
STATE = {"shape": (), "initializer": "zeros", "trainable": False}
COUNT = {**STATE, "dtype": "int32"}


class Apply(layers.Layer):
    def __init__(self, function: Function, **options: Any):
        super().__init__(**options)
        self.function = function

    def call(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Held(Apply):
    def __init__(self, held: Any, function: Function):
        super().__init__(function)
        self.held = held

    def call(self, *inputs: Any) -> Any:
        return self.function(self.held, *inputs)


class Own(Apply):
    """A function of the layer and its inputs; the first input where it returns None."""

    def __init__(self, function: Function, inner: Any = None, **weights: Any):
        super().__init__(function, dtype=weights.pop("dtype", None))
        self.inner = inner
        for name, given in weights.items():
            options = given if isinstance(given, dict) else {"shape": given}
            setattr(self, name, self.add_weight(name=name, **options))

    def call(self, *inputs: Any) -> Any:
        found = self.function(self, *inputs)
        return inputs[0] if found is None else found


def add_loss(function: Function) -> Own:
    return Own(lambda layer, x: layer.add_loss(function(x)))


def tracked(function: Function, shape: Any = ()) -> Own:
    def assign(layer: Own, x: Any) -> None:
        layer.state.assign(function(layer.state, x))

    return Own(assign, state={**STATE, "shape": shape})


class OwnModel(keras.Model):
    """Its call and loss of a step are functions of the model and of what they get."""

    def __init__(self, own_call: Any = None, own_loss: Any = None, **parts: Any):
        super().__init__()
        self.own_call, self.own_loss = own_call, own_loss
        self.inner, self.head = layers.Dense(4), layers.Dense(1)
        self.inner.build((None, 4))
        self.head.build((None, 4))
        for name, part in parts.items():
            setattr(self, name, part)
        self.built = True

    def call(self, inputs: Any, given: Any = None) -> Any:
        if self.own_call is None:
            return self.head(self.inner(inputs))
        return self.own_call(self, inputs, *([] if given is None else [given]))

    def compute_loss(self, x: Any, y: Any, y_pred: Any, *_: Any, **__: Any) -> Any:
        return self.own_loss(self, x, y, y_pred)

    def compute_metrics(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {metric.name: metric.result() for metric in self.metrics}


def with_loss(use: Function, inner: Any, factor: float) -> Own:
    """A function of an inner layer and the input, whose mean square is a loss."""

    def call(layer: Own, x: Any) -> Any:
        found = use(layer.inner, x)
        layer.add_loss(factor * ops.mean(ops.square(found)))
        return found

    return Own(call, inner)


def experts(layer: Own, inputs: Any) -> Any:
    """Two experts that accept the first 100 rows, more than a small batch has."""
    chances = ops.softmax(ops.matmul(inputs, layer.router))
    chosen = ops.one_hot(ops.argmax(chances, axis=-1), 2)
    place = ops.cumsum(chosen, axis=0) * chosen
    kept = ops.where(place <= 100, chosen, 0.0) * chances
    return ops.einsum("re,rd,edf->rf", kept, inputs, layer.experts)


def codebook(layer: Own, inputs: Any) -> Any:
    """A vector quantizer with straight-through gradients, as in VQ-VAE."""
    distances = ops.sum(ops.square(inputs[:, None] - layer.codes[None]), -1)
    chosen = ops.take(layer.codes, ops.argmin(distances, axis=-1), axis=0)
    layer.add_loss(ops.mean(ops.square(ops.stop_gradient(chosen) - inputs)))
    layer.add_loss(0.25 * ops.mean(ops.square(chosen - ops.stop_gradient(inputs))))
    return inputs + ops.stop_gradient(chosen - inputs)


def doubled(gradient: Function) -> Function:
    """A product with a gradient of its input and output's gradient, for `ops`."""

    def function(x: Any) -> Any:
        def grad(*args: Any, upstream: Any = None) -> Any:
            return gradient(x, args[0] if upstream is None else upstream)

        return x * 2.0, grad

    return function


def with_gradient(gradient: Function) -> Function:
    function = doubled(gradient)
    # On TensorFlow a variable itself would need another signature.
    return lambda inputs: ops.custom_gradient(function)(inputs * 1.0)


#: Rows of the batch, and of each replica.
BATCH = 8
SIZES = (5, 3)
FLOAT = "float32"


@dataclasses.dataclass(frozen=True)
class Argument:
    """A positional argument of the call: its shape without rows, dtype, placement."""

    shape: tuple[int, ...]
    dtype: str = FLOAT
    has_rows: bool = True

    def value(self, rows: int, random: np.random.Generator) -> Any:
        shape = (rows, *self.shape) if self.has_rows else self.shape
        if self.dtype == FLOAT:
            return random.normal(size=shape).astype(FLOAT)
        if self.dtype == "string":
            return random.choice(["a", "b", "z"], shape).astype(object)
        return random.integers(0, 2 if self.dtype == "bool" else 4, shape, self.dtype)


@dataclasses.dataclass(frozen=True)
class RowCase:
    """A call with the placements that its proof finds, or a problem.

    Updates are in the order of variables; draws the entries of each draw for each row.
    """

    make: Make
    arguments: tuple[Argument, ...]
    outputs: tuple[Any, ...] = (ROWS,)
    losses: tuple[Any, ...] = ()
    updates: tuple[Any, ...] = ()
    problem: bool = False
    draws: tuple[int, ...] = ()

    @property
    def has_rows(self) -> list[bool]:
        return [argument.has_rows for argument in self.arguments]


def rows(make: Make, *shapes: Any, **expected: Any) -> RowCase:
    """A case of arguments, or of their shapes without rows; of six columns if none."""
    each = (s if isinstance(s, Argument) else Argument(s) for s in shapes or [(6,)])
    return RowCase(make, tuple(each), **expected)


def function(apply: Function, *shapes: Any, **expected: Any) -> RowCase:
    return rows(lambda: Apply(apply), *shapes, **expected)


mixing = functools.partial(rows, problem=True)
mixing_function = functools.partial(function, problem=True)


def multiple(count: int) -> tuple[Any]:
    return (dataclasses.replace(ROWS, multiple=count),)


def integers(*shape: int) -> Argument:
    return Argument(shape, "int32")


def whole(*shape: int) -> Argument:
    return Argument(shape, has_rows=False)


def row_count(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], FLOAT)


BACKEND = keras.backend.backend()
#: Backends on which layer calls are split; on JAX a step is one program.
SPLITS = ("tensorflow", "torch")
needs_split = pytest.mark.skipif(BACKEND not in SPLITS, reason="calls are not split")
of_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="of TensorFlow")


def normal(*shape: int, seed: int = 7) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def shifted(rows: int, factors: Any = 1.0) -> Any:
    """Six columns of normal numbers with means from -1 in the first row to 1."""
    means = np.linspace(-1, 1, rows, dtype="float32")[:, None]
    return normal(rows, 6, seed=3) * factors + means


def one_device() -> ks.OneDeviceStrategy:
    return ks.OneDeviceStrategy("cpu:0")


def mirrored(replicas: int = 2, **options: Any) -> ks.MirroredStrategy:
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], **options)


def prover() -> RowProver:
    strategy: Any = mirrored()
    # Keras has been hooked before a strategy proves anything.
    with strategy.scope():
        found = strategy.drivers.fit._call._row_proofs._prover
    assert isinstance(found, RowProver)
    return found


def built(case: RowCase, rows: int = BATCH) -> tuple[Any, list[Any]]:
    """The layer of a case, built, and the values of its arguments."""
    layer = case.make()
    random = np.random.default_rng(7)
    values = [argument.value(rows, random) for argument in case.arguments]
    # Keras warns of masks that a layer drops.
    with warnings.catch_warnings(action="ignore"):
        layer(*map(ops.convert_to_tensor, values), training=True)
    return layer, values


def call_of(layer: Any, values: Sequence[Any], rows: int = BATCH) -> LayerCall:
    """The call `layer(*values, training=True)`."""
    inputs = tuple(map(ops.convert_to_tensor, values)), {"training": True}
    return LayerCall(layer, layer.__call__, inputs, argument_leaves(*inputs), rows)


def proof_of(layer: Any, values: Any, has_rows: Any = (True,), sizes: Any = SIZES):
    """The proof of a call of a built layer with arrays, of which some have rows.

    Without sizes, the rows of replicas, it is that of a program for any number of rows.
    """
    call = call_of(layer, values, sum(sizes) or BATCH)
    with warnings.catch_warnings(action="ignore"):
        return prover().prove(call, [*has_rows, False], sizes)


def sequential(*parts: Any, columns: int = 6) -> keras.Model:
    return keras.Sequential([keras.Input((columns,)), *parts])


def compiled(make: Make, rate: float, loss: Any = "mse", **options: Any) -> Make:
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
    with warnings.catch_warnings(record=True, action="always") as caught:
        with strategy.scope():
            model = make()
        found = {"history": as_arrays(fit(model)), **state_of(model)}
    return found, [str(w.message) for w in caught if "split by rows" in str(w.message)]


def assert_exact(make: Make, fit: Any, replicas: int = 2, tolerance: Any = 2e-5) -> Any:
    """Fails if replicas train otherwise than one device; returns their warnings.

    The tolerance is relative to the largest magnitude of an array.
    """
    expected, _ = trained(make, fit, one_device())
    found, said = trained(make, fit, mirrored(replicas))
    assert_same(expected, found, tolerance, f"{replicas} replicas")
    return said


#: Arrays by what they are; gradients are of a sum of outputs and losses with factors.
Numbers = dict[str, list[Any]]


def factors_of(outputs: Sequence[Any]) -> list[Any]:
    random = np.random.default_rng(11)
    return [random.normal(size=np.shape(output)) for output in outputs]


def _arrays(tensors: Sequence[Any]) -> list[Any]:
    return [None if t is None else np.copy(ops.convert_to_numpy(t)) for t in tensors]


def numbers(layer: Any, values: Any, losses: int, *given: Any, call: Any = None) -> Any:
    """Calls a layer, which adds some number of losses, and restores its weights.

    Given are factors of outputs, by default those of `factors_of`, and of losses, by
    default one. Gradients are those of float arguments and of variables, or None.
    """
    factors, loss_factors = given or (None, [1.0] * losses)
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
        leaves = keras.tree.flatten((call or layer)(*tensors, training=True))
        outputs = [leaf for leaf in leaves if ops.is_tensor(leaf)]
        added = list(layer.losses)[:losses]
        pairs = zip(outputs, factors or factors_of(outputs), strict=True)
        each = ((o, ops.cast(f, o.dtype)) for o, f in pairs if is_float(o.dtype))
        terms = [ops.sum(output * factor) for output, factor in each]
        pairs = zip(added, loss_factors, strict=True)
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


def split_numbers(layer: Any, values: Any, has_rows: Any, sizes: Any, proof: Any):
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


def assert_parts_equal(layer, values, proof, has_rows=(True,), sizes=SIZES) -> None:
    """Fails if the results joined from parts are not those of the unsplit call."""
    expected = numbers(layer, values, len(proof.losses))
    assert_equal(expected, split_numbers(layer, values, has_rows, sizes, proof))
