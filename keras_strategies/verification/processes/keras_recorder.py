"""Records of a Keras training: logs and variables after each batch of `fit`.

Gradients are part of compiled programs and not observed. Dropout is off, because its
masks depend on devices.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.verification.processes.records import Arrays, Recorder


class KerasRecorder(Recorder):
    """Records a training of this process.

    Args:
        steps: int, as for `Recorder`.
        disturbance: float, by which weights are changed before the first step.
    """

    def __init__(self, steps: int, disturbance: float = 0.0):
        super().__init__(steps)
        self._disturbance = disturbance
        self.record.versions = {"keras": keras.__version__}
        for name in ("fit", "evaluate", "train_on_batch"):
            self.replace(keras.Model, name, getattr(self, f"_{name}"))

    def _fit(
        self,
        original: Any,
        model: Any,
        *args: Any,
        callbacks: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = callbacks if callbacks is not None else []
        own = given if isinstance(given, (list, tuple)) else [given]
        return original(model, *args, callbacks=[*own, _Observer(self)], **kwargs)

    def _evaluate(self, original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(model, *args, **{**kwargs, "return_dict": True})
        self.add_logs({f"evaluated {name}": v for name, v in found.items()})
        if kwargs.get("return_dict"):
            return found
        values = list(found.values())
        return values[0] if len(values) == 1 else values

    def _train_on_batch(
        self, original: Any, model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.step_begins()
        self.begins(model)
        found = original(model, *args, **kwargs)
        self.updated(model, found if isinstance(found, dict) else {})
        return found

    def array(self, value: Any) -> np.ndarray:
        return np.array(keras.ops.convert_to_numpy(value))

    def add_logs(self, logs: dict[str, Any]) -> None:
        """Records logs of a batch or an evaluation."""
        values = {name: np.array(float(value)) for name, value in logs.items()}
        self.current.values.update(values)

    def begins(self, model: Any) -> None:
        """Prepares a model for the first step, and records its weights."""
        for layer in sublayers(model):
            rate = getattr(layer, "rate", None)
            if isinstance(rate, float) and rate and "Dropout" in type(layer).__name__:
                layer.rate = 0.0
                self.record.notes["Dropout was off."] = True
        if not model.built:
            return
        if self._disturbance and not self.record.start:
            generator = np.random.default_rng(0)
            for each in model.trainable_variables:
                signs = generator.choice([-1.0, 1.0], tuple(each.shape))
                each.assign(self.array(each) * (1 + self._disturbance * signs))
        self.record.start = self.record.start or self.variables_of(model)

    def updated(self, model: Any, logs: dict[str, Any]) -> None:
        """Records a step that has ended."""
        settings = self.current.settings
        rate = self.array(model.optimizer.learning_rate)
        settings["learning_rate"] = float(rate)
        for name in ("clipnorm", "clipvalue", "global_clipnorm"):
            value = getattr(model.optimizer, name, None)
            if value is not None:
                settings[name] = float(value)
        self.add_logs(logs)
        self.current.variables = self.variables_of(model)
        self.step_ended()

    def variables_of(self, model: Any) -> Arrays:
        """Values of weights by their paths, without random numbers."""
        names: dict[str, int] = {}
        found: Arrays = {}
        for each in model.weights:
            count = names[each.path] = names.get(each.path, 0) + 1
            found[each.path if count == 1 else f"{each.path} {count}"] = self.array(
                each
            )
        return found


class _Observer(keras.callbacks.Callback):
    def __init__(self, recorder: KerasRecorder):
        super().__init__()
        self._recorder = recorder

    def on_train_begin(self, logs: Any = None) -> None:
        self._recorder.begins(self.model)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._recorder.step_begins()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        model = self.model  # Keras on JAX writes the state into the variables here.
        self._recorder.updated(model, dict(logs or {}))
