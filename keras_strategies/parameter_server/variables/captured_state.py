"""Objects that a function refers to, and whether they have changed."""

from __future__ import annotations

import functools
import io
import types
from collections.abc import Iterable, Iterator
from typing import Any

import cloudpickle
import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.keras_compat.saving.pickling import is_keras_object
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.parameter_server.variables.object_pickling import WorkerValue
from keras_strategies.runtime.compiled_functions import original_function
from keras_strategies.strategies.base.strategy import Strategy

#: Bytes of a pickle up to which the objects are compared at each call.
_MOST_BYTES = 16 << 10
#: Bytes of an array up to which its numbers are compared.
_MOST_ARRAY_BYTES = 4 << 10

# Kinds of objects that only pickle has to look at.
_PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), tuple, list, dict)
)


class CapturedState:
    """The objects that a function refers to: closure, globals, defaults, `self`.

    Contents of Python objects and of small arrays are compared, `trainable` of layers
    and variables, and changes in place of Torch tensors. Larger objects, other
    attributes of Keras objects and what cannot be pickled are not.

    Args:
        function: callable.
        opaque: objects whose own changes do not count.
    """

    def __init__(self, function: Any, opaque: Iterable[Any] = ()):
        self._opaque = tuple(opaque)
        #: Number of earlier states that the function has had.
        self.resent = 0
        self._tensors: list[tuple[Any, Any]] = []
        self._keys = self._read(function, self._tensors)
        self._is_small = sum(map(len, self._keys.values())) <= _MOST_BYTES

    def changes(self, function: Any) -> list[str]:
        """Names of objects that have changed; none of those that are not compared."""
        if not self._is_small:
            return []
        found = self._read(function, [])
        names = {**self._keys, **found}
        return [name for name in names if found.get(name) != self._keys.get(name)]

    def changed_tensors(self) -> list[Any]:
        """Torch tensors that have been changed in place."""
        return [each for each, before in self._tensors if _tensor_state(each) != before]

    def forget_tensors(self) -> None:
        """Holds no reference to a tensor."""
        self._tensors.clear()

    def _read(self, function: Any, tensors: list[tuple[Any, Any]]) -> dict[str, bytes]:
        found = {}
        for name, value in _captured(function):
            file = io.BytesIO()
            pickler = _StatePickler(file, self._opaque)
            try:
                pickler.dump(value)
            except Exception:  # Pickling runs the objects' own code.
                found[name] = repr(id(value)).encode()
            else:
                found[name] = file.getvalue()
            tensors += pickler.tensors
        return found


class _StatePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles Keras objects, tensors and large arrays as their identities.

    Args:
        file: binary file to write to.
        opaque: objects that are pickled as their identities too.
    """

    def __init__(self, file: Any, opaque: tuple[Any, ...]):
        super().__init__(file)
        self._opaque = set(map(id, opaque))
        #: Pairs of a Torch tensor and its state.
        self.tensors: list[tuple[Any, Any]] = []

    def persistent_id(self, made: Any) -> Any:
        if type(made) in _PLAIN:
            return None
        if id(made) in self._opaque:
            return id(made)
        if isinstance(made, keras.Variable):
            return id(made), bool(made.trainable)
        if isinstance(made, keras.Layer):
            # As one object: pickle calls this method for each of a tuple.
            return id(made), bytes(each.trainable for each in sublayers(made))
        if isinstance(made, np.ndarray):
            return id(made) if made.nbytes > _MOST_ARRAY_BYTES else None
        if isinstance(made, (type, WorkerValue, Strategy)) or is_keras_object(made):
            return id(made)
        if keras.ops.is_tensor(made):
            state = _tensor_state(made)
            if state is not None:
                self.tensors.append((made, state))
            return id(made), state
        if callable(made):
            original = original_function(made)
            return None if original is made else id(original)
        return None


def _tensor_state(tensor: Any) -> Any:
    return parameter_server_engine().tensor_state(tensor)


def _captured(function: Any) -> Iterator[tuple[str, Any]]:
    """Names and objects that a callable refers to."""
    function = original_function(function)
    if isinstance(function, types.MethodType):
        yield "self", function.__self__
        yield from _captured(function.__func__)
    elif isinstance(function, functools.partial):
        yield "the arguments of `functools.partial`", (function.args, function.keywords)
        yield from _captured(function.func)
    elif isinstance(function, types.FunctionType):
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            try:
                yield name, cell.cell_contents
            except ValueError:  # Not assigned yet.
                continue
        for name in _global_names(function.__code__):
            value = function.__globals__.get(name)
            if value is not None and not isinstance(value, types.ModuleType):
                yield name, value
        yield "its default arguments", (function.__defaults__, function.__kwdefaults__)
    else:
        yield "itself", function


def _global_names(code: types.CodeType) -> list[str]:
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= dict.fromkeys(_global_names(constant))
    return list(names)
