"""Random numbers and counters that reading a row of a dataset changes.

A worker that reads only its own rows of a batch gets the rows of one device if each
depends on its index alone. Those of a dataset that augments them do not: its random
numbers are a sequence, in which a row's follow those of the row before. So the state
that such code changes is compared before and after each read.
"""

from __future__ import annotations

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
    global_seed_state,
    is_seed_state,
)
from keras_strategies.rows.python_state import attributes_of_layers

#: Objects in objects, and in containers, at most so deep.
_DEEPEST = 8
#: Entries of containers with more are data.
_MOST_ENTRIES = 256
_DATA = (str, bytes, np.ndarray, keras.Variable, types.ModuleType)
_CONTAINERS = (list, tuple, set, frozenset)


@dataclass(frozen=True)
class _Part:
    """One part of the state.

    Args:
        name: str, for people.
        read: returns its value now.
        write: restores a value.
        before: the value that `read` returned.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    before: Any


class DatasetState:
    """The generators of the process, and those and numbers that a dataset can reach.

    That are generators of Python, NumPy, Torch and Keras: of the dataset, of objects in
    its attributes and containers, and of what functions of the user refer to; and
    attributes of the user's objects that are numbers. Containers and files may change,
    as a dataset may keep the rows that it has read.

    Args:
        dataset: the dataset.
    """

    def __init__(self, dataset: Any):
        self._parts: list[_Part] = []
        self._seen: set[int] = set()
        self._add("Python's generator", random.getstate, random.setstate)
        numpy = functools.partial(np.random.get_state, legacy=False)
        self._add("NumPy's generator", numpy, np.random.set_state)
        self._add("Torch's generator", torch.get_rng_state, torch.set_rng_state)
        seeds = global_seed_state()
        if seeds is not None:
            self._add_variable("Keras's generator", seeds)
        self._visit("the dataset", dataset, 0)

    def changed(self) -> str:
        """What has changed since, for people; "" if nothing has."""
        return next(
            (
                part.name
                for part in self._parts
                if not _is_equal(part.read(), part.before)
            ),
            "",
        )

    def restore(self) -> None:
        """Restores it as it was."""
        for part in self._parts:
            part.write(part.before)

    def _add(
        self, name: str, read: Callable[[], Any], write: Callable[[Any], Any]
    ) -> None:
        self._parts.append(_Part(name, read, write, read()))

    def _add_variable(self, name: str, variable: Any) -> None:
        read = functools.partial(keras.ops.convert_to_numpy, variable)
        # A copy: arrays of variables on CPUs can share their memory.
        self._add(name, lambda: np.array(read()), variable.assign)

    def _visit(self, name: str, value: Any, depth: int) -> None:
        if value is None or isinstance(value, (bool, int, float, complex, *_DATA)):
            return
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(value))
        if isinstance(value, random.Random):
            self._add(name, value.getstate, value.setstate)
        elif isinstance(value, np.random.RandomState):
            state = functools.partial(value.get_state, legacy=False)
            self._add(name, state, value.set_state)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._add(
                name, lambda: bits.state, lambda state: setattr(bits, "state", state)
            )
        elif isinstance(value, torch.Generator):
            self._add(name, value.get_state, value.set_state)
        elif isinstance(value, torch.Tensor):
            return
        elif isinstance(value, keras.random.SeedGenerator):
            self._add_variable(name, value.state)
        elif isinstance(value, keras.layers.Layer):
            for variable in filter(is_seed_state, value.variables):
                self._add_variable(name, variable)
            self._visit_attributes(name, value, depth)
        elif isinstance(value, dict):
            if len(value) <= _MOST_ENTRIES:
                self._visit_each(name, value.values(), depth)
        elif isinstance(value, _CONTAINERS):
            if len(value) <= _MOST_ENTRIES:
                self._visit_each(name, value, depth)
        elif isinstance(value, functools.partial):
            self._visit_each(name, [value.func, *value.args], depth)
            self._visit_each(name, value.keywords.values(), depth)
        elif isinstance(value, types.MethodType):
            self._visit_each(name, [value.__func__, value.__self__], depth)
        elif isinstance(value, types.FunctionType):
            if _is_of_user(value):
                self._visit_function(name, value, depth)
        elif isinstance(value, type):
            if _is_of_user(value):
                self._visit_class(name, value, depth)
        else:
            self._visit_attributes(name, value, depth)
            self._visit_each(name, type(value).__mro__, depth)

    def _visit_each(self, name: str, values: Any, depth: int) -> None:
        for value in list(values):
            self._visit(name, value, depth + 1)

    def _visit_attributes(self, name: str, value: Any, depth: int) -> None:
        """Its attributes; the numbers among them are state."""
        is_layer = isinstance(value, keras.layers.Layer)
        of_keras = attributes_of_layers() if is_layer else ()
        has_numbers = not is_layer and _is_of_user(type(value))
        for key, attribute in _attributes(value):
            own = f"{key!r} of {name}"
            if key in of_keras:
                continue
            if isinstance(attribute, (int, float)) and has_numbers:
                self._add(
                    own,
                    functools.partial(getattr, value, key, None),
                    functools.partial(object.__setattr__, value, key),
                )
            else:
                self._visit(own, attribute, depth + 1)

    def _visit_function(
        self, name: str, function: types.FunctionType, depth: int
    ) -> None:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # Not assigned yet.
            self._visit(name, value, depth + 1)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}))
        self._visit_each(name, defaults, depth)
        for key in set(_names_in(function.__code__)):
            if key in function.__globals__:
                self._visit(f"{key!r}", function.__globals__[key], depth + 1)

    def _visit_class(self, name: str, kind: type, depth: int) -> None:
        for key, value in list(vars(kind).items()):
            if isinstance(value, types.FunctionType):
                self._visit_function(name, value, depth + 1)
            elif not key.startswith("__"):
                self._visit(f"{key!r} of {kind.__qualname__}", value, depth + 1)


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


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        for key, member in vars(kind).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, key):
                yield key, getattr(value, key)


def _is_equal(now: Any, before: Any) -> bool:
    """Whether two states are equal: numbers, tuples of them, dicts and arrays."""
    if isinstance(now, dict):
        return all(_is_equal(now[key], before[key]) for key in before)
    if isinstance(now, (np.ndarray, torch.Tensor)):
        return bool(np.array_equal(now, before))
    # Not a number is equal to itself here.
    return type(now) is type(before) and (now == before or now != now)
