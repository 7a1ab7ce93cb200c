"""Pickling of Keras objects: identities are preserved, values are not sent.

A model is sent once, as the Python objects that it consists of; later tasks refer to
the same model. Variables are sent as their descriptions, from which the receiving
process creates its own.

# Depth

The layers of a model refer to each other: by recursion, a pickle of a hundred layers
would be some thousand calls deep. So Keras objects are pickled as references, and their
states one after the other, in one stream: a list of the objects without their states,
each state, and the pickled value. Inner objects come before those that refer to them.
"""

from __future__ import annotations

import io
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle
import keras
import numpy as np

from keras_strategies.errors import InvalidTypeError
from keras_strategies.keras_compat.optimizers.optimizer_parts import is_optimizer
from keras_strategies.keras_compat.saving.pickling import (
    class_of,
    container_state,
    fill_container,
    is_keras_object,
    object_state,
    rebuilt,
    renew_identities,
)
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.parameter_server.engines.composite_tensors import reduced
from keras_strategies.parameter_server.variables.tensorflow_objects import (
    tensorflow_reduction,
)
from keras_strategies.parameter_server.variables.weak_numbers import WeakNumbers
from keras_strategies.parameter_server.wire.task_messages import (
    PickledResult,
    WorkerReference,
)
from keras_strategies.parameter_server.wire.variable_description import (
    VariableDescription,
)
from keras_strategies.runtime.compiled_functions import original_function
from keras_strategies.training.strategy_model import set_model_strategy


class WorkerValue:
    """A value that exists once per worker, pickled as a reference to it.

    Args:
        reference: the reference in messages.
    """

    def __init__(self, reference: WorkerReference):
        self.reference = reference


@dataclass(frozen=True)
class PickledObject:
    """A pickled object, and what it refers to.

    Args:
        blob: bytes.
        generation: int, higher for later pickles.
        variables: descriptions of the variables, by number.
        optimizers: list of optimizers.
        worker_values: list of `WorkerValue`.
    """

    blob: bytes
    generation: int
    variables: dict[int, VariableDescription]
    optimizers: list[Any]
    worker_values: list[WorkerValue]

    @property
    def worker_numbers(self) -> tuple[int, ...]:
        """tuple of int, the numbers of the values that exist once per worker."""
        return tuple(value.reference.number for value in self.worker_values)


class UnpicklingContext:
    """Objects of the receiving process, by the numbers of the pickled ones."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.generations: dict[int, int] = {}
        #: Values that exist once per worker, by number.
        self.worker_values: Mapping[int, Any] = {}

    def variable(self, description: VariableDescription) -> Any:
        """The variable with this number."""
        raise NotImplementedError

    def release_objects(self, numbers: Iterable[int]) -> None:
        """Discards objects that the sending process no longer has."""
        for number in numbers:
            self.generations.pop(id(self.objects.pop(number, None)), None)

    def function(self, original: Callable[..., Any]) -> Any:
        """The substitute for a compiled function."""
        return original

    def strategy(self) -> Any:
        """The substitute for the coordinator's strategy."""
        return None


class _Loading(threading.local):
    context: UnpicklingContext | None = None
    generation = 0
    filled: list[Any] | None = None


