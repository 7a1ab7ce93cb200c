"""Layers: settings of a call, masks and losses."""

from __future__ import annotations

from typing import Any

import keras


def sublayers(layer: Any) -> list[Any]:
    """A layer and all layers in it (`Layer._flatten_layers`)."""
    return list(layer._flatten_layers())


def own_layers(layer: Any) -> list[Any]:
    """The layers that a layer has itself, a list that changes (`Layer._layers`)."""
    found: list[Any] = layer._layers
    return found


def keeps_masks(layer: Any) -> bool:
    """Whether a call keeps what it draws in attributes of a layer.

    Keras 3.15: cells of recurrent layers keep masks of dropout for the steps of a call.
    """
    return any(hasattr(each, "get_dropout_mask") for each in sublayers(layer))


def layer_settings(layer: Any) -> Any:
    """The settings of a layer's call, without weights; equal if calls are equal.

    Keras's own flags begin with an underscore, except for `built`, which the first call
    changes.
    """
    return tuple(
        (
            sublayer.trainable,
            *(
                (name, value)
                for name, value in vars(sublayer).items()
                if isinstance(value, (bool, int, float, str))
                and not name.startswith("_")
                and name != "built"
            ),
        )
        for sublayer in sublayers(layer)
    )


def torch_module_wrappers(layer: Any) -> list[Any]:
    """The layers, in a layer, with torch modules that hold parameters of their own.

    Keras 3.15 wraps each in a `TorchModuleWrapper`; its call reads the module's
    parameters and not the Keras variables that stand for them.
    """
    kind = keras.layers.TorchModuleWrapper
    return [sub for sub in sublayers(layer) if isinstance(sub, kind)]


def rematerializes(layer: Any) -> bool:
    """Whether a layer, or one in it, is computed again in the backward pass.

    Keras 3.15: `Layer._remat_mode`.
    """
    return any(sublayer._remat_mode is not None for sublayer in sublayers(layer))


def is_rematerialized(layer: Any) -> bool:
    """Whether the call of a layer is computed again in the backward pass."""
    return layer._remat_mode is not None


def wraps_activation(layer: Any) -> bool:
    """Whether a layer's activation is another function while it is called.

    Keras 3.15: `Layer.rematerialized_call`, in the mode "activations" of a
    `RematScope`.
    """
    mode = layer._remat_mode
    return mode is not None and mode.mode == "activations"


def clear_losses(layer: Any) -> None:
    """Discards the losses of the last call, as an outermost call does.

    Keras 3.15: `Layer._get_call_context` calls `Layer._clear_losses`.
    """
    layer._clear_losses()


def get_mask(tensor: Any) -> Any:
    """The mask that Keras attached to a tensor, or None (`get_keras_mask`)."""
    from keras.src.backend.common import masking

    return masking.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, where Keras looks for it (`set_keras_mask`)."""
    from keras.src.backend.common import masking

    masking.set_keras_mask(tensor, mask)


def get_logits(tensor: Any) -> Any:
    """The input of the softmax or sigmoid that has computed a tensor, or None.

    Keras 3.15: `activations.softmax` and `sigmoid` set it, and the losses of Keras on
    TensorFlow use it.
    """
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Attaches logits to a tensor, where Keras's losses look for them."""
    tensor._keras_logits = logits
