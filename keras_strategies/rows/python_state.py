"""Python that a call changes: attributes of layers, and random numbers.

A proof calls the layer once more, and replicas of a process call it once each. A layer
that counts its calls in an attribute would see both. So attributes of the layer, of
layers in it and of objects that they hold are compared before and after, and restored.
What else a call reads or changes (globals, closures, classes, files) is the user's, as
for `jax.jit`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.rows.row_tensors import is_array

PLAIN = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (list, dict, set, deque, bytearray, array)
_SKIPPED = (keras.Variable, keras.Operation, keras.KerasTensor, type)
#: Objects in objects, and in containers, at most so deep.
_DEEPEST = 6
#: Entries of containers with more are not followed.
_MOST_ENTRIES = 256
#: Generators of random numbers, with how their state is read and restored.
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    random.Random: (lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    np.random.RandomState: (
        lambda g: g.get_state(legacy=False),
        lambda g, state: g.set_state(state),
    ),
    np.random.Generator: (
        lambda g: g.bit_generator.state,
        lambda g, state: setattr(g.bit_generator, "state", state),
    ),
}
#: Other threads draw from them, too: see `PythonState.noting_draws`.
_OF_PROCESS: tuple[Any, ...] = (
    random.random.__self__,  # type: ignore[attr-defined]
    np.random.random.__self__,  # type: ignore[attr-defined]
)
#: Attributes that calls and training assign; no call depends on them.
ASSIGNED_BY_TRAINING = frozenset(
    [
        "_called",
        "_compile_config",
        "_compile_loss",
        "_compile_metrics",
        "_compiled_trainable_state",
        "_distribute_strategy",
        "_eval_epoch_iterator",
        "_initial_epoch",
        "_jax_state",
        "_jax_state_synced",
        "_jit_compile",
        "_loss_ids",
        "_loss_tracker",
        "_losses",
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
#: A strategy has connections, which change at any time.
_FRAMEWORKS = frozenset(["jax", "jaxlib", "keras_strategies", "tensorflow", "torch"])
#: What TensorFlow notes in layers for its checkpoints.
OF_TENSORFLOW = "_self_"
_REENTRANT = type(threading.RLock())
#: Methods of `random.Random` in C, by which all others draw.
_DRAWS_OF_PYTHON = frozenset({"random", "getrandbits", "seed", "setstate"})


class PythonState:
    """What a call may change: attributes of layers, and what they hold.

    Args:
        layer: the layer.
        arguments: the arguments of its call, and other objects to follow.
    """

    def __init__(self, layer: Any, arguments: Sequence[Any] = ()):
        #: Why changes cannot be found, as the end of a sentence; None if they can.
        self.problem: str | None = None
        self._parts: list[tuple[str, Any, Any]] = []
        self._seen: set[int] = set()
        self._numbers = NumbersOfProcess()
        is_layer = isinstance(layer, keras.layers.Layer)
        for each in sublayers(layer) if is_layer else []:
            self._add_layer(each)
        for each in arguments:
            self._add("an argument", each, 0)

    def _add_layer(self, layer: Any) -> None:
        space = vars(layer)
        where = f"of layer {layer.name!r}"
        self._seen.add(id(layer))
        self._parts.append((where, space, dict(space)))
        is_of_keras = type(layer).__module__.startswith("keras.")
        for name, value in list(space.items()):
            own = f"{name!r} {where}"
            if name.startswith(OF_TENSORFLOW) or name in ASSIGNED_BY_TRAINING:
                continue
            if name not in attributes_of_layers():
                self._add(own, value, 0)
            elif isinstance(value, (list, dict)) and not is_of_keras:
                # Layers and variables that the call makes are tracked there.
                self._parts.append(("", value, _copied(value)))

    def _add(self, where: str, value: Any, depth: int) -> None:
        if isinstance(
            value, (*PLAIN, *_SKIPPED, types.ModuleType)
        ) or is_array_of_keras(value):
            return
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(value))
        generator = _generator_kind(value)
        if any(value is each for each in _OF_PROCESS):
            return
        if isinstance(value, types.MethodType):
            self._add(where, value.__self__, depth)
        elif isinstance(value, types.FunctionType):
            for each in contents_of_cells(value):
                self._add(where, each, depth + 1)
        elif generator is not None:
            self._parts.append((where, value, _GENERATORS[generator][0](value)))
        elif isinstance(value, np.ndarray):
            self._parts.append((where, value, value.copy()))
        elif isinstance(value, (*_CONTAINERS, tuple, frozenset)):
            if isinstance(value, _CONTAINERS):
                self._parts.append((where, value, _copied(value)))
            if len(value) <= _MOST_ENTRIES:
                entries = value.values() if isinstance(value, dict) else value
                for each in list(entries):
                    self._add(where, each, depth + 1)
        elif hasattr(value, "__next__"):
            self.problem = (
                f"its code holds an iterator in {where}, which each replica would "
                "advance"
            )
        elif not is_of_framework(value):
            self._add_object(where, value, depth)

    def _add_object(self, where: str, value: Any, depth: int) -> None:
        if isinstance(value, functools.partial):
            self._add(where, [*value.args, *value.keywords.values()], depth)
        space = getattr(value, "__dict__", None)
        if isinstance(space, dict):
            self._parts.append((where, space, dict(space)))
            for each in list(space.values()):
                self._add(where, each, depth + 1)
        slots = _slots(value)
        if slots:
            self._parts.append((where, _Slots(value), slots))
            for each in slots.values():
                self._add(where, each, depth + 1)

    def change(self) -> str | None:
        """What the call has changed, which is restored."""
        found = None
        for where, value, before in self._parts:
            now = _now(value)
            changed = _difference(now, before)
            if changed is None:
                continue
            _restore(value, before)
            if where and not _is_of_calls(changed):
                name = f"{changed!r} " if isinstance(changed, str) else ""
                found = found or f"its code changes {name}{where}, which each replica "
        return None if found is None else f"{found}would change once"

    # Random numbers of the process, from which other threads may draw.

    def draws_of_process_changed(self) -> bool:
        return not self._numbers.are_unchanged()

    @contextlib.contextmanager
    def noting_draws(self) -> Iterator[Callable[[], str | None]]:
        """Notes whether this thread draws from the generators of Python or NumPy.

        Yields:
            A function without arguments, for after the context: the problem, or None.
        """
        found: list[str] = []
        with _calls_of_python_noted() as python, _numpy_noted() as numpy:
            yield lambda: found[0] if found else None
        if python() or numpy():
            self._numbers.restore()
            found.append("its code draws random numbers of Python or NumPy")


def contents_of_cells(function: types.FunctionType) -> list[Any]:
    """The values of the names around a function that it refers to."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # A name that is not assigned yet.
            found.append(None)
    return found


