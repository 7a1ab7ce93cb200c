"""Keys of functions: when a compiled program is reused in a call of `Strategy.run`.

`Strategy.run` outside of `ks.function` looks like Python that runs in every call; on
JAX it is a compiled program. A program is reused only where a key of all Python state
that the function can read is equal (decision 050):

- names of the enclosing functions and of modules, default arguments, class attributes;
- attributes of objects, if any function that the code reaches names them: methods,
  properties, operators and helpers included. Code with `getattr`, `vars` and the like
  reaches all attributes;
- items of containers, and contents of NumPy arrays and of other mutable buffers;
- the state of iterators and random generators;
- settings of Keras, of its layers, losses, optimizers and schedules.

Programs of functions with state that has no key, such as a generator, are not reused.
Not compared are the internals of libraries, files, the environment and the time.
"""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import hashlib
import io
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies.engines.jax.function.code_names import (
    CONSTRUCTORS,
    EVERY,
    attributes_of,
    called_members,
    contents,
    is_library,
    names_in,
    unwrapped,
    user_bases,
)
from keras_strategies.engines.jax.function.sharded_values import ShardedValues
from keras_strategies.keras_compat.models.layers import sublayers, trainable_switches
from keras_strategies.values import DistributedValues

_SCALARS = (int, float, complex, bool, str, bytes, type(None))
_MAPPINGS = (dict, types.MappingProxyType)
_CONTAINERS = (list, tuple, set, frozenset, collections.deque, *_MAPPINGS)
# Scalars that are equal only if they are the same.
_EXACT = frozenset((int, bool, str, type(None)))
# Attributes of Keras objects that are not settings.
_INTERNAL = frozenset(("_auto_config", "_tracker", "build", "quantize"))
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_BUFFERS = (np.ndarray, np.generic, bytearray, memoryview, array.array)
# Objects behind one function, at most.
_MAX_OBJECTS = 100_000


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
        # 0.0 == -0.0, of which a program computes other numbers.
        exact = value and not isinstance(value, complex)
        return (type(value), value if exact else repr(value))
    return IdentityKey(value)


# By code, the names that it and all code that it reaches contain.
_reached_names: dict[types.CodeType | None, frozenset[str]] = {}


def function_key(fn: Callable[..., Any]) -> tuple[Any, str | None]:
    """Key of a function, and the reason why no program of it may be reused, or None.

    A lambda in a loop is a new function each time, with an equal key. A function with
    another value in its closure has another key.

    Args:
        fn: a function, a method, or another callable.
    """
    code = code_of(fn)
    names = _reached_names.get(code, frozenset())
    while True:
        walk = _Walk(names)
        key = walk.key(fn)
        if not walk.new_names:
            break
        names = names | walk.new_names
        _reached_names[code] = names
        if len(_reached_names) > 4096:
            _reached_names.clear()
    config = keras.config
    settings = (config.floatx(), config.epsilon(), config.image_data_format())
    return (key, settings, config.dtype_policy().name), walk.reason


def code_of(fn: Callable[..., Any]) -> types.CodeType | None:
    """The code that equal lambdas share; None for a callable without Python code."""
    function = getattr(fn, "__func__", fn)
    return getattr(function, "__code__", None)


def random_state() -> Any:
    """The state of the random generators of Python and NumPy."""
    _, numbers, *rest = np.random.get_state()
    return random.getstate(), np.asarray(numbers).tobytes(), rest


