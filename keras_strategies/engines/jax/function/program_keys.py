"""What a function depends on beside its arguments: when one program serves two calls.

`Strategy.run` outside of `ks.function` looks like Python that runs in every call, and
on JAX it is a program that is compiled once. So a program is used again only where
what the function closes over has not changed, as far as its code shows:

- names of the enclosing functions and of the module, and default arguments;
- attributes that the code names, of the objects behind those names: `self.rate`,
  `config.loss.weight`, `settings.RATE`, also in methods, properties and helpers that
  the code names in turn;
- what is in lists, tuples, sets and dictionaries;
- of Keras layers, which of their weights are trainable, and numbers, strings and
  switches that are public attributes, like a dropout's `rate`.

The contents of NumPy arrays, what libraries read of objects that they are given, files
and the time are not among it: these have to be arguments or Keras variables.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies import keras_compat

_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_LIBRARIES = frozenset(
    ("jax", "jaxlib", "keras", "keras_strategies", "numpy", "tensorflow", "torch")
)


class Same:
    """Equal to another one of the same object only, which it keeps alive."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value


def static_key(value: Any) -> Any:
    """Equal for values that a program may take for each other."""
    if isinstance(value, _SCALARS):
        return (type(value), value)
    return Same(value)


def function_key(fn: Callable[..., Any]) -> Any:
    """Equal for functions that do the same: one code over objects that are the same.

    A lambda in a loop is a new function each time, and is not to be compiled anew;
    a function of which something has changed that it closes over is.

    Args:
        fn: a function, a method, or another callable.
    """
    return _Walk().key(fn)


def code_of(fn: Callable[..., Any]) -> types.CodeType | None:
    """What functions that are made anew have in common; None if it is not Python's."""
    function = getattr(fn, "__func__", fn)
    return getattr(function, "__code__", None)


class _Walk:
    """One look at all that a function depends on."""

    def __init__(self) -> None:
        # What was visited, and for which names; it is held, so that ids are its own.
        self._seen: dict[tuple[int, frozenset[str]], Any] = {}

    def key(self, value: Any, names: frozenset[str] = frozenset()) -> Any:
        """Equal for values that code which uses these names cannot tell apart.

        Args:
            value: anything that code can get at.
            names: the attributes that it asks for.
        """
        if isinstance(value, _SCALARS):
            return (type(value), value)
        if (id(value), names) in self._seen or _is_array(value):
            return Same(value)
        self._seen[id(value), names] = value
        if isinstance(value, types.MethodType):
            owner = self.key(value.__self__, _names(value.__func__))
            return (self.key(value.__func__, names), owner)
        if isinstance(value, functools.partial):
            parts = (value.args, value.keywords)
            return (self.key(value.func, names), self.key(parts, names))
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, (list, tuple, set, frozenset, Mapping)):
            return self._container(value, names)
        return (Same(value), *self._attributes(value, names))

    def _function(self, fn: types.FunctionType) -> Any:
        if _is_of_library(fn):
            return Same(fn)
        names = _names(fn)

        def cell(given: Any) -> Any:
            try:
                return self.key(given.cell_contents, names)
            except ValueError:  # Not assigned yet.
                return Same(given)

        used = [name for name in sorted(names) if name in fn.__globals__]
        return (
            fn.__code__,
            tuple(map(cell, fn.__closure__ or ())),
            tuple(self.key(value, names) for value in fn.__defaults__ or ()),
            self._items(fn.__kwdefaults__ or {}, names),
            self._items({name: fn.__globals__[name] for name in used}, names),
            Same(fn.__globals__),
        )

    def _container(self, value: Any, names: frozenset[str]) -> Any:
        if isinstance(value, Mapping):
            return (type(value), self._items(value, names))
        keys = [self.key(part, names) for part in value if not _is_left_over(part)]
        return (type(value), frozenset(keys) if isinstance(value, set) else (*keys,))

    def _items(self, items: Mapping[Any, Any], names: frozenset[str]) -> Any:
        return tuple(
            (static_key(key), self.key(value, names))
            for key, value in items.items()
            if not _is_left_over(value)
        )

    def _attributes(self, value: Any, names: frozenset[str]) -> list[Any]:
        """What is found under the names that code asks an object for."""
        if isinstance(value, (type, keras.Variable)) or _is_of_library(value):
            return []
        if isinstance(value, types.ModuleType):
            return [self._items(_chosen(vars(value), names), names)]
        kind: Any = type(value)
        reached = _reached(kind, names)
        found: list[Any] = [self._items(_chosen(_state(value), reached), reached)]
        if isinstance(value, keras.Layer):
            found.append(keras_compat.layer_settings(value))
        return found


def _is_left_over(value: Any) -> bool:
    """Whether a trace has put it there; what it appends to is as it was before."""
    return isinstance(value, jax.core.Tracer)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def _is_of_library(value: Any) -> bool:
    """Whether it is a function or a module that does not change."""
    if not isinstance(value, (types.FunctionType, types.ModuleType)):
        return False
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return (name or "").partition(".")[0] in _LIBRARIES


def _state(value: Any) -> dict[str, Any]:
    """An object's own attributes, those in slots included."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if hasattr(value, name):
                found[name] = getattr(value, name)
    return found


def _chosen(attributes: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: attributes[name] for name in sorted(names & attributes.keys())}


def _names(fn: Any) -> frozenset[str]:
    """The names that a function's code uses, of globals and of attributes."""
    code = getattr(fn, "__code__", None)
    return frozenset() if code is None else _names_in(code)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inner))


@functools.lru_cache(maxsize=1024)
def _reached(kind: type, names: frozenset[str]) -> frozenset[str]:
    """These names, and those that the methods and properties behind them use."""
    # What `value(...)` calls, of a Keras layer at second hand.
    pending = [*names, "__call__", "call"]
    found = set(names)
    while pending:
        member = inspect.getattr_static(kind, pending.pop(), None)
        if isinstance(member, property):
            member = member.fget
        member = getattr(member, "__func__", member)
        if isinstance(member, types.FunctionType) and not _is_of_library(member):
            new = _names(member) - found
            found |= new
            pending += new
    return frozenset(found)
