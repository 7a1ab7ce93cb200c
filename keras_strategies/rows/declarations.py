"""Layers of which the author says that each row of a result depends on its row only."""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from keras_strategies.keras_compat.symbolic_backend import current_tracer

_Declared = TypeVar("_Declared")

#: What can be called, and is no function of tensors alone.
_OBJECTS = (keras.losses.Loss, keras.metrics.Metric, keras.KerasTensor)
#: Classes, layers and functions.
_declared: weakref.WeakSet[Any] = weakref.WeakSet()


def row_wise(layer: _Declared) -> _Declared:
    """Declares that each row of the results depends only on its row of the arguments.

    On Torch and TensorFlow replicas call a layer, each on its rows, where operations of
    Keras in it allow that. Code of the framework itself (`torch.*`, `tf.*`) is not
    known; such a layer runs on one device with all rows. A declared layer is split:
    that its results are those of one device is then its author's word.

    The declaration says that axis 0 of each output has one entry for each row of the
    arguments, that losses it adds and values it assigns to variables are means over
    rows, and that code of the framework in it reads variables by `variable.value`.

    A declared layer is called with a few rows at first, at once and in two parts. If
    the results differ by more than 1e-3 of the largest value it is not split, with a
    warning. In a program of TensorFlow, and in another layer, the rows are random. A
    layer that draws random numbers by `keras.random.SeedGenerator` is compared with
    `training=False`, and not at all if its `call` takes no `training`; its draws have
    to be in code that Keras can trace. Other random numbers are not split. On Torch a
    layer whose weights are in shards cannot be compared so, and is not split.

    A declared function is one operation in the call around it: in a layer, as an
    `activation=`, in a `Lambda`, or as a loss that returns one value for each row. It
    is compared with random rows, and may neither draw random numbers nor assign
    variables. A declared `collate_fn` of a `DataLoader` makes row i of a batch from
    sample i only, so that each worker reads its own samples.

    On JAX nothing is split by calls, and a declaration changes nothing.

    Args:
        layer: a subclass of `keras.layers.Layer`, for all its instances and those of
            subclasses that define no `call` of their own; a layer, before its first
            call under a strategy; or a function of tensors, among others the `call` of
            a loss.

    Returns:
        `layer`, or a function with its name that calls it, so that it is a decorator of
        classes and functions.

    Raises:
        TypeError: if `layer` is another object, such as a loss or metric.

    Example:

    >>> @ks.row_wise
    ... class Norm(keras.layers.Layer):
    ...     def call(self, x):
    ...         return torch.nn.functional.normalize(x, dim=-1)
    """
    is_class = isinstance(layer, type) and issubclass(layer, keras.layers.Layer)
    if is_class or isinstance(layer, keras.layers.Layer):
        _declared.add(layer)
    elif callable(layer) and not isinstance(layer, (type, *_OBJECTS)):
        return _declared_function(layer)
    else:
        raise TypeError(
            "`ks.row_wise` takes a subclass of `keras.layers.Layer` or a function, as "
            f"a decorator, or a layer; found {layer!r}. Declare the function that a "
            "loss calls."
        )
    return layer


class _FunctionLayer(keras.layers.Layer):  # type: ignore[misc]
    """A declared function in the place of a layer."""

    def __init__(self, function: Callable[..., Any]):
        name = getattr(function, "__name__", type(function).__name__)
        super().__init__(name=re.sub(r"\W", "", name) or None)
        self.call = function
        self.built = True


def _declared_function(function: Any) -> Any:
    layer = _FunctionLayer(function)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        tracer = current_tracer()
        if tracer is None or not tracer.has_tensors((args, kwargs)):
            return function(*args, **kwargs)
        return tracer.declared_call(layer, *tracer.values((args, kwargs)))

    _declared.add(call)
    return call


def is_declared_function(function: Any) -> bool:
    """Whether a function is one that `row_wise` has returned."""
    return isinstance(function, types.FunctionType) and function in _declared


def is_declared(layer: Any) -> bool:
    """Whether a layer is declared, by itself or by its class."""
    if layer in _declared:
        return True
    for kind in type(layer).__mro__:
        if kind in _declared:
            return True
        if "call" in vars(kind):
            return False
    return False
