"""The Python state that a recording of a layer's call contains."""

from __future__ import annotations

import operator
from typing import Any

from keras_strategies.engines.torch.compat import module_hooks, submodules
from keras_strategies.keras_compat.models.layers import (
    inner_layers,
    is_model,
    model_settings,
    sublayers,
)


class LayerState:
    """What the call of a layer depends on besides arguments and variables.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Any):
        layers = sublayers(layer)
        attributes = [vars(each) for each in layers if not is_model(each)]
        self._attributes = [(each, list(each.values())) for each in attributes]
        # Torch has those that are layers in a dict of their own.
        self._inner = [
            (modules, len(modules), inner_layers(modules).items())
            for modules in map(submodules, layers)
        ]
        self._models = [each for each in layers if is_model(each)]
        self._of_models = list(map(model_settings, self._models))
        self._hooks = [hooks for each in layers for hooks in module_hooks(each)]

    def is_same(self) -> bool:
        """Whether no attribute was assigned since, and no hook is registered."""
        return (
            not any(self._hooks)
            and all(
                len(attributes) == len(before)
                and all(map(operator.is_, attributes.values(), before))
                for attributes, before in self._attributes
            )
            and all(
                len(modules) == count
                and all(modules[name] is inner for name, inner in before)
                for modules, count, before in self._inner
            )
            and list(map(model_settings, self._models)) == self._of_models
        )
