"""Attributes of layers: what a call changes, and what its proof depends on.

A proof calls the layer once more, and replicas of a process call it once each. A layer
that counts its calls in an attribute would see both. So attributes of the layer, of
layers in it and of objects that they hold are compared before and after, and restored.
What else a call reads or changes (globals, closures, classes, files) is the user's, as
for `jax.jit`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import random
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import own_layers, sublayers
from keras_strategies.rows.row_tensors import is_array

#: Generators of random numbers, of which each replica would draw.
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SKIPPED = (keras.Variable, keras.Operation, keras.KerasTensor, type, types.ModuleType)
_SEQUENCES = (list, tuple, set, frozenset, deque, bytearray)
#: Objects in objects, and in containers, at most so deep.
_DEEPEST = 6
#: Entries of containers with more are not followed.
_MOST_ENTRIES = 256
#: A strategy has connections, which change at any time.
_LIBRARIES = frozenset(
    ["jax", "jaxlib", "keras", "keras_strategies", "tensorflow", "torch"]
)
#: What TensorFlow notes in layers for its checkpoints.
_OF_TENSORFLOW = "_self_"
#: Attributes that training assigns, beside those of every model.
_OF_TRAINING = """
    _compile_config _compiled_trainable_state _distribute_strategy _dropout_mask
    _eval_epoch_iterator _jax_state _jax_state_synced _recurrent_dropout_mask history
    optimizer stop_evaluating stop_predicting stop_training unrolled_steps_per_execution
"""


@functools.cache
def _flags_of_keras() -> frozenset[str]:
    """The attributes of every layer on which a call may depend, if they are plain."""
    return frozenset(vars(keras.layers.Layer()).keys() - {"_called", "built"})


@functools.cache
def _attributes_of_keras() -> frozenset[str]:
    """The attributes of Keras's that every layer, or every model, has."""
    every = vars(keras.layers.Layer()).keys() | vars(keras.Model()).keys()
    return frozenset(every).union(_OF_TRAINING.split())


def _is_of_keras(name: Any) -> bool:
    """Whether calls of Keras's layers, or training, may assign an attribute."""
    return isinstance(name, str) and (
        name in _attributes_of_keras() or name.startswith(_OF_TENSORFLOW)
    )


def _is_fixed(value: Any, libraries: frozenset[str] = _LIBRARIES) -> bool:
    """Whether a value is plain, or an object of Keras, a framework or a strategy."""
    if isinstance(value, (dict, *_SEQUENCES)):
        return False
    is_of_library = type(value).__module__.partition(".")[0] in libraries
    return is_of_library or isinstance(value, (*_PLAIN, *_SKIPPED))


def _may_change(value: Any) -> bool:
    """Whether a value may hold others later; tuples of plain values may not."""
    if isinstance(value, (tuple, frozenset)):
        return any(map(_may_change, value))
    return bool(_cells(value)) if inspect.isfunction(value) else not _is_fixed(value)


# What a call changes.


def _refill(value: Any, before: Any) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(before)


