"""Layer calls of the tables of row proofs, with the placements that proofs find."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from keras_strategies.rows.row_placements import ROWS, RowKind, RowPlacement

Function = Callable[..., Any]
Make = Callable[[], Any]
#: Arguments of `add_weight`.
STATE = {"shape": (), "initializer": "zeros", "trainable": False}
COUNT = {**STATE, "dtype": "int32"}


class Apply(layers.Layer):
    """A function of the inputs."""

    def __init__(self, function: Function, **options: Any):
        super().__init__(**options)
        self.function = function

    def call(self, *inputs: Any) -> Any:
        return self.function(*inputs)


class Held(Apply):
    """A function of an object, such as another layer, and of the inputs."""

    def __init__(self, held: Any, function: Function):
        super().__init__(function)
        self.held = held

    def call(self, *inputs: Any) -> Any:
        return self.function(self.held, *inputs)


class Own(Apply):
    """A function of the layer and its inputs; the first input where it returns None.

    It may have inner layers, and weights of shapes or with arguments of `add_weight`.
    """

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
    """Returns its input and adds a function of it as a loss."""
    return Own(lambda layer, x: layer.add_loss(function(x)))


def tracked(function: Function, shape: Any = ()) -> Own:
    """Assigns a function of its state and its input to the state."""

    def assign(layer: Own, x: Any) -> None:
        layer.state.assign(function(layer.state, x))

    return Own(assign, state={**STATE, "shape": shape})


class OwnModel(keras.Model):
    """A subclassed model of two layers of Keras's and other attributes.

    Its call and the loss of a step are functions of the model and of what they get.
    """

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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class RowCase:
    """A call of a layer with the placements that its proof finds, or a problem.

    Updates are those of values that the call assigns, in the order of the layer's
    variables without seeds; draws the entries of each draw for each row.
    """

    make: Make
    arguments: tuple[Argument, ...]
    outputs: tuple[RowPlacement | None, ...] = (ROWS,)
    losses: tuple[RowPlacement, ...] = ()
    updates: tuple[RowPlacement, ...] = ()
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


def multiple(count: int) -> tuple[RowPlacement]:
    return (RowPlacement(RowKind.ROWS, multiple=count),)


def integers(*shape: int) -> Argument:
    return Argument(shape, "int32")


def whole(*shape: int) -> Argument:
    """An argument without rows."""
    return Argument(shape, has_rows=False)


def row_count(x: Any) -> Any:
    return ops.cast(ops.shape(x)[0], FLOAT)
