"""Outputs of all layers of a model, in the order of their calls."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import keras

from keras_strategies.keras_compat.models.layers import own_layers
from keras_strategies.rows.row_tensors import RowTensor

#: Name, dtype and layer of each output, written when the model of outputs is traced.
Outputs = list[tuple[str, str, Any]]


class _Calls(threading.local):
    found: list[tuple[Any, Any]] | None = None


# Not held by a layer, whose objects may not change in a call that is split.
_calls = _Calls()
#: The outputs of each model of outputs.
_described: weakref.WeakKeyDictionary[Any, Outputs] = weakref.WeakKeyDictionary()


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


def model_of_outputs(model: Any, training: bool) -> tuple[keras.Model, Outputs]:
    """A model with the outputs of all layers of another as its outputs.

    As they are outputs of one layer call, every strategy splits, gathers and compiles
    them as it does those of the model. The calls of the layers are observed from now
    on, so the model is of no other use.

    Args:
        model: a `keras.Model`.
        training: bool, as for its call.

    Returns:
        The model, of which a call returns a list of tensors, and what they are.
    """
    for layer in observed_layers(model):
        _observe(layer)

    class OfOutputs(keras.Model):
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
            own = [each for each in found if _is_of(each, x)]
            return _flat(own, _described[self])

    outputs = OfOutputs()
    outputs.built = True
    described: Outputs = []
    _described[outputs] = described
    return outputs, described


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


def _flat(found: list[tuple[Any, Any]], described: Outputs) -> list[Any]:
    own: Outputs = []
    tensors = []
    for layer, result in found:
        for i, tensor in enumerate(keras.tree.flatten(result)):
            if tensor is None or not len(tensor.shape):
                continue
            name = layer.name if i == 0 else f"{layer.name}[{i}]"
            count = sum(each[0].partition(" call ")[0] == name for each in own)
            name = name if not count else f"{name} call {count + 1}"
            dtype = keras.backend.standardize_dtype(tensor.dtype)
            own.append((name, dtype, layer))
            tensors.append(tensor)
    described[:] = own  # Threads of replicas write the same.
    return tensors