_loading = _Loading()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles variables as descriptions, and Keras objects with their numbers.

    Args:
        file: binary file to write to.
        describe: callable of a variable that returns its `VariableDescription`.
        number_of: callable of an object that returns its number.
        strategy: replaced by the worker's strategy.

    Attributes:
        objects: list of Keras objects that have been referred to, without duplicates.
    """

    def __init__(
        self,
        file: Any,
        describe: Callable[[Any], VariableDescription],
        number_of: Callable[[Any], int],
        strategy: object,
    ):
        super().__init__(file)
        self._describe = describe
        self._number_of = number_of
        self._strategy = strategy
        self.objects: list[Any] = []
        self.variables: dict[int, VariableDescription] = {}
        self.worker_values: dict[int, WorkerValue] = {}

    def reducer_override(self, made: Any) -> Any:
        if isinstance(made, keras.Variable):
            description = self._describe(made)
            self.variables[description.number] = description
            return _variable, (description,)
        if isinstance(made, WorkerValue):
            self.worker_values[made.reference.number] = made
            return _worker_value, (made.reference.number,)
        # Datasets and iterators are composite tensors too.
        found = tensorflow_reduction(made) or reduced(made)
        if found is not None:
            return found
        if parameter_server_engine().is_framework_variable(made):
            raise InvalidTypeError(
                f"A function or an argument for workers refers to {made.name!r}, a "
                f"{type(made).__name__} of shape {tuple(made.shape)}. A worker would "
                "have a copy, and what it assigns would be lost. Create a "
                "`keras.Variable` in the strategy's scope, which is on parameter "
                "servers, or pass `variable.numpy()`."
            )
        if made is self._strategy:
            return _strategy, ()
        if callable(made) and not isinstance(made, type):
            original = original_function(made)
            if original is not made:
                return _function, (original,)
        if not isinstance(made, type):
            if is_keras_object(made):
                # Pickle remembers it: this is its first reference.
                self.objects.append(made)
                return _object, (self._number_of(made), class_of(made))
            again = rebuilt(made)
            if again is not None:
                return again
            state: Any = container_state(made)
            if state is not None:
                return _empty, (type(made),), state, None, None, _fill
            if type(made).__module__.startswith("tensorflow.python.distribute"):
                return _tensorflow_strategy, ()
        return super().reducer_override(made)


class ObjectPickler:
    """Pickles objects; a Keras object has one number in all messages.

    Args:
        describe: callable of a variable that returns its `VariableDescription`.
        strategy: replaced by the worker's strategy.
    """

    def __init__(
        self, describe: Callable[[Any], VariableDescription], strategy: object
    ):
        self._describe = describe
        self._strategy = strategy
        self._numbers = WeakNumbers()
        self._objects: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )
        self._next_number = itertools.count()
        self._generation = itertools.count()
        self._lock = threading.RLock()

    def number_of(self, made: Any) -> int:
        """The number of a Keras object; other objects never have the same one."""
        with self._lock:
            number = self._numbers.get(made)
            if number is None:
                number = next(self._next_number)
                self._numbers.set(made, number)
                self._objects[number] = made
            return number

    def find(self, number: int) -> Any:
        """The Keras object with a number; None if it no longer exists."""
        return self._objects.get(number)

    def take_released(self) -> list[int]:
        """Numbers of objects that have been garbage-collected since the last call."""
        return self._numbers.take_released()

    def dump(self, value: Any) -> PickledObject:
        """Pickles any object for workers, including Keras objects."""
        try:
            first = self._reached(value)
            # Inner ones first.
            objects = first.objects[::-1]
            file = io.BytesIO()
            pickler = self._pickler(file)
            for each in (objects, *map(object_state, objects), value):
                pickler.dump(each)
        except (TypeError, pickle.PicklingError, AttributeError) as error:
            error.add_note(
                "The function, its arguments or an object that they refer to cannot be "
                "pickled for a worker. Create objects such as locks, files and threads "
                "inside of the function or with `create_per_worker_values`."
            )
            raise
        return PickledObject(
            file.getvalue(),
            next(self._generation),
            # An optimizer is built with them in the order of the model's layers.
            first.variables,
            [made for made in first.objects if is_optimizer(made)],
            list(pickler.worker_values.values()),
        )

    def _reached(self, value: Any) -> _Pickler:
        """A pickler of a value and of its Keras objects, outer ones first."""
        pickler = self._pickler(io.BytesIO())
        pickler.dump(value)
        for found in pickler.objects:  # It grows.
            pickler.dump(object_state(found))
        return pickler

    def _pickler(self, file: Any) -> _Pickler:
        return _Pickler(file, self._describe, self.number_of, self._strategy)


class _ContentsPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles variables and Keras objects as their identities."""

    def reducer_override(self, made: Any) -> Any:
        if isinstance(made, keras.Variable) or is_keras_object(made):
            return id, (id(made),)
        return super().reducer_override(made)


def contents_key(made: Any) -> Hashable:
    """A key that is equal for objects with equal contents and the same Keras objects.

    Args:
        made: an object that exists as long as the key is used.
    """
    file = io.BytesIO()
    try:
        _ContentsPickler(file).dump(made)
    except Exception:  # Pickling runs the object's own code.
        parts = made if isinstance(made, list) else [made]
        return tuple(map(id, parts))
    return file.getvalue()