def _set_items(value: dict[Any, Any], before: dict[Any, Any]) -> None:
    for name in value.keys() - before.keys():
        del value[name]
    value.update(before)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, in `__dict__` and `__slots__`."""
    state = object.__getstate__(value)
    spaces = state if isinstance(state, tuple) else (state,)
    return {name: each for space in spaces for name, each in (space or {}).items()}


def _set_attributes(value: Any, before: dict[str, Any]) -> None:
    now = _attributes(value)
    for name in now.keys() - before.keys():
        object.__delattr__(value, name)
    for name, each in before.items():
        if now.get(name) is not each:
            object.__setattr__(value, name, each)


def _cells(value: Any) -> list[Any]:
    """The values of the names around a function that it refers to."""
    found = []
    for cell in getattr(value, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # A name that is not assigned yet.
            found.append(cell.cell_contents)
    return found


#: How the contents of containers, and attributes of others, are read and restored.
_CONTENTS: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], None]], ...]
_CONTENTS = (
    (dict, dict, _set_items),
    (np.ndarray, np.copy, np.copyto),
    ((list, deque, bytearray, set), list, _refill),
    (object, _attributes, _set_attributes),
)


def _held(value: Any) -> list[Any]:
    """What an object or container holds."""
    if isinstance(value, (dict, *_SEQUENCES)):
        held = value.values() if isinstance(value, dict) else value
        return list(held) if len(value) <= _MOST_ENTRIES else []
    held = [*_attributes(value).values(), *_cells(value)]
    if isinstance(value, functools.partial):
        held += [*value.args, *value.keywords.values()]
    return held


class PythonState:
    """What a call may change: attributes of layers, and what they hold.

    Args:
        layer: the layer.
        arguments: the arguments of its call, and other objects to follow.
    """

    def __init__(self, layer: Any, arguments: Sequence[Any] = ()):
        #: Why changes cannot be found, as the end of a sentence; None if they can.
        self.problem: str | None = None
        self._parts: list[tuple[str, Any, Any, Any, Any]] = []
        self._seen: set[int] = set()
        is_layer = isinstance(layer, keras.layers.Layer)
        for each in sublayers(layer) if is_layer else []:
            self._add_layer(each)
        for each in arguments:
            self._add("an argument", each, 0)

    def _add_layer(self, layer: Any) -> None:
        where = f"of layer {layer.name!r}"
        self._note(where, vars(layer))
        is_own = not type(layer).__module__.startswith("keras.")
        for name, value in list(vars(layer).items()):
            if not _is_of_keras(name):
                self._add(f"{name!r} {where}", value, 0)
            elif is_own and isinstance(value, (list, dict)):
                # Layers and variables that the call makes are tracked there.
                self._note("", value)

    def _note(self, where: str, value: Any) -> None:
        _, read, restore = next(row for row in _CONTENTS if isinstance(value, row[0]))
        self._parts.append((where, value, read, restore, read(value)))

    def _add(self, where: str, value: Any, depth: int) -> None:
        if depth > _DEEPEST or id(value) in self._seen:
            return
        # Objects of Keras, such as losses, hold functions of the user's.
        if _is_fixed(value, _LIBRARIES - {"keras"}):
            return
        self._seen.add(id(value))
        # That of a method.
        value = getattr(value, "__self__", value)
        self._note(where, value)
        if isinstance(value, GENERATORS) or hasattr(value, "__next__"):
            self.problem = (
                f"its code holds an iterator or random numbers in {where}, which each "
                "replica would advance"
            )
        elif not isinstance(value, np.ndarray):
            for each in _held(value):
                self._add(where, each, depth + 1)

    def change(self) -> str | None:
        """What the call has changed, which is restored."""
        found = None
        for where, value, read, restore, before in self._parts:
            now = value if read is dict else read(value)
            changed = _differences(now, before)
            if changed:
                restore(value, before)
            changed = [name for name in changed if not _is_of_keras(name)]
            if where and changed:
                name = f"{changed[0]!r} " if isinstance(changed[0], str) else ""
                found = found or f"its code changes {name}{where}, which each replica "
        return None if found is None else f"{found}would change once"


def _differences(now: Any, before: Any) -> list[Any]:
    """The names of attributes that differ; True for other values."""
    if not isinstance(before, dict):
        now, before = {True: now}, {True: before}
    missing = object()
    pairs = ((k, now.get(k, missing), before.get(k, missing)) for k in now | before)
    return [k for k, a, b in pairs if a is not b and _token(a, 0) != _token(b, 0)]


# What a proof depends on.


class LayerSettings:
    """Numbers for the settings of a layer's calls: equal settings have equal ones.

    That are the attributes of the layer and of layers in it which are plain values or
    functions, and such in containers and objects that they hold.
    """

    def __init__(self) -> None:
        #: The numbers of all settings that there were.
        self.known: dict[Any, int] = {}
        self._before: tuple[tuple[Any, ...], ...] = ()
        self._number = -1

    def number(self, layer: Any) -> int:
        """The number of the current settings; fast where nothing was assigned."""
        if self._number < 0 or not all(map(_is_unchanged, self._before)):
            keys, self._before = zip(*map(_settings, sublayers(layer)), strict=True)
            self._number = self.known.setdefault(keys, len(self.known))
        return self._number


def argument_key(value: Any) -> Any:
    """A hashable for an argument of a call that is no tensor: equal for an equal one.

    Functions with the same code and the same values around them are equal.
    """
    return type(value), _token(value, 0)


def _settings(layer: Any) -> tuple[Any, tuple[Any, ...]]:
    """The settings of a layer, and the attributes and layers that it has them from."""
    space, own = vars(layer), own_layers(layer)
    tokens = {
        name: _token(value, 0)
        for name, value in list(space.items())
        if not _is_of_keras(name)
        or (isinstance(value, _PLAIN) and name in _flags_of_keras())
    }
    # With one name it would return no tuple.
    read = operator.itemgetter(*tokens, next(iter(tokens)))
    held = [(space[x], tokens[x]) for x in tokens if _may_change(space[x])]
    key = id(layer), layer.trainable, layer.dtype_policy.name, tuple(tokens.items())
    return key, (space, len(space), read, read(space), held, own, list(own))


def _is_unchanged(attributes: tuple[Any, ...]) -> bool:
    space, length, read, values, held, layers, layers_before = attributes
    if len(space) != length or layers != layers_before:
        return False
    try:
        is_same = all(map(operator.is_, read(space), values))
    except KeyError:  # An attribute in place of another.
        return False
    if not held or not is_same:
        return is_same
    return all(_token(value, 0) == token for value, token in held)


class _Identity:
    """An object that is equal to itself only, and stays while it is a key."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Identity) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _token(value: Any, depth: int) -> Any:
    """A hashable of a value: equal if calls that read it are the same."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (keras.layers.Layer, keras.Variable)) or depth > _DEEPEST:
        return id(value)  # They live as long as the layer that has them.
    if isinstance(value, np.ndarray):
        return value.shape, str(value.dtype), hash(value.tobytes())
    if isinstance(value, dict):
        items = list(value.items())
        return "dict", tuple((str(key), _token(x, depth + 1)) for key, x in items)
    if isinstance(value, _SEQUENCES):
        every = (_token(each, depth + 1) for each in value)
        is_set = isinstance(value, (set, frozenset))
        return type(value), frozenset(every) if is_set else tuple(every)
    kind: Any = type(value)
    held: Any = None
    if isinstance(value, types.FunctionType):
        kind, held = value.__code__, (_cells(value), value.__defaults__)
    elif isinstance(value, functools.partial):
        held = value.func, value.args, value.keywords
    elif isinstance(value, types.MethodType):
        held = value.__func__, value.__self__
    elif not (is_array(value) or _is_fixed(value)):
        held = _attributes(value)
    return (kind, _token(held, depth + 1)) if held else _Identity(value)