class NumbersOfProcess:
    """The states of the generators of Python and NumPy now."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()

    def are_unchanged(self) -> bool:
        return self._python == random.getstate() and _are_equal(
            self._numpy, np.random.get_state()
        )

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _are_equal(first: Any, second: Any) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@contextlib.contextmanager
def _calls_of_python_noted() -> Iterator[Callable[[], bool]]:
    if sys.getprofile() is not None:
        # A profiler of the user, which stays: the draws may be those of this thread.
        yield lambda: True
        return
    generator, _ = _OF_PROCESS
    calls = list[str]()

    def note(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and getattr(function, "__self__", None) is generator:
            calls.append(function.__name__)

    sys.setprofile(note)
    try:
        yield lambda: not _DRAWS_OF_PYTHON.isdisjoint(calls)
    finally:
        sys.setprofile(None)


@contextlib.contextmanager
def _numpy_noted() -> Iterator[Callable[[], bool]]:
    """Draws of other threads from NumPy's generator wait, and are not noted.

    Where the lock is not reentrant (NumPy 2.0), this thread would wait for its own
    draws, too: there each draw counts as one of this thread.
    """
    lock = np.random.get_bit_generator().lock  # type: ignore[attr-defined]
    with lock if isinstance(lock, _REENTRANT) else contextlib.nullcontext():
        before = np.random.get_state()
        is_drawn = False
        try:
            yield lambda: is_drawn
        finally:
            is_drawn = not _are_equal(before, np.random.get_state())


@functools.cache
def attributes_of_layers() -> frozenset[str]:
    """The attributes of Keras's that every layer, or every model, has."""
    layer, model = keras.layers.Layer(), keras.Model()
    return (
        frozenset(vars(layer)) | frozenset(vars(model)) | {"_self_tracked_trackables"}
    )


