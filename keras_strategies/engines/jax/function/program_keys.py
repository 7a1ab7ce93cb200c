"""Keys of functions: when a compiled program is reused in a call of `Strategy.run`.

`Strategy.run` outside of `ks.function` looks like Python that runs in every call; on
JAX it is a compiled program. So a program is reused only if the values that the
function closes over are unchanged, as far as its code shows them:

- names of the enclosing functions and of the module, and default arguments;
- attributes that the code names, of the objects behind those names: `self.rate`,
  `config.loss.weight`, `settings.RATE`, also in methods, properties and helpers that
  the code names in turn;
- items of lists, tuples, sets and dictionaries;
- `trainable` of the weights of Keras layers, and public attributes that are numbers,
  strings or booleans, like a dropout's `rate`.

Not compared are the contents of NumPy arrays, attributes read by libraries, files and
the time: pass them as arguments, or hold them in Keras variables.
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

from keras_strategies.keras_compat.models.layers import layer_settings

_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_LIBRARIES = frozenset(
    ("jax", "jaxlib", "keras", "keras_strategies", "numpy", "tensorflow", "torch")
)


class IdentityKey:
    """Key of an object by identity; holds the object, so that its `id` stays unique."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.value is self.value


def static_key(value: Any) -> Any:
    """Key of a constant: by value for scalars, by identity for other objects."""
    if isinstance(value, _SCALARS):
        return (type(value), value)
    return IdentityKey(value)


def function_key(fn: Callable[..., Any]) -> Any:
    """Key of a function: its code and the values that it closes over.

    A lambda in a loop is a new function each time, with an equal key. A function with
    another value in its closure has another key.

    Args:
        fn: a function, a method, or another callable.
    """
    return _Walk().key(fn)


def code_of(fn: Callable[..., Any]) -> types.CodeType | None:
    """The code that equal lambdas share; None for a callable without Python code."""
    function = getattr(fn, "__func__", fn)
    return getattr(function, "__code__", None)


class _Walk:
    """Traversal of the values that a function depends on."""

    def __init__(self) -> None:
        # Visited objects and names. Holding the objects keeps their ids unique.
        self._seen: dict[tuple[int, frozenset[str]], Any] = {}

    def key(self, value: Any, names: frozenset[str] = frozenset()) -> Any:
        """Key of a value for code that uses these names.

        Args:
            value: any object.
            names: the attributes that the code reads.
        """
        if isinstance(value, _SCALARS):
            return (type(value), value)
        if (id(value), names) in self._seen or _is_array(value):
            return IdentityKey(value)
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
        return (IdentityKey(value), *self._attributes(value, names))

    def _function(self, fn: types.FunctionType) -> Any:
        if _is_of_library(fn):
            return IdentityKey(fn)
        names = _names(fn)

        def ref(given: Any) -> Any:
            try:
                return self.key(given.cell_contents, names)
            except ValueError:  # Not assigned yet.
                return IdentityKey(given)

        used = [name for name in sorted(names) if name in fn.__globals__]
        return (
            fn.__code__,
            tuple(map(ref, fn.__closure__ or ())),
            tuple(self.key(value, names) for value in fn.__defaults__ or ()),
            self._items(fn.__kwdefaults__ or {}, names),
            self._items({name: fn.__globals__[name] for name in used}, names),
            IdentityKey(fn.__globals__),
        )

    def _container(self, value: Any, names: frozenset[str]) -> Any:
        if isinstance(value, Mapping):
            return (type(value), self._items(value, names))
        keys = [
            self.key(part, names) for part in value if not _is_leftover_tracer(part)
        ]
        return (type(value), frozenset(keys) if isinstance(value, set) else (*keys,))

    def _items(self, items: Mapping[Any, Any], names: frozenset[str]) -> Any:
        return tuple(
            (static_key(key), self.key(value, names))
            for key, value in items.items()
            if not _is_leftover_tracer(value)
        )

    def _attributes(self, value: Any, names: frozenset[str]) -> list[Any]:
        """Keys of an object's attributes with these names."""
        if isinstance(value, (type, keras.Variable)) or _is_of_library(value):
            return []
        if isinstance(value, types.ModuleType):
            return [self._items(_chosen(vars(value), names), names)]
        kind: Any = type(value)
        reached = _reached(kind, names)
        found: list[Any] = [self._items(_chosen(_state(value), reached), reached)]
        if isinstance(value, keras.Layer):
            found.append(layer_settings(value))
        return found


def _is_leftover_tracer(value: Any) -> bool:
    """Whether a value is a leftover of an earlier trace, such as an appended tracer."""
    return isinstance(value, jax.core.Tracer)


def _is_array(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic))


def _is_of_library(value: Any) -> bool:
    """Whether a value is a function or module of a library, taken as constant."""
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
    """The names of globals and attributes in a function's code."""
    code = getattr(fn, "__code__", None)
    return frozenset() if code is None else _names_in(code)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inner))


@functools.lru_cache(maxsize=1024)
def _reached(kind: type, names: frozenset[str]) -> frozenset[str]:
    """These names, and those in the methods and properties that they name."""
    # `value(...)` calls `__call__`, and a Keras layer's calls `call`.
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
