"""Layers with other variables than before, and optimizers for them."""

from __future__ import annotations

from typing import Any

import keras

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.backends.keras_on_torch import (
    track_parameters_again,
)
from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.keras_compat.optimizers.optimizer_classes import optimizer_kind


def grow_layer(
    layer: Any, attributes: dict[str, Any], model: Any
) -> list[tuple[Any, Any]]:
    """Builds a layer again, with attributes that give its variables other shapes.

    The model gets an optimizer for the new variables, and makes its step functions
    again.

    Keras 3.15: `Layer._tracker`, `Layer._untrack_variable`, and `Trainer.optimizer`.

    Args:
        layer: a layer that is built.
        attributes: their new values, by name.
        model: the model that trains it, or None.

    Returns:
        pairs of an old and a new variable: trained ones, and those of the optimizer.

    Raises:
        ValueError: if the model does not have the layer.
    """
    if model is not None and not any(each is layer for each in sublayers(model)):
        raise InvalidArgumentError(
            f"Model {model.name!r} does not have the layer {layer.name!r}. Give the "
            "model that trains it."
        )
    optimizer = getattr(model, "optimizer", None)
    old = list(layer.trainable_variables)
    layer._tracker.unlock()
    for variable in list(layer.variables):
        layer._untrack_variable(variable)
    for name, value in attributes.items():
        setattr(layer, name, value)
    layer.built = False
    with keras.name_scope(layer.name, caller=layer):
        layer.build(None)
    pairs = list(zip(old, layer.trainable_variables, strict=True))
    if optimizer is None:
        return pairs
    if keras.backend.backend() == "torch":
        # Else `zero_grad` clears the gradients of the old variables.
        track_parameters_again(model)
    for kind in ("train", "test", "predict"):
        setattr(model, f"{kind}_function", None)
    if optimizer.built:
        made = optimizer_kind(optimizer).from_config(optimizer.get_config())
        made.build(model.trainable_variables)
        pairs += zip(optimizer.variables, made.variables, strict=True)
        model.optimizer = made
    return pairs