def _is_of_calls(changed: Any) -> bool:
    """Whether an attribute is one that calls of Keras's layers set."""
    if not isinstance(changed, str):
        return False
    masks = ("_dropout_mask", "_recurrent_dropout_mask")
    is_known = changed in attributes_of_layers() or changed in ASSIGNED_BY_TRAINING
    return is_known or changed in masks or changed.startswith(OF_TENSORFLOW)


def is_array_of_keras(value: Any) -> bool:
    """Whether a value is a tensor of the framework."""
    return not isinstance(value, np.ndarray) and is_array(value)


def is_of_framework(value: Any) -> bool:
    """Whether a value is an object of a framework, or of a strategy: a program."""
    return type(value).__module__.partition(".")[0] in _FRAMEWORKS


def _generator_kind(value: Any) -> type | None:
    return next((kind for kind in _GENERATORS if isinstance(value, kind)), None)


class _Slots:
    """The attributes in `__slots__` of an object."""

    def __init__(self, owner: Any):
        self.owner = owner


def _slots(value: Any) -> dict[str, Any]:
    return {
        name: getattr(value, name)
        for kind in type(value).__mro__
        for name, member in vars(kind).items()
        if isinstance(member, types.MemberDescriptorType) and hasattr(value, name)
    }


def _copied(value: Any) -> Any:
    """The contents of a container."""
    return dict(value) if isinstance(value, dict) else list(value)


def _now(value: Any) -> Any:
    if isinstance(value, _Slots):
        return _slots(value.owner)
    generator = _generator_kind(value)
    if generator is not None:
        return _GENERATORS[generator][0](value)
    return value if isinstance(value, (np.ndarray, dict)) else list(value)


def _difference(now: Any, before: Any) -> Any:
    """The name of an attribute that differs, True for other values, None if equal.

    Attributes that calls of Keras's layers set are named only if no other one differs.
    """
    if isinstance(before, np.ndarray):
        return None if np.array_equal(now, before) else True
    if isinstance(before, dict):
        of_calls = None
        for name in (*before, *(key for key in now if key not in before)):
            one, other = now.get(name, _MISSING), before.get(name, _MISSING)
            if _is_same(one, other):
                continue
            if not _is_of_calls(name):
                return name if isinstance(name, str) else True
            of_calls = name
        return of_calls
    if isinstance(before, list):
        is_same = len(now) == len(before) and all(map(_is_same, now, before))
        return None if is_same else True
    return None if _is_same(now, before) else True


_MISSING = object()


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            _is_same(one[k], other[k]) for k in one
        )
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    return isinstance(one, PLAIN) and bool(one == other)


def _restore(value: Any, before: Any) -> None:
    generator = _generator_kind(value)
    if isinstance(value, _Slots):
        for name, each in before.items():
            setattr(value.owner, name, each)
        for name in _slots(value.owner).keys() - before.keys():
            delattr(value.owner, name)
    elif generator is not None:
        _GENERATORS[generator][1](value, before)
    elif isinstance(value, dict):
        for name in value.keys() - before.keys():
            del value[name]
        value.update(before)
    elif isinstance(value, np.ndarray):
        value[...] = before
    elif isinstance(value, set):
        value.clear()
        value.update(before)
    elif isinstance(value, bytearray):
        value[:] = bytearray(before)
    elif isinstance(value, array):
        value[:] = array(value.typecode, before)
    else:
        value.clear()
        value.extend(before)
