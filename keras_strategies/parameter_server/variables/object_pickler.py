"""Pickling of functions and models for workers, with numbers for Keras objects."""

from __future__ import annotations

import itertools
import threading
from typing import Any

from keras_strategies import keras_compat
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.parameter_server.wire.object_pickling import dump
from keras_strategies.parameter_server.wire.variable_description import (
    VariableDescription,
)


class ObjectPickler:
    """Pickles objects; a Keras object has one number in all messages.

    Args:
        registry: describes the variables.
        strategy: replaced by the worker's strategy.
    """

    def __init__(self, registry: VariableRegistry, strategy: object):
        self._registry = registry
        self._strategy = strategy
        self._objects: dict[int, Any] = {}
        self._generation = itertools.count()
        self._lock = threading.RLock()

    def number_of(self, made: Any) -> int:
        """The number of a Keras object, stored as long as this pickler."""
        with self._lock:
            for number, found in self._objects.items():
                if found is made:
                    return number
            number = len(self._objects)
            self._objects[number] = made
            return number

    def dump(
        self, value: Any
    ) -> tuple[bytes, int, dict[int, VariableDescription], list[Any]]:
        """Pickles an object for workers.

        Returns:
            The bytes, their generation, the variables in them, and the optimizers.
        """
        seen: list[Any] = []

        def number_of(made: Any) -> int:
            seen.append(made)
            return self.number_of(made)

        blob, variables = dump(
            value,
            self._registry.describe,
            number_of,
            lambda made: made is self._strategy,
        )
        optimizers = [made for made in seen if keras_compat.is_optimizer(made)]
        return blob, next(self._generation), variables, optimizers