class _ResultPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles results of functions: classes of scripts by value, variables as arrays.

    Args:
        file: binary file to write to.
        buffers: list that receives the memory of arrays.
    """

    def __init__(self, file: Any, buffers: list[Any]):
        super().__init__(file, protocol=5, buffer_callback=buffers.append)

    def reducer_override(self, made: Any) -> Any:
        if isinstance(made, keras.Variable):
            return _identity, (np.asarray(keras.ops.convert_to_numpy(made)),)
        if is_keras_object(made):
            raise InvalidTypeError(
                f"A scheduled function returned {made!r}, a Keras object of the "
                "worker. Return values instead, such as `metric.result()` or "
                "`layer.get_weights()`: the coordinator has the object already."
            )
        composite = reduced(made)
        if composite is not None:
            return composite
        return super().reducer_override(made)


def dump_result(value: Any) -> PickledResult:
    """Pickles the return value of a function.

    Raises:
        TypeError: if it cannot be pickled.
    """
    file, buffers = io.BytesIO(), list[Any]()
    try:
        _ResultPickler(file, buffers).dump(value)
    except InvalidTypeError:
        raise
    except Exception as error:  # Pickling runs the user's code.
        raise InvalidTypeError(
            f"A scheduled function returned a {type(value).__name__} that cannot be "
            f"sent to the coordinator: {type(error).__name__}: {error}. Return arrays, "
            "numbers, strings or objects that can be pickled."
        ) from error
    return PickledResult(file.getvalue(), tuple(buffers))


def load_result(result: PickledResult) -> Any:
    """Unpickles the return value of a function.

    Raises:
        TypeError: if its class cannot be unpickled in this process.
    """
    try:
        return pickle.loads(result.blob, buffers=result.buffers)
    except Exception as error:  # Unpickling runs the user's code.
        raise InvalidTypeError(
            "The return value of a scheduled function cannot be unpickled by the "
            f"coordinator: {type(error).__name__}: {error}. Return arrays, numbers, "
            "strings or objects of a class that can be unpickled."
        ) from error


def _identity(value: Any) -> Any:
    return value


def load(blob: bytes, context: UnpicklingContext, generation: int) -> Any:
    """Unpickles an object that `ObjectPickler` has pickled.

    Args:
        blob: bytes.
        context: creates variables and stores objects.
        generation: int, higher for later pickles: existing objects take the
            latest state.
    """
    previous = _loading.context, _loading.generation, _loading.filled
    _loading.context, _loading.generation = context, generation
    filled: list[Any] = []
    _loading.filled = filled
    try:
        unpickler = pickle.Unpickler(io.BytesIO(blob))
        for made in unpickler.load():
            _set_state(made, unpickler.load())
        value = unpickler.load()
        renew_identities(filled)
        return value
    finally:
        _loading.context, _loading.generation, _loading.filled = previous


def _context() -> UnpicklingContext:
    assert _loading.context is not None, "use `load`"
    return _loading.context


def _variable(description: VariableDescription) -> Any:
    return _context().variable(description)


def _worker_value(number: int) -> Any:
    return _context().worker_values[number]


def _strategy() -> Any:
    return _context().strategy()


def _function(original: Callable[..., Any]) -> Any:
    return _context().function(original)


def _tensorflow_strategy() -> Any:
    import importlib

    return importlib.import_module("tensorflow").distribute.get_strategy()


def _object(number: int, kind: Any) -> Any:
    objects = _context().objects
    if number not in objects:
        objects[number] = object.__new__(kind)
    return objects[number]


def _set_state(made: Any, state: dict[str, Any]) -> None:
    context = _context()
    generations = context.generations
    if generations.get(id(made), -1) >= _loading.generation:
        return
    generations[id(made)] = _loading.generation
    vars(made).update(state)
    strategy = context.strategy()
    if strategy is not None and isinstance(made, keras.Model):
        set_model_strategy(made, strategy)
    assert _loading.filled is not None
    _loading.filled.append(made)


def _empty(kind: Any) -> Any:
    return kind.__new__(kind)


def _fill(made: Any, state: Any) -> None:
    fill_container(made, state)
    assert _loading.filled is not None
    _loading.filled.append(made)
