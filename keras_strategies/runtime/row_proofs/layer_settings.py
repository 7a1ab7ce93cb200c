"""The attributes of layers that determine their calls."""

from __future__ import annotations

import operator
import types
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.runtime.row_proofs.function_names import (
    FunctionNames,
    Read,
    functions_of_class,
)
from keras_strategies.runtime.row_proofs.python_state import (
    attributes_of_layers,
    is_object_of_user,
    is_of_user,
    slots_of,
)

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
#: First letters of attributes of this library, and of TensorFlow's checkpoints.
_OF_FRAMEWORKS = ("_keras_strategies", "__keras_strategies", "_self_")
#: Longer containers and arrays are not settings, but data.
_MOST_ENTRIES = 256
#: Objects in objects of the user's, at most so deep.
_DEEPEST = 4
#: Attributes that calls and training of Keras 3.15 assign; no call depends on them.
_OF_TRAINING = frozenset(
    [
        "_called",
        "_compile_config",
        "_compile_loss",
        "_compile_metrics",
        "_compiled_trainable_state",
        "_distribute_strategy",
        "_eval_epoch_iterator",
        "_initial_epoch",
        "_jit_compile",
        "_loss_ids",
        "_loss_tracker",
        "_metrics",
        "_run_eagerly",
        "built",
        "compiled",
        "history",
        "loss",
        "optimizer",
        "predict_function",
        "steps_per_execution",
        "stop_evaluating",
        "stop_predicting",
        "stop_training",
        "test_function",
        "train_function",
        "unrolled_steps_per_execution",
    ]
)


@dataclass
class _Attributes:
    """The attributes of a layer, as they were.

    Args:
        space: its `vars`.
        count: how many attributes it has.
        values_of: the values of those that may be settings.
        values: what they were.
    """

    space: dict[str, Any]
    count: int
    values_of: Callable[[Any], tuple[Any, ...]]
    values: tuple[Any, ...]

    @property
    def are_same(self) -> bool:
        if len(self.space) != self.count:
            return False
        try:
            values = self.values_of(self.space)
        except KeyError:
            return False
        return all(map(operator.is_, values, self.values))


class LayerSettings:
    """Settings of the calls of a layer; a number tells whether they have changed.

    That are flags, functions and plain values among the attributes of the layer, of
    layers in it, and of objects of the user's classes and containers that they hold;
    and those of modules and closures that the user's functions among them refer to.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Any):
        self._layer = layer
        self._known: dict[Any, int] = {}
        self._attributes: list[_Attributes] = []
        # Containers and objects that the attributes hold, and their entries.
        self._held: list[tuple[Any, tuple[Any, ...]]] = []
        # Of modules and closures.
        self._reads: list[Read] = []
        self._number = -1

    def number(self) -> int:
        """The number of the current settings; equal settings have equal numbers.

        Fast where nothing was assigned since the last call.
        """
        if self._number < 0 or not self._is_same():
            layers = sublayers(self._layer)
            self._attributes = [_attributes(vars(each)) for each in layers]
            self._held.clear()
            key = (*map(self._settings_of, layers), self._of_functions(layers))
            self._number = self._known.setdefault(key, len(self._known))
        return self._number

    @property
    def count(self) -> int:
        """How many different settings there were."""
        return len(self._known)

    def _is_same(self) -> bool:
        if not all(each.are_same for each in self._attributes):
            return False
        if not all(each.are_same for each in self._reads):
            return False
        for value, before in self._held:
            entries = tuple(_entries(value))
            if len(entries) != len(before) or not all(
                map(_is_same_entry, entries, before)
            ):
                return False
        return True

    def _settings_of(self, layer: Any) -> Any:
        """The settings among a layer's attributes, and its flags."""
        return (
            id(layer),
            layer.trainable,
            layer.dtype_policy.name,
            tuple(
                (name, token)
                for name, value in vars(layer).items()
                if _may_be_setting(name, value)
                and (token := self._token(value, 0)) is not None
            ),
            tuple(map(self._token_of_class, filter(is_of_user, type(layer).__mro__))),
        )

    def _of_functions(self, layers: Sequence[Any]) -> Any:
        """What functions of the user's refer to in modules and closures."""
        names = FunctionNames(_functions_of(layers))
        self._reads = names.reads
        found = []
        for value in names.values:
            is_class = isinstance(value, type)
            found.append(
                self._token_of_class(value) if is_class else self._token(value, 0)
            )
        return tuple(found)

    def _token_of_class(self, kind: Any) -> Any:
        entries = tuple(_entries(kind))
        self._held.append((kind, entries))
        names, values = entries[::2], entries[1::2]
        return kind, tuple(
            (name, type(value), value)
            for name, value in zip(names, values, strict=True)
            if isinstance(value, _PLAIN) and not name.startswith("__")
        )

    def _token(self, value: Any, depth: int) -> Any:
        """A hashable that is equal for an equal setting; None for no setting."""
        if isinstance(value, _PLAIN):
            # A type beside it: 1, 1.0 and True are equal.
            return type(value), value
        if isinstance(value, (keras.layers.Layer, keras.Variable)):
            return None
        if isinstance(value, np.ndarray):
            if value.size > _MOST_ENTRIES or value.dtype.hasobject:
                return None
            self._held.append((value, tuple(_entries(value))))
            return value.shape, value.dtype.str, value.tobytes()
        if isinstance(value, _CONTAINERS) or is_object_of_user(value):
            is_open = depth < _DEEPEST and not (
                isinstance(value, _CONTAINERS) and len(value) > _MOST_ENTRIES
            )
            if not is_open:
                return _Identity(value)
            entries = tuple(_entries(value))
            self._held.append((value, entries))
            tokens = [self._token(each, depth + 1) for each in entries]
            in_order = frozenset if isinstance(value, (set, frozenset)) else tuple
            own = _Identity(value) if callable(value) else None
            return type(value), own, in_order(tokens)
        return _Identity(value) if callable(value) else None


