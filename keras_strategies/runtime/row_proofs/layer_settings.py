"""The attributes of layers that determine their calls."""

from __future__ import annotations

import operator
from typing import Any

import keras

from keras_strategies.keras_compat.models.layers import sublayers

_PLAIN = (type(None), bool, int, float, str)
#: Attributes that Keras's training assigns, and that no call depends on (Keras 3.15).
_OF_TRAINING = frozenset(
    [
        "_compile_config",
        "_compile_loss",
        "_compile_metrics",
        "_compiled_trainable_state",
        "_distribute_strategy",
        "_eval_epoch_iterator",
        "_initial_epoch",
        "_jit_compile",
        "_loss_ids",
        "_loss_tracker",
        "_metrics",
        "_run_eagerly",
        "built",
        "compiled",
        "history",
        "loss",
        "optimizer",
        "predict_function",
        "steps_per_execution",
        "stop_evaluating",
        "stop_predicting",
        "stop_training",
        "test_function",
        "train_function",
        "unrolled_steps_per_execution",
    ]
)


class LayerSettings:
    """Settings of the calls of a layer; a number tells whether they have changed.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Any):
        self._layer = layer
        self._known: dict[Any, int] = {}
        self._values: list[tuple[dict[str, Any], list[Any]]] = []
        self._number = -1

    def number(self) -> int:
        """The number of the current settings; equal settings have equal numbers.

        Fast where no attribute was assigned since the last call.
        """
        if self._number < 0 or not self._is_same():
            layers = sublayers(self._layer)
            self._values = [(vars(each), list(vars(each).values())) for each in layers]
            key = tuple(map(_settings_of, layers))
            self._number = self._known.setdefault(key, len(self._known))
        return self._number

    @property
    def count(self) -> int:
        """How many different settings there were."""
        return len(self._known)

    def _is_same(self) -> bool:
        return all(
            len(attributes) == len(before)
            and all(map(operator.is_, attributes.values(), before))
            for attributes, before in self._values
        )


def _settings_of(layer: Any) -> Any:
    """The plain values and functions among a layer's attributes, and its flags."""
    return (
        id(layer),
        layer.trainable,
        layer.dtype_policy.name,
        tuple(
            (name, _token(value))
            for name, value in vars(layer).items()
            if name not in _OF_TRAINING
            and not name.startswith("_keras_strategies")
            and _is_setting(value)
        ),
    )


def _is_setting(value: Any) -> bool:
    if isinstance(value, (keras.layers.Layer, keras.Variable)):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) <= 16 and all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN) or callable(value)


def _token(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    # A type beside it: 1, 1.0 and True are equal.
    return (type(value), value) if isinstance(value, _PLAIN) else _Identity(value)


class _Identity:
    """Equal for one object only, which it keeps."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
