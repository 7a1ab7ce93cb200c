"""Generators of random numbers from which reading a row of a dataset can draw."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch

from keras_strategies.keras_compat.variables.generator_seeds import (
    draws_of_rows,
    is_seed_state,
    set_seed_state,
)

#: Objects in objects, and in containers, at most so deep.
_DEEPEST = 8
#: Entries of containers with more are data.
_MOST_ENTRIES = 256
_DATA = (
    *(bool, int, float, complex, str, bytes, np.ndarray, torch.Tensor),
    *(keras.Variable, types.ModuleType),
)
_CONTAINERS = (list, tuple, set, frozenset)
_WORD = 2**64 - 1


@dataclass(frozen=True)
class _Generator:
    """One generator.

    Args:
        seed: sets its state from a number of 64 bits.
        read: returns its state.
        write: sets a state that `read` has returned.
    """

    seed: Callable[[int], Any]
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def mixed(seed: int, number: int) -> int:
    """A seed of 64 bits for one of many numbers.

    The function is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", 2014).
    """
    z = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


def _words(seed: int) -> list[int]:
    return [seed >> 32, seed & 0xFFFFFFFF]


class RowGenerators:
    """The generators that a dataset can draw from, which are seeded for each row.

    That are those of the process: of Python, NumPy, Torch and Keras; and those that the
    dataset holds: in its attributes and containers, in layers, and in what functions
    of the user refer to.

    Args:
        dataset: the dataset.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self._of_process = [
            _Generator(random.seed, random.getstate, random.setstate),
            _Generator(
                lambda seed: np.random.seed(_words(seed)),
                functools.partial(np.random.get_state, legacy=False),
                np.random.set_state,
            ),
            _of_torch(torch.default_generator),
        ]
        self._held: list[_Generator] = []
        self._known: dict[int, Any] = {}
        self.find()

    def find(self) -> bool:
        """Finds what the dataset holds by now; returns whether there is more."""
        before = len(self._held)
        visit = _Visit()
        visit.value(self._dataset, 0)
        for owner, generator in visit.found:
            if id(owner) not in self._known:
                self._known[id(owner)] = owner
                self._held.append(generator)
        return len(self._held) > before

    def reads(self) -> contextlib.AbstractContextManager[Callable[[int], None]]:
        """Context manager for reads, which leaves all generators as they were.

        Returns:
            callable of a row's seed, before the row is read.
        """
        return self._reads()

    @contextlib.contextmanager
    def _reads(self) -> Iterator[Callable[[int], None]]:
        every = [*self._of_process, *self._held]
        states = [each.read() for each in every]
        with draws_of_rows() as keras_draws:

            def seed(value: int) -> None:
                for generator in self._of_process:
                    generator.seed(value)
                for i, generator in enumerate(self._held):
                    generator.seed(mixed(value, i))
                keras_draws.seed(value)

            try:
                yield seed
            finally:
                for each, state in zip(every, states, strict=True):
                    each.write(state)


def _of_random_state(state: np.random.RandomState) -> _Generator:
    return _Generator(
        lambda seed: state.seed(_words(seed)),
        functools.partial(state.get_state, legacy=False),
        state.set_state,
    )


def _of_torch(generator: torch.Generator) -> _Generator:
    return _Generator(generator.manual_seed, generator.get_state, generator.set_state)


def _of_numpy(generator: np.random.Generator) -> _Generator:
    bits = generator.bit_generator

    def write(state: Any) -> None:
        bits.state = state

    return _Generator(
        lambda seed: write(type(bits)(seed).state), lambda: bits.state, write
    )


def _of_variable(variable: Any) -> _Generator:
    return _Generator(
        functools.partial(set_seed_state, variable),
        # A copy: arrays of variables on CPUs can share their memory.
        lambda: np.array(keras.ops.convert_to_numpy(variable)),
        variable.assign,
    )


class _Visit:
    """Follows what a dataset refers to, and collects the generators.

    Attributes:
        found: list of a generator and what seeds it.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Any, _Generator]] = []
        self._seen: set[int] = set()

    def value(self, value: Any, depth: int) -> None:
        if value is None or isinstance(value, _DATA):
            return
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(value))
        generator = _generator(value)
        if generator is not None:
            self.found.append((value, generator))
        elif isinstance(value, (dict, *_CONTAINERS)):
            if len(value) <= _MOST_ENTRIES:
                self._each(value.values() if isinstance(value, dict) else value, depth)
        elif isinstance(value, functools.partial):
            self._each((value.func, *value.args, *value.keywords.values()), depth)
        elif isinstance(value, types.MethodType):
            self._each((value.__func__, value.__self__), depth)
        elif isinstance(value, types.FunctionType):
            if _is_of_user(value):
                self._function(value, depth)
        elif isinstance(value, type):
            if _is_of_user(value):
                self._each(list(vars(value).values()), depth)
        elif isinstance(value, keras.layers.Layer):
            for variable in filter(is_seed_state, value.variables):
                self.found.append((variable, _of_variable(variable)))
            self._each(vars(value).values(), depth)
        else:
            self._each(_attributes(value), depth)
            self._each(type(value).__mro__, depth)

    def _each(self, values: Any, depth: int) -> None:
        for value in list(values):
            self.value(value, depth + 1)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # Not assigned yet.
                self.value(cell.cell_contents, depth)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}))
        self._each(defaults, depth)
        names = set(_names_in(function.__code__)) & function.__globals__.keys()
        self._each([function.__globals__[name] for name in sorted(names)], depth)


def _generator(value: Any) -> _Generator | None:
    if isinstance(value, random.Random):
        return _Generator(value.seed, value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return _of_random_state(value)
    if isinstance(value, np.random.Generator):
        return _of_numpy(value)
    if isinstance(value, torch.Generator):
        return _of_torch(value)
    if isinstance(value, keras.random.SeedGenerator):
        return _of_variable(value.state)
    return None


@functools.cache
def _is_installed(module: str) -> bool:
    """Whether a module is of an installed package, or of Python."""
    package = module.partition(".")[0]
    if package in sys.stdlib_module_names and package != "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def _is_of_user(value: Any) -> bool:
    """Whether a function or class is of the user, and not of an installed package."""
    return not _is_installed(getattr(value, "__module__", None) or "builtins")


def _names_in(code: types.CodeType) -> Iterator[str]:
    """The names of modules and attributes in a function and in functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _attributes(value: Any) -> Iterator[Any]:
    yield from list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        for key, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, key):
                yield getattr(value, key)
