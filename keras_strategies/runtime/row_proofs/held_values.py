"""Values of Python that code can reach: tokens that are equal for equal values.

A token is made of all that a value holds. Objects that change without an assignment
that can be found by a comparison, such as queues, are named as a problem.
"""

from __future__ import annotations

import enum
import functools
import itertools
import operator
import os
import queue
import sys
import types
import weakref
from collections import ChainMap, UserDict, UserList, UserString, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.runtime.row_proofs.python_state import (
    is_installed,
    is_object_of_user,
    is_of_user,
    package_of,
    slots_of,
)

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
#: First letters of attributes of this library, of TensorFlow's checkpoints, of `abc`.
OF_FRAMEWORKS = ("_keras_strategies", "__keras_strategies", "_self_", "_abc_")
#: Entries of all containers and objects that are compared in each call.
_MOST_ENTRIES = 1 << 18
#: Bytes of an array that is compared in each call. Larger ones are data.
_LARGEST_ARRAY = 1 << 20
#: Returns what a value holds.
_Reader = Callable[[Any], tuple[Any, ...]]
_LRU_CACHE = type(functools.lru_cache(lambda: None))
_METHODS = (
    types.FunctionType,
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
)
#: What objects of Python hold besides attributes.
_ENTRIES: dict[type, Callable[[Any], Iterable[Any]]] = {
    UserDict: lambda value: [value.data],
    UserList: lambda value: [value.data],
    UserString: lambda value: [value.data],
    ChainMap: lambda value: value.maps,
    types.MappingProxyType: lambda value: _of_mapping(value),
    type(os.environ): lambda value: _of_mapping(value),
    functools.partial: lambda value: [value.func, value.args, value.keywords],
    types.MethodType: lambda value: [value.__func__, value.__self__],
    _LRU_CACHE: lambda value: [value.__wrapped__],
    weakref.ref: lambda value: [value()],
    ContextVar: lambda value: [value.get(None)],
    queue.Queue: lambda value: [value.queue],
    # Those of Keras hold functions of the user's.
    keras.losses.Loss: lambda value: _of_mapping(vars(value)),
    keras.metrics.Metric: lambda value: _of_mapping(vars(value)),
}
_TYPES_WITH_ENTRIES = tuple(_ENTRIES)
#: Modules of Python whose objects do not change, or have no state that a call reads.
_WITHOUT_STATE = frozenset(
    [
        *("_abc", "_random", "_struct", "_weakref", "abc", "array", "ast", "builtins"),
        *("collections", "contextlib", "copyreg", "dataclasses", "datetime", "decimal"),
        *("enum", "fractions", "functools", "importlib", "inspect", "io", "_io"),
        *("itertools", "logging", "numbers", "operator", "pathlib", "random", "re"),
        *("string", "struct", "time", "types", "typing", "uuid", "warnings"),
        "zoneinfo",
    ]
)
#: Locks: what they protect is found by itself.
_WITHOUT_STATE_IN_THREADS = frozenset(
    ["lock", "RLock", "_RLock", "Condition", "Event", "Semaphore", "Thread"]
)