class _Walk:
    """Traversal of the values that a function depends on.

    Args:
        names: the names in all code that the function reaches, as far as known.

    Attributes:
        new_names: names in that code that were not known.
        reason: str, why the key is not complete; None if it is.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._every = EVERY in names
        # Visited objects; holding them keeps their ids unique.
        self._seen: dict[Any, tuple[int, Any]] = {}
        self.new_names: set[str] = set()
        self.reason: str | None = None

    def key(self, value: Any) -> Any:
        if isinstance(value, _SCALARS):
            return static_key(value)
        seen = self._seen.get(id(value))
        if seen is not None:
            return ("seen", seen[0])
        count = len(self._seen)
        self._seen[id(value)] = (count, value)
        if count > _MAX_OBJECTS:
            self.reason = f"it reaches more than {_MAX_OBJECTS} objects"
            return None
        kind: Any = type(value)
        return _rule(kind)(self, value)

    def _items(self, items: Iterable[tuple[Any, Any]]) -> Any:
        return tuple(
            [
                (static_key(name), self.key(value))
                for name, value in items
                if not _is_leftover_tracer(value)
            ]
        )

    def _has_no_key(self, value: Any) -> Any:
        self.reason = f"the state of its {type(value).__name__!r} cannot be compared"
        return None

    # Functions and classes.

    def _function(self, fn: Any) -> Any:
        cells = [contents(cell) for cell in fn.__closure__ or ()]
        if is_library(fn.__globals__.get("__name__")):
            inner = [self.key(each) for each in cells if isinstance(each, _FUNCTIONS)]
            return (fn.__code__, *inner) if inner else IdentityKey(fn)
        names, own, imports = names_in(fn.__code__)
        if not names <= self._names:
            self.new_names |= names - self._names
        used = [(name, fn.__globals__[name]) for name in own if name in fn.__globals__]
        package = fn.__globals__.get("__package__") or ""
        for name in imports:
            for path in (name, f"{package}.{name}"):
                if path in sys.modules and not is_library(path):
                    used.append((path, sys.modules[path]))
        return (
            fn.__code__,
            self._items(enumerate(cells)),
            self._items(enumerate(fn.__defaults__ or ())),
            self._items((fn.__kwdefaults__ or {}).items()),
            self._items(used),
            self._attributes(fn),
            IdentityKey(fn.__globals__),
        )

    def _method(self, method: Any) -> Any:
        return (self.key(method.__func__), self.key(method.__self__))

    def _builtin(self, function: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            return IdentityKey(function)
        return (function.__name__, self.key(owner))

    def _partial(self, partial: Any) -> Any:
        parts = (partial.func, partial.args, partial.keywords)
        return tuple(map(self.key, parts))

    def _module(self, module: Any) -> Any:
        if is_library(module.__name__):
            return IdentityKey(module)
        return (IdentityKey(module), self._named(vars(module)))

    def _class(self, kind: Any) -> Any:
        """A class that code names, and so may call."""
        return (self._members(kind), self._members(kind, CONSTRUCTORS))

    def _members(self, kind: Any, also: frozenset[str] = frozenset()) -> Any:
        """The members of a class's Python that code names, or that operators call."""
        if (kind, also) in self._seen:
            return IdentityKey(kind)
        self._seen[kind, also] = (0, kind)
        found: list[Any] = [IdentityKey(kind)]
        base: Any
        for base in user_bases(kind):
            called = called_members(base) | also
            for name, member in list(vars(base).items()):
                if name in self._names or name in called:
                    found.append((name, self.key(unwrapped(member))))
        return tuple(found)

    # Objects.

    def _named(self, attributes: Mapping[str, Any], every: bool = False) -> Any:
        names = self._names
        chosen = [item for item in [*attributes.items()] if every or item[0] in names]
        return self._items(chosen)

    def _attributes(self, value: Any) -> Any:
        state = attributes_of(value)
        return self._named(state, self._every) if state else ()

    def _instance(self, value: Any) -> Any:
        kind = type(value)
        return (IdentityKey(value), self._members(kind), self._attributes(value))

    def _container(self, value: Any) -> Any:
        kind: Any = type(value)
        own = self._instance(value)[1:] if user_bases(kind) else kind
        if isinstance(value, _MAPPINGS):
            return (own, self._items([*value.items()]))
        parts = [self.key(part) for part in [*value] if not _is_leftover_tracer(part)]
        is_set = isinstance(value, (set, frozenset))
        return (own, frozenset(parts) if is_set else tuple(parts))

    def _buffer(self, value: Any) -> Any:
        """Contents of an array, which may change in place."""
        found = np.asarray(value)
        if found.dtype.hasobject:
            return (found.shape, self.key(found.tolist()))
        data = found.tobytes()
        if len(data) > 256:
            data = hashlib.blake2b(data, digest_size=16).digest()
        mask = self.key(value.mask) if isinstance(value, np.ma.MaskedArray) else None
        return (type(value), found.shape, found.dtype, data, mask)

    def _foreign(self, value: Any) -> Any:
        """A tensor or table of another library."""
        try:
            return self._buffer(value)
        except Exception:
            return self._has_no_key(value)

    def _replica_values(self, value: Any) -> Any:
        if isinstance(value, ShardedValues):
            return IdentityKey(value)
        return (type(value), *map(self.key, value.values))

    def _variable(self, variable: Any) -> Any:
        return (IdentityKey(variable), variable.trainable)

    def _generator(self, value: Any) -> Any:
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.RandomState):
            return self.key(value.get_state(legacy=False))
        source = getattr(value, "bit_generator", value)
        return self.key(source.state)

    def _iterator(self, value: Any) -> Any:
        try:
            return self.key(value.__reduce__())
        except TypeError:
            return self._has_no_key(value)

    def _reference(self, value: Any) -> Any:
        return self.key(value())

    def _context_variable(self, value: Any) -> Any:
        return (IdentityKey(value), self.key(value.get(None)))

    def _layer(self, layer: Any) -> Any:
        """The settings of a layer and of those in it; weights are inputs of programs.

        Private attributes are Keras's own, which calls change.
        """
        seen, new, known = self._seen, [layer], []
        for sublayer in sublayers(layer):
            if sublayer is not layer and id(sublayer) in seen:
                known.append(seen[id(sublayer)][0])
            elif sublayer is not layer:
                seen[id(sublayer)] = (len(seen), sublayer)
                new.append(sublayer)
        found = [(trainable_switches(e), self._settings(e, True)) for e in new]
        return (*known, *found)

    def _keras_object(self, value: Any) -> Any:
        return self._settings(value, is_layer=False)

    def _settings(self, value: Any, is_layer: bool) -> Any:
        """An object of Keras: its settings, and what is the user's own."""
        kind: Any = type(value)
        names = self._names
        is_own = bool(user_bases(kind))
        every = is_own and self._every
        plain: list[Any] = [IdentityKey(value), self._members(kind) if is_own else None]
        others: list[Any] = []
        for name, own in list(vars(value).items()):
            own_kind: Any = type(own)
            is_public = not is_layer or name[0] != "_" or name in names
            if not is_public and not is_own and name != "_dtype_policy":
                continue
            if own_kind in _EXACT:
                if is_public and name != "built":
                    plain += (name, own_kind, own)
            elif name in names or _is_setting(own_kind) or (every and is_public):
                others.append((name, own))
        plain.append(self._items(item for item in others if item[0] not in _INTERNAL))
        return tuple(plain)

    def _constant(self, value: Any) -> Any:
        return IdentityKey(value)


