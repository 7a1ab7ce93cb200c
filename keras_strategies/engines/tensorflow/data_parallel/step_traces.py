"""Programs of a step, in which layers may draw from the generators of Python."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.runtime.random_numbers.process_numbers import NumbersOfProcess


class StepTraces:
    """Traces of a step, with the numbers of Python and NumPy that one device draws.

    What a layer draws from them, or counts in an attribute, is a constant of the trace.
    One device has one program where several replicas have one for each way to split a
    batch, so the traces for one specification draw and count the same numbers.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._traces: dict[Any, Any] = {}
        self._second: dict[Any, Any] = {}
        #: The state before the traces for a specification that draws or counts.
        self._begins: dict[Any, _State] = {}
        #: Whether one device would trace its next program twice, and run the second
        #: trace: the first one creates variables, which exist here already.
        self.is_twice = False

    def forget(self) -> None:
        """Discards the traces, not the numbers that they drew, for other workers."""
        self._traces.clear()
        self._second.clear()

    def of(self, program: Any, spec: Any, step_spec: Any) -> Any:
        """The concrete function of a program.

        Args:
            program: `FunctionsByRank` of a batch.
            spec: structure of `tf.TypeSpec`, the program's argument.
            step_spec: that of the program of one device.
        """
        key = (program, _key(spec))
        if key not in self._traces:
            function = program.of(spec)
            self._traces[key] = self._trace(function, spec, _key(step_spec))
        return self._traces[key]

    def call(self, program: Any, batch: Any) -> Any:
        """Calls a program that is traced for the shapes of a batch."""
        function = program.of(batch)
        if self.is_twice:
            self._trace(function, batch, None)
        return self._second.get(function, function)(batch)

    def _trace(self, function: Any, spec: Any, step: Any) -> Any:
        is_twice, self.is_twice = self.is_twice, False
        before = _State(self._model)
        found = function.get_concrete_function(spec)
        if before.are_unchanged():
            return found
        begin = self._begins.get(step)
        if begin is None:
            self._begins[step] = before
            if not is_twice:
                return found
            self._begins[step] = _State(self._model)
            return self._again(function, spec)
        begin.restore()
        try:
            return self._again(function, spec)
        finally:
            before.restore()

    def _again(self, function: Any, spec: Any) -> Any:
        self._second[function] = tf.function(function.python_function)
        return self._second[function].get_concrete_function(spec)


class _State:
    """The generators of Python and NumPy, and numbers in attributes of layers, now."""

    def __init__(self, model: Any):
        self._numbers = NumbersOfProcess()
        self._layers = sublayers(model)
        self._counts = [_counts(layer) for layer in self._layers]

    def are_unchanged(self) -> bool:
        now = [_counts(layer) for layer in self._layers]
        return self._numbers.are_unchanged() and now == self._counts

    def restore(self) -> None:
        self._numbers.restore()
        for layer, counts in zip(self._layers, self._counts, strict=True):
            for name, value in counts.items():
                if _counts(layer).get(name) != value:
                    setattr(layer, name, value)


def _counts(layer: Any) -> dict[str, Any]:
    """The numbers in attributes of a layer that code of the user's may change."""
    return {
        name: value
        for name, value in vars(layer).items()
        if isinstance(value, int | float) and name not in _names_of_keras()
    }


@functools.cache
def _names_of_keras() -> frozenset[str]:
    return frozenset(vars(keras.layers.Layer()))


def _key(spec: Any) -> Any:
    # One tensor and a tuple of it have equal leaves.
    structure = repr(keras.tree.map_structure(lambda leaf: None, spec))
    return structure, tuple(keras.tree.flatten(spec))
