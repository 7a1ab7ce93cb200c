"""Outputs of all layers of a model, in the order of their calls."""

from __future__ import annotations

import functools
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_strategies.keras_compat.models.layers import own_layers
from keras_strategies.rows.row_tensors import RowTensor


@dataclass
class OutputNames:
    """Names, dtypes and layers of the outputs, written when the model is traced."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    layers: list[Any] = field(default_factory=list)


class _Calls(threading.local):
    found: list[tuple[Any, Any]] | None = None


# Not held by a layer, whose objects may not change in a call that is split.
_calls = _Calls()
#: The names of the outputs of each model of outputs.
_names: weakref.WeakKeyDictionary[Any, OutputNames] = weakref.WeakKeyDictionary()


def observed_layers(layer: Any) -> list[Any]:
    """The layers of which outputs are compared.

    Layers in layers of Keras, such as the cell of a recurrent one, are called in loops
    of the framework, where their outputs have no rows of the batch.
    """
    found = []
    for each in own_layers(layer):
        is_container = isinstance(each, keras.Model)
        of_keras = type(each).__module__.startswith("keras.")
        if is_container or not of_keras:
            found += observed_layers(each)
        if not is_container and not isinstance(each, keras.layers.InputLayer):
            found.append(each)
    return list({id(each): each for each in found}.values())


def model_of_outputs(model: Any, training: bool) -> tuple[keras.Model, OutputNames]:
    """A model with the outputs of all layers of another as its outputs.

    As they are outputs of one layer call, every strategy splits, gathers and compiles
    them as it does those of the model. The calls of the layers are observed from now
    on, so the model is of no other use.

    Args:
        model: a `keras.Model`.
        training: bool, as for its call.

    Returns:
        The model, of which a call returns a list of tensors, and their names.
    """
    for layer in observed_layers(model):
        _observe(layer)

    class Outputs(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def call(self, x: Any) -> list[Any]:
            _calls.found = []
            try:
                last = self.inner(x, training=training)
                found = [*_calls.found, (model, last)]
            finally:
                _calls.found = None
            return _flat([each for each in found if _is_of(each, x)], _names[self])

    outputs = Outputs()
    outputs.built = True
    names = _names[outputs] = OutputNames()
    return outputs, names


def _observe(layer: Any) -> None:
    original = layer.call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if _calls.found is not None:
            _calls.found.append((layer, result))
        return result

    layer.call = call


def _is_of(found: tuple[Any, Any], x: Any) -> bool:
    """Whether an output is of this call, and of no trace of a layer in it."""
    leaves = [keras.tree.flatten(each) for each in (found[1], x)]
    kinds = [any(isinstance(leaf, RowTensor) for leaf in each) for each in leaves]
    return kinds[0] == kinds[1]


def _flat(found: list[tuple[Any, Any]], names: OutputNames) -> list[Any]:
    own, tensors = OutputNames(), []
    for layer, result in found:
        for i, tensor in enumerate(keras.tree.flatten(result)):
            if tensor is None or not len(tensor.shape):
                continue
            name = layer.name if i == 0 else f"{layer.name}[{i}]"
            count = sum(each.partition(" call ")[0] == name for each in own.names)
            own.names.append(name if not count else f"{name} call {count + 1}")
            own.dtypes.append(keras.backend.standardize_dtype(tensor.dtype))
            own.layers.append(layer)
            tensors.append(tensor)
    names.names[:], names.dtypes[:] = own.names, own.dtypes
    names.layers[:] = own.layers
    return tensors