class HeldValues:
    """Tokens of values, and whether what they hold has changed since.

    Args:
        layers: the layers that are looked at anyway.

    Attributes:
        layers: these, and further ones that values hold.
        problem: str, the first value whose changes cannot be found, as the end of a
            sentence; "" without one.
    """

    def __init__(self, layers: Iterable[Any] = ()):
        self.layers = list(layers)
        self.problem = ""
        self._numbers = {id(layer): i for i, layer in enumerate(self.layers)}
        self._seen: dict[int, int] = {}
        self._held: list[tuple[_Reader, Any, tuple[Any, ...]]] = []
        self._count = 0

    def is_same(self) -> bool:
        """Whether containers and objects hold what they held."""
        for read, value, before in self._held:
            entries = read(value)
            if len(entries) != len(before) or not (
                all(map(operator.is_, entries, before))
                or all(map(_is_same_entry, entries, before))
            ):
                return False
        return True

    def token(self, value: Any) -> Any:
        """A hashable that is equal for an equal value; None for no setting."""
        if isinstance(value, PLAIN):
            # A type beside it: 1, 1.0 and True are equal.
            return type(value), value
        if isinstance(value, np.generic):
            return type(value), value.tobytes()
        if isinstance(value, keras.layers.Layer):
            return self._token_of_layer(value)
        if isinstance(value, keras.Variable):
            return type(value), tuple(value.shape), value.dtype, value.trainable
        if keras.ops.is_tensor(value):
            # Another one of this kind is treated alike: its values permit nothing.
            needs_gradient = getattr(value, "requires_grad", False)
            return type(value), str(value.shape), value.dtype, needs_gradient
        if isinstance(value, enum.Enum):
            return Identity(value)
        if isinstance(value, np.ndarray):
            return self._token_of_array(value)
        if isinstance(value, types.FunctionType) and is_of_user(value):
            # What it refers to is found by `FunctionNames`.
            own = self._token_of_entries(vars(value)) if vars(value) else None
            return value.__code__, own
        is_own = is_object_of_user(value) and not is_installed(type(value))
        if holds_values(value) or is_own:
            return self._token_of_entries(value)
        self._check_state(value)
        return Identity(value) if callable(value) else None

    def token_of_name(self, value: Any) -> Any:
        """That of a value that code of an installed package finds by its name."""
        return self.token(value) if isinstance(value, (*PLAIN, np.generic)) else None

    def token_of_class(self, kind: Any) -> Any:
        """That of the attributes of a user's class."""
        entries = self._hold(kind)
        names, values = entries[::2], entries[1::2]
        return kind, tuple(
            (
                name,
                Identity(value) if isinstance(value, _METHODS) else self.token(value),
            )
            for name, value in zip(names, values, strict=True)
            if is_setting_of_class(name, value)
        )

    def _token_of_layer(self, layer: Any) -> Any:
        if id(layer) not in self._numbers:
            for each in sublayers(layer):
                if id(each) not in self._numbers:
                    self._numbers[id(each)] = len(self.layers)
                    self.layers.append(each)
        return keras.layers.Layer, self._numbers.get(id(layer))

    def _token_of_array(self, value: np.ndarray) -> Any:
        if value.nbytes > _LARGEST_ARRAY or value.dtype.hasobject:
            return None
        self._hold(value)
        return value.shape, value.dtype.str, value.tobytes()

    def _token_of_entries(self, value: Any) -> Any:
        number = self._seen.get(id(value))
        if number is not None:
            return "seen", number
        self._seen[id(value)] = len(self._seen)
        if self._count > _MOST_ENTRIES:
            return Identity(value)
        entries = self._hold(value)
        tokens = [self.token(each) for each in entries]
        in_order = frozenset if isinstance(value, (set, frozenset)) else tuple
        own = Identity(value) if _is_function(value) else None
        return type(value), own, in_order(tokens)

    def _hold(self, value: Any) -> tuple[Any, ...]:
        read = _reader_of(value)
        entries = read(value)
        self._held.append((read, value, entries))
        self._count += len(entries)
        if self._count > _MOST_ENTRIES:
            self._reject(
                f"its code can reach more than {_MOST_ENTRIES:,} values of Python, "
                "which are too many to compare in each call; hold them in an array"
            )
        return entries

    def _check_state(self, value: Any) -> None:
        kind = type(value)
        package = package_of(kind)
        if package not in sys.stdlib_module_names or package in _WITHOUT_STATE:
            return
        if kind.__name__ not in _WITHOUT_STATE_IN_THREADS:
            self._reject(
                f"its code can reach a `{kind.__module__}.{kind.__name__}`, whose "
                "changes a proof cannot follow; hold what changes in an attribute"
            )

    def _reject(self, problem: str) -> None:
        self.problem = self.problem or problem


class Identity:
    """Equal for one object only, which it keeps."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def holds_values(value: Any) -> bool:
    """Whether it is a container or another object of Python with entries."""
    return isinstance(value, (*_CONTAINERS, *_TYPES_WITH_ENTRIES))


def entries_of(value: Any) -> tuple[Any, ...]:
    """What a container or an object holds, in an order of its own."""
    return _reader_of(value)(value)


def _reader_of(value: Any) -> _Reader:
    """What reads the entries of a value; always the same for its type."""
    kind = type(value)
    # Without attributes, as most values.
    if kind is list or kind is tuple:
        return tuple
    if kind is dict:
        return _of_mapping
    return _of_class if isinstance(value, type) else _of_object


def _of_class(value: type) -> tuple[Any, ...]:
    return _of_mapping(vars(value))


def _of_object(value: Any) -> tuple[Any, ...]:
    return (*_contents(value), *_attributes(value))


def _contents(value: Any) -> Iterable[Any]:
    """What a container, an array or another object of Python holds."""
    if isinstance(value, np.ndarray):
        return (str(value.shape).encode() + value.tobytes(),)
    if isinstance(value, dict):
        return _of_mapping(value)
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, _TYPES_WITH_ENTRIES):
        kind = next(k for k in _TYPES_WITH_ENTRIES if isinstance(value, k))
        return _ENTRIES[kind](value)
    return ()


def _attributes(value: Any) -> Iterator[Any]:
    """The attributes of an object; containers of the user's classes have some, too."""
    for name, each in list(getattr(value, "__dict__", {}).items()):
        if not name.startswith(OF_FRAMEWORKS):
            yield name
            yield each
    for name, each in slots_of(value).items():
        yield name
        yield each


def is_setting_of_class(name: str, value: Any) -> bool:
    """Whether an attribute of a user's class is a method, or data of it."""
    if isinstance(value, _METHODS):
        return True
    if name.startswith(("__", *OF_FRAMEWORKS)):
        return False
    if isinstance(value, (*PLAIN, *_CONTAINERS, np.ndarray, np.generic)):
        return True
    return is_object_of_user(value) and is_of_user(type(value))


def _of_mapping(value: Mapping[Any, Any]) -> tuple[Any, ...]:
    return tuple(itertools.chain.from_iterable(list(value.items())))


def _is_function(value: Any) -> bool:
    """Whether it is called by an identity that its entries do not show."""
    return callable(value) and not isinstance(value, _TYPES_WITH_ENTRIES)


def _is_same_entry(now: Any, before: Any) -> bool:
    # Those of arrays, and of the environment, are made by each read.
    is_text = isinstance(now, (bytes, str)) and type(now) is type(before)
    return now is before or (is_text and now == before)
