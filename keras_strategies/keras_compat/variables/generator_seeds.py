"""Seeds of generators and initializers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import sublayers


def is_seed_state(variable: Any) -> bool:
    """Whether a variable is the state of a `keras.random.SeedGenerator`."""
    return bool(variable.name == "seed_generator_state")


@contextlib.contextmanager
def substitute_global_generator() -> Iterator[_NotingUse | None]:
    """Another generator for draws without a seed, while there is none yet.

    Keras 3.15 creates it in the first such draw, as the global attribute
    "global_seed_generator", from Python's random numbers. If the context draws from the
    substitute, the generator is created at its end, as that draw would.

    Yields:
        The substitute; None if there is a generator.
    """
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import global_seed_generator

    name = "global_seed_generator"
    if global_state.get_global_attribute(name) is not None:
        yield None
        return
    substitute = _NotingUse()
    global_state.set_global_attribute(name, substitute)
    try:
        yield substitute
    finally:
        global_state.set_global_attribute(name, None)
        if substitute.was_used:
            global_seed_generator()


class _NotingUse:
    """Stands for a generator without a variable, and notes whether it is used."""

    was_used = False

    def next(self, ordered: bool = True) -> Any:
        self.was_used = True
        return np.zeros(2, _seed_dtype())


class SeededDraws:
    """Stands for the generator of draws without a seed while rows of data are read."""

    _seed = 0
    _count = 0

    def seed(self, seed: int) -> None:
        """Begins the draws of a row."""
        self._seed, self._count = seed, 0

    def next(self, ordered: bool = True) -> Any:
        self._count += 1
        return keras.ops.convert_to_tensor(_seed_values(self._seed, self._count))


@contextlib.contextmanager
def draws_of_rows() -> Iterator[SeededDraws]:
    """Draws of `keras.random` without a seed are those of a row.

    Keras 3.15: the global attribute "global_seed_generator".
    """
    from keras.src.backend.common import global_state

    name = "global_seed_generator"
    previous = global_state.get_global_attribute(name)
    draws = SeededDraws()
    global_state.set_global_attribute(name, draws)
    try:
        yield draws
    finally:
        global_state.set_global_attribute(name, previous)


def set_seed_state(variable: Any, seed: int) -> None:
    """Sets the state of a `SeedGenerator` from a seed of 64 bits."""
    variable.assign(_seed_values(seed, 0))


def _seed_values(seed: int, count: int) -> np.ndarray:
    # 31 bits are in the range of every backend's dtype.
    return np.array([seed >> 33, count], _seed_dtype())


def _seed_dtype() -> Any:
    from keras.src import backend

    # Keras 3.15 has its functions in `backend`.
    functions = backend if hasattr(backend, "random_seed_dtype") else backend.ops
    return functions.random_seed_dtype()


def create_global_generator() -> None:
    """Creates the generator for draws without a seed, unless there is one.

    Replicas that create it in their first draw would each have another one.
    """
    from keras.src.random.seed_generator import global_seed_generator

    global_seed_generator()


def set_initializer_seed(initializer: Any, seed: int) -> None:
    """Changes the seed of an initializer, also the one in its config.

    Keras 3.15: `RandomInitializer._init_seed`.
    """
    initializer.seed = initializer._init_seed = seed


def seed_generators(layer: Any) -> list[Any]:
    """The generators of a layer and of all layers in it.

    Keras 3.15: `Layer._seed_generators`.
    """
    return [
        generator
        for each in sublayers(layer)
        for generator in getattr(each, "_seed_generators", ())
    ]