@functools.lru_cache(maxsize=4096)
def _rule(kind: Any) -> Callable[[_Walk, Any], Any]:
    """The key of objects of a class."""
    rules: Sequence[tuple[Any, Callable[[_Walk, Any], Any]]] = (
        ((jax.Array, keras.DTypePolicy), _Walk._constant),
        (keras.Variable, _Walk._variable),
        (keras.Layer, _Walk._layer),
        (DistributedValues, _Walk._replica_values),
        (_BUFFERS, _Walk._buffer),
        (types.FunctionType, _Walk._function),
        (types.MethodType, _Walk._method),
        (types.BuiltinFunctionType, _Walk._builtin),
        (functools.partial, _Walk._partial),
        (types.ModuleType, _Walk._module),
        (type, _Walk._class),
        (_CONTAINERS, _Walk._container),
        (
            (random.Random, np.random.RandomState, np.random.Generator),
            _Walk._generator,
        ),
        (np.random.BitGenerator, _Walk._generator),
        (weakref.ref, _Walk._reference),
        (contextvars.ContextVar, _Walk._context_variable),
        (io.IOBase, _Walk._constant),
    )
    for kinds, rule in rules:
        if issubclass(kind, kinds):
            return rule
    library = kind.__module__.partition(".")[0]
    if any(base.__module__.partition(".")[0] == "keras" for base in kind.__mro__):
        return _Walk._keras_object
    if user_bases(kind):
        return _Walk._instance
    if library in ("jax", "jaxlib", "keras_strategies"):
        return _Walk._constant
    if hasattr(kind, "__array__"):
        return _Walk._foreign
    return _Walk._iterator if hasattr(kind, "__next__") else _Walk._instance


@functools.lru_cache(maxsize=4096)
def _is_setting(kind: Any) -> bool:
    """Whether an attribute of a Keras object is a setting, and not its bookkeeping."""
    weights = (keras.Variable, keras.Layer, jax.Array, keras.KerasTensor)
    if issubclass(kind, (*weights, keras.Initializer, keras.InputSpec)):
        return False
    kinds = (*_SCALARS, *_FUNCTIONS, tuple, np.ndarray)
    own = kind.__module__.partition(".")[0] == "keras" or bool(user_bases(kind))
    return issubclass(kind, kinds) or (own and not issubclass(kind, _CONTAINERS))


def _is_leftover_tracer(value: Any) -> bool:
    """Whether a value is a leftover of an earlier trace, such as an appended tracer."""
    return isinstance(value, jax.core.Tracer)
