"""The settings of calls of a layer, by which its proofs are found again."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import own_layers, sublayers
from keras_strategies.rows.python_state import (
    ASSIGNED_BY_TRAINING,
    OF_TENSORFLOW,
    PLAIN,
    attributes_of_layers,
    contents_of_cells,
    is_array_of_keras,
    is_of_framework,
)

#: Objects in objects, and in containers, at most so deep.
_DEEPEST = 6
_IDENTICAL = (keras.Variable, types.ModuleType, type)
_CONTAINERS = (list, tuple, dict, set, frozenset)


class _Attributes(NamedTuple):
    """The attributes of a layer, as they were.

    Args:
        space: its `vars`.
        length: how many attributes it has.
        values_of: the values of those that may be settings.
        values: what they were.
        held: those that may change in themselves, and what they held.
        layers: the list of the layers in it, to which one may be added.
        layers_before: a copy of it.
    """

    space: dict[str, Any]
    length: int
    values_of: Callable[[Any], tuple[Any, ...]]
    values: tuple[Any, ...]
    held: tuple[tuple[Any, Any], ...]
    layers: list[Any]
    layers_before: list[Any]


class LayerSettings:
    """Numbers for the settings of a layer's calls: equal settings have equal ones.

    That are the attributes of the layer and of layers in it which are plain values or
    functions, and such in containers and objects that they hold.
    """

    def __init__(self) -> None:
        self._known: dict[Any, int] = {}
        self._attributes: list[_Attributes] = []
        self._number = -1

    @property
    def count(self) -> int:
        """How many different settings there were."""
        return len(self._known)

    def number(self, layer: Any) -> int:
        """The number of the current settings; fast where nothing was assigned."""
        if self._number < 0 or not all(map(_is_same, self._attributes)):
            layers = sublayers(layer)
            self._attributes = [_attributes(each) for each in layers]
            key = tuple(map(_settings, layers))
            self._number = self._known.setdefault(key, len(self._known))
        return self._number


def argument_key(value: Any) -> Any:
    """A hashable for an argument of a call that is no tensor: equal for an equal one.

    Functions with the same code and the same values around them are equal.
    """
    return type(value), _token(value, 0)


def _is_same(attributes: _Attributes) -> bool:
    space, length, values_of, before, held, layers, layers_before = attributes
    if len(space) != length or layers != layers_before:
        return False
    try:
        values = values_of(space)
    except KeyError:
        return False
    if not all(map(operator.is_, values, before)):
        return False
    return not held or all(_token(value, 0) == token for value, token in held)


def _attributes(layer: Any) -> _Attributes:
    space = vars(layer)
    names = [name for name, value in space.items() if _may_be_setting(name, value)]
    # Two, so that the values are a tuple.
    read = [*names, *[next(iter(space))] * max(0, 2 - len(names))]
    values_of = operator.itemgetter(*read)
    held = [(space[name], _token(space[name], 0)) for name in names]
    return _Attributes(
        space,
        len(space),
        values_of,
        values_of(space),
        tuple(pair for pair in held if _may_change(pair[0])),
        own_layers(layer),
        list(own_layers(layer)),
    )


def _may_be_setting(name: str, value: Any) -> bool:
    if name in ASSIGNED_BY_TRAINING or name.startswith(OF_TENSORFLOW):
        return False
    return name not in attributes_of_layers() or isinstance(value, PLAIN)


def _may_change(value: Any) -> bool:
    """Whether a value may hold others later; tuples of plain values may not."""
    if isinstance(value, (*PLAIN, *_IDENTICAL, keras.layers.Layer)):
        return False
    if isinstance(value, (tuple, frozenset)):
        return any(map(_may_change, value))
    if isinstance(value, types.FunctionType):
        return bool(value.__closure__)
    return isinstance(value, _CONTAINERS) or not _is_of_libraries(value)


def _is_of_libraries(value: Any) -> bool:
    is_of_keras = type(value).__module__.partition(".")[0] == "keras"
    return is_of_keras or is_of_framework(value)


def _settings(layer: Any) -> Any:
    return (
        id(layer),
        layer.trainable,
        layer.dtype_policy.name,
        tuple(
            (name, _token(value, 0))
            for name, value in list(vars(layer).items())
            if _may_be_setting(name, value)
        ),
    )


class _Identity:
    """An object that is equal to itself only, and stays while it is a key."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _token(value: Any, depth: int) -> Any:
    """A hashable of a value: equal if calls that read it are the same."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, (keras.layers.Layer, keras.Variable)) or depth > _DEEPEST:
        return id(value)  # They live as long as the layer that has them.
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), hash(value.tobytes())
    if isinstance(value, types.FunctionType):
        return (
            value.__code__,
            _token(contents_of_cells(value), depth + 1),
            value.__defaults__ is None,
        )
    if isinstance(value, dict):
        return "dict", tuple(
            (str(key), _token(each, depth + 1)) for key, each in list(value.items())
        )
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_token(each, depth + 1) for each in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_token(each, depth + 1) for each in value)
    if isinstance(value, functools.partial):
        given = value.func, value.args, value.keywords
        return type(value), _token(given, depth + 1)
    if isinstance(value, types.MethodType):
        return value.__func__, _token(value.__self__, depth + 1)
    is_one = isinstance(value, _IDENTICAL) or is_array_of_keras(value)
    if is_one or _is_of_libraries(value):
        return _Identity(value)
    return _Identity(type(value)), _token_of_object(value, depth)


def _token_of_object(value: Any, depth: int) -> Any:
    space = getattr(value, "__dict__", None)
    names: Sequence[str] = [
        name
        for kind in type(value).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, types.MemberDescriptorType) and hasattr(value, name)
    ]
    if not isinstance(space, dict) and not names:
        return _Identity(value)
    held = [(name, getattr(value, name)) for name in names]
    held += list(space.items()) if isinstance(space, dict) else []
    return tuple((name, _token(each, depth + 1)) for name, each in held)