def _functions_of(layers: Sequence[Any]) -> Iterator[types.FunctionType]:
    """The functions of the user's in layers, their classes and what they hold."""
    seen: set[int] = set()

    def of_class(kind: Any) -> Iterator[types.FunctionType]:
        for each in filter(is_of_user, kind.__mro__):
            if id(each) not in seen:
                seen.add(id(each))
                yield from functions_of_class(each)

    def of_value(value: Any, depth: int) -> Iterator[types.FunctionType]:
        if isinstance(value, types.FunctionType):
            yield value
        elif isinstance(value, types.MethodType):
            yield from of_value(value.__func__, depth)
        elif is_object_of_user(value) and depth < _DEEPEST:
            yield from of_class(type(value))
            if not isinstance(value, (keras.layers.Layer, keras.Variable)):
                yield from of_entries(value, depth)
        elif isinstance(value, _CONTAINERS) and depth < _DEEPEST:
            yield from of_entries(value, depth)

    def of_entries(value: Any, depth: int) -> Iterator[types.FunctionType]:
        if not isinstance(value, _CONTAINERS) or len(value) <= _MOST_ENTRIES:
            for each in list(_entries(value)):
                yield from of_value(each, depth + 1)

    for layer in layers:
        yield from of_class(type(layer))
        for name, value in list(vars(layer).items()):
            if _may_be_setting(name, value):
                yield from of_value(value, 0)


def _attributes(space: dict[str, Any]) -> _Attributes:
    names = [name for name, value in space.items() if _may_be_setting(name, value)]
    # Two, so that the values are a tuple.
    names += [next(iter(space))] * max(0, 2 - len(names))
    values_of = operator.itemgetter(*names)
    return _Attributes(space, len(space), values_of, values_of(space))


def _may_be_setting(name: str, value: Any) -> bool:
    if name in _OF_TRAINING or name.startswith(_OF_FRAMEWORKS):
        return False
    return name not in attributes_of_layers() or _is_flag(value)


def _is_flag(value: Any) -> bool:
    is_layer = isinstance(value, (keras.layers.Layer, keras.Variable))
    return isinstance(value, _PLAIN) or (callable(value) and not is_layer)


def _entries(value: Any) -> Iterator[Any]:
    """What a container or an object holds, in an order of its own."""
    if isinstance(value, np.ndarray):
        yield str(value.shape).encode() + value.tobytes()
    elif isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield each
    elif isinstance(value, _CONTAINERS):
        yield from value
    else:
        for name, each in getattr(value, "__dict__", {}).items():
            if not name.startswith(_OF_FRAMEWORKS):
                yield name
                yield each
        for name, each in slots_of(value).items():
            yield name
            yield each


def _is_same_entry(now: Any, before: Any) -> bool:
    # Those of arrays are made anew.
    return now is before or (isinstance(now, bytes) and now == before)


class _Identity:
    """Equal for one object only, which it keeps."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
