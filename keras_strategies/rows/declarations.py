"""Layers of which the author says that each row of a result depends on its row only."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import keras

_Declared = TypeVar("_Declared")

_classes: weakref.WeakSet[Any] = weakref.WeakSet()
_layers: weakref.WeakSet[Any] = weakref.WeakSet()


def row_wise(layer: _Declared) -> _Declared:
    """Declares that each row of a layer's results depends only on its row of arguments.

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
    model whose weights are in shards is not compared.

    On JAX nothing is split by calls, and a declaration changes nothing.

    Args:
        layer: a subclass of `keras.layers.Layer`, for all its instances and those of
            subclasses that define no `call` of their own, or a layer, before its first
            call under a strategy.

    Returns:
        `layer`, so that the function is a decorator of classes as well.

    Raises:
        TypeError: if `layer` is another object, such as a function.

    Example:

    >>> @ks.row_wise
    ... class Norm(keras.layers.Layer):
    ...     def call(self, x):
    ...         return torch.nn.functional.normalize(x, dim=-1)
    """
    if isinstance(layer, type) and issubclass(layer, keras.layers.Layer):
        _classes.add(layer)
    elif isinstance(layer, keras.layers.Layer):
        _layers.add(layer)
    else:
        raise TypeError(
            "`ks.row_wise` takes a subclass of `keras.layers.Layer`, as a decorator, "
            f"or a layer; found {layer!r}. Put the code of a function into the `call` "
            "of a layer."
        )
    return layer


def is_declared(layer: Any) -> bool:
    """Whether a layer is declared, by itself or by its class."""
    if layer in _layers:
        return True
    for kind in type(layer).__mro__:
        if kind in _classes:
            return True
        if "call" in vars(kind):
            return False
    return False
