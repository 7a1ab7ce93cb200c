"""An optimizer that records gradients."""

from __future__ import annotations

from typing import Any

import keras


class GradientRecorder(keras.optimizers.Optimizer):
    """Keeps the gradients of a step in its slots, and leaves the weights as they are.

    Slots of an optimizer are placed, summed and updated by every strategy, in compiled
    steps too; so gradients are seen as the user's optimizer gets them.
    """

    def __init__(self) -> None:
        super().__init__(learning_rate=1.0, name="gradient_recorder")
        self.gradients: list[Any] = []
        self.paths: list[str] = []

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        for variable in variables:
            slot = self.add_variable_from_reference(variable, name="gradient")
            self.gradients.append(slot)
            self.paths.append(variable.path)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        # Keras 3.15: `Optimizer._get_variable_index`, also of a `tf.Variable`.
        slot = self.gradients[self._get_variable_index(variable)]
        # A gradient of a table on TensorFlow is of its rows only.
        dense = keras.ops.add(keras.ops.zeros(slot.shape, gradient.dtype), gradient)
        self.assign(slot, keras.ops.cast(dense, slot.dtype))
