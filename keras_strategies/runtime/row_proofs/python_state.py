"""What the Python code of a layer holds: changes by a call, and their restoration.

A proof calls the layer once more, and replicas of a process call it once each. Code
that counts its calls, collects tensors in a list or keeps them in an attribute would
see both. So the objects that code of users in a layer can reach are compared before and
after the call of a proof, and are restored.
"""

from __future__ import annotations

import dis
import functools
import queue
import random
import sys
import types
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import sublayers

_CONTAINERS = (list, dict, set, deque, bytearray, array)
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
#: Values of names that calls of functions assign or change.
_STATE = (*_PLAIN, *_CONTAINERS, np.ndarray)
#: Packages with objects that calls do not change, or that restore themselves.
_FOREIGN = ("builtins", "keras", "keras_strategies", "numpy", "torch", "tensorflow")
#: Objects in objects, and in containers, at most so deep.
_DEEPEST = 3
#: Entries of containers with more are not compared by what they hold.
_MOST_ENTRIES = 256
#: Modules of Python with classes of which users make objects with attributes.
_NAMESPACES = ("__main__", "argparse", "types")
#: Modules of Python with iterators that cannot be restored.
_ITERATORS = ("builtins", "itertools", "_io")
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
#: Those of the process, from which other threads may draw: `traced_apart` finds the
#: draws of the trace and restores them.
_GENERATORS_OF_PROCESS = frozenset(
    id(draw.__self__)  # type: ignore[attr-defined]
    for draw in (random.random, np.random.random)
)
_LRU_CACHE = type(functools.lru_cache(lambda: None))
#: Objects of Python with what they hold.
_HOLDERS: dict[type, Callable[[Any], Any]] = {
    UserDict: lambda value: value.data,
    UserList: lambda value: value.data,
    ChainMap: lambda value: value.maps,
    weakref.ref: lambda value: value(),
    queue.Queue: lambda value: value.queue,
}
#: Arrays larger than this are not compared.
_LARGEST_ARRAY = 1 << 16


@dataclass(frozen=True)
class StateChange:
    """One change by a call.

    Args:
        where: str, the attribute, name or container, with its owner.
        has_tensors: bool, whether it holds tensors of the call now.
    """

    where: str
    has_tensors: bool


class PythonState:
    """The Python state that the code of a layer can reach.

    That are attributes of the layer, of layers in it, and of other objects of the
    user's classes in these attributes; attributes of these classes; names and cells
    that their functions refer to, functions among them, and defaults of arguments; and
    the contents of lists, dicts, sets, small arrays and generators of random numbers.

    Args:
        layer: the layer.
        arguments: objects and functions that its call gets.
    """

    def __init__(self, layer: Any, arguments: Sequence[Any] = ()):
        self._spaces: list[tuple[str, Any, dict[str, Any]]] = []
        self._contents: list[tuple[str, Any, Any]] = []
        self._cells: list[tuple[str, Any, Any]] = []
        self._generators: list[tuple[str, Any, type, Any]] = []
        self._seen: set[int] = set()
        self._caches: list[tuple[str, Any, int]] = []
        layers = sublayers(layer)
        self._layers = set(map(id, layers))
        #: Why a call cannot be restored, as the end of a sentence; "" if it can.
        self.problem = ""
        for each in layers:
            if is_of_user(type(each)):
                name = f"layer {each.name!r} ({type(each).__name__})"
                self._add_object(name, each)
            else:
                self._add_holder(f"layer {each.name!r}", each)
        for each in arguments:
            self._add_value("an argument", each, 0)

    def _add_holder(self, name: str, holder: Any) -> None:
        """Adds what an object of Keras has of the user: functions and objects.

        Such as an activation, the function of a `Lambda`, a regularizer, or a loss.
        """
        if id(holder) in self._seen:
            return
        self._seen.add(id(holder))
        for key, value in list(vars(holder).items()):
            if isinstance(value, types.FunctionType):
                self._add_function(value)
            elif isinstance(value, keras.layers.Layer):
                continue
            elif is_of_user(type(value)):
                self._add_object(f"{key!r} of {name}", value)
            elif isinstance(value, (keras.losses.Loss, keras.metrics.Metric)):
                self._add_holder(f"{key!r} of {name}", value)

    def _add_object(self, name: str, value: Any, depth: int = 0) -> None:
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        of_keras = attributes_of_layers()
        is_layer = isinstance(value, keras.layers.Layer)
        own = {
            key: attribute
            for key, attribute in getattr(value, "__dict__", {}).items()
            if not (is_layer and key in of_keras)
        }
        if hasattr(value, "__dict__"):
            self._spaces.append((name, vars(value), own))
        slots = slots_of(value)
        if slots or not hasattr(value, "__dict__"):
            self._spaces.append((name, _Slots(value), slots))
        for key, attribute in (own | slots).items():
            self._add_value(f"{key!r} of {name}", attribute, depth)
        for kind in type(value).__mro__:
            if is_of_user(kind):
                self._add_class(kind)

    def _add_class(self, kind: Any) -> None:
        """Adds the attributes of a user's class, and its functions."""
        if id(kind) in self._seen or is_of_python(kind):
            return
        self._seen.add(id(kind))
        where = f"class {kind.__qualname__!r}"
        own = {
            name: value
            for name, value in vars(kind).items()
            if not name.startswith("__") and isinstance(value, _STATE)
        }
        self._spaces.append((where, _OfClass(kind, own), own))
        for name, value in list(vars(kind).items()):
            value = value.fget if isinstance(value, property) else value
            value = getattr(value, "__func__", value)
            if name in own or isinstance(value, types.FunctionType):
                self._add_value(f"{name!r} of {where}", value, 1)

    def _add_value(self, where: str, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN):
            return
        if isinstance(value, keras.layers.Layer):
            if id(value) not in self._layers:
                # It is reached by code, and no part of the layer.
                self._add_object(f"layer {value.name!r}", value, depth)
        elif isinstance(value, _CONTAINERS):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._contents.append((where, value, _copy_of(value)))
                self._add_entries(where, value, depth + 1)
        elif isinstance(value, tuple):
            self._add_entries(where, value, depth + 1)
        elif isinstance(value, np.ndarray):
            if value.size <= _LARGEST_ARRAY:
                self._contents.append((where, value, value.copy()))
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.MethodType):
            self._add_value(where, value.__self__, depth)
        elif isinstance(value, ContextVar):
            cell = _ContextCell(value)
            self._cells.append((where, cell, cell.cell_contents))
            self._add_value(where, cell.cell_contents, depth)
        elif isinstance(value, _LRU_CACHE):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._caches.append((where, value, value.cache_info().misses))
                self._add_value(where, value.__wrapped__, depth)
        elif isinstance(value, tuple(_HOLDERS)):
            kind = next(k for k in _HOLDERS if isinstance(value, k))
            self._add_value(where, _HOLDERS[kind](value), depth)
        elif isinstance(value, functools.partial):
            self._add_value(where, value.func, depth)
            self._add_value(where, list(value.args), depth)
            self._add_value(where, value.keywords, depth)
        elif isinstance(value, tuple(_GENERATORS)):
            if id(value) not in self._seen | _GENERATORS_OF_PROCESS:
                self._seen.add(id(value))
                kind = next(k for k in _GENERATORS if isinstance(value, k))
                state = _GENERATORS[kind][0](value)
                self._generators.append((where, value, kind, state))
        elif isinstance(value, Iterator) and type(value).__module__ in _ITERATORS:
            self.problem = (
                f"a proof would advance the {type(value).__name__} in {where}; hold "
                "what changes in a `keras.Variable`"
            )
        elif type(value).__name__ == "Generator" and hasattr(value, "manual_seed"):
            self.problem = (
                f"replicas would share the {type(value).__module__}.Generator in "
                f"{where}; use `keras.random` with a `keras.random.SeedGenerator`"
            )
        elif depth < _DEEPEST and is_object_of_user(value):
            self._add_object(where, value, depth + 1)

    def _add_entries(self, where: str, value: Any, depth: int) -> None:
        if depth <= _DEEPEST and len(value) <= _MOST_ENTRIES:
            entries = value.values() if isinstance(value, dict) else value
            for each in list(entries):
                self._add_value(f"an entry of {where}", each, depth)

    def _add_function(self, function: types.FunctionType) -> None:
        is_known = is_of_python(function) or not is_of_user(function)
        if id(function) in self._seen or is_known:
            return
        self._seen.add(id(function))
        where = f"function {function.__qualname__!r}"
        names = names_in(function.__code__)
        found = {n: function.__globals__[n] for n in names if n in function.__globals__}
        changed = {
            name: value for name, value in found.items() if isinstance(value, _STATE)
        }
        self._add_own(where, function)
        if changed:
            self._spaces.append((where, _Names(function.__globals__, changed), changed))
        for name, value in changed.items():
            self._add_value(f"{name!r} of {where}", value, 1)
        for name, value in found.items():
            if isinstance(value, type) and is_of_user(value):
                self._add_class(value)
            elif name not in changed and not isinstance(value, types.ModuleType):
                self._add_value(f"{name!r} of {where}", value, 1)
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=False
        ):
            try:
                value = cell.cell_contents
            except ValueError:
                continue  # Not assigned yet.
            if isinstance(value, _PLAIN):
                self._cells.append((f"{name!r} of {where}", cell, value))
            else:
                self._add_value(f"{name!r} of {where}", value, 0)

    def _add_own(self, where: str, function: types.FunctionType) -> None:
        """Adds the attributes of a function, and its default values."""
        own = dict(vars(function))
        self._spaces.append((where, vars(function), own))
        defaults = (*(function.__defaults__ or ()), function.__kwdefaults__ or {})
        self._add_value(f"the defaults of {where}", defaults, 1)
        for name, value in own.items():
            self._add_value(f"{name!r} of {where}", value, 1)

    def changes(self) -> list[StateChange]:
        """What has changed since, restored."""
        found = list(self._attribute_changes())
        for where, generator, kind, before in self._generators:
            read, restore = _GENERATORS[kind]
            if not _is_same_state(read(generator), before):
                found.append(StateChange(where, False))
                restore(generator, before)
        for where, cell, before in self._cells:
            if cell.cell_contents is not before:
                found.append(StateChange(where, _has_tensors(cell.cell_contents)))
                cell.cell_contents = before
        for where, value, before in self._contents:
            if not _is_same_content(value, before):
                found.append(StateChange(where, _has_tensors(value)))
                _restore(value, before)
        return found

    def clear_caches(self) -> str:
        """Empties the caches of functions that have new results since.

        Returns:
            One of the functions; "" without any.
        """
        found = ""
        for where, function, misses in self._caches:
            if function.cache_info().misses != misses:
                function.cache_clear()
                found = found or f"the cache of {where}"
        return found

    def _attribute_changes(self) -> Iterator[StateChange]:
        for name, space, before in self._spaces:
            of_keras = attributes_of_layers()
            for key in [key for key in space if key not in before]:
                if key in of_keras:
                    continue
                yield StateChange(f"{key!r} of {name}", _has_tensors(space[key]))
                del space[key]
            for key, value in before.items():
                if key not in space or space[key] is not value:
                    now = space.get(key)
                    space[key] = value
                    if not _is_equal(now, value):
                        yield StateChange(f"{key!r} of {name}", _has_tensors(now))


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of modules and attributes in a function and in functions within it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names_in(constant)
    return frozenset(found)


@functools.cache
def global_names(code: types.CodeType) -> frozenset[str]:
    """The names of modules in a function and in functions within it."""
    found = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname.endswith(("_GLOBAL", "_NAME"))
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= global_names(constant)
    return frozenset(found)


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that are in `__slots__`, as far as they are set."""
    kind: Any = type(value)
    names = _slots_of_class(kind)
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


@functools.lru_cache(maxsize=2**12)
def _slots_of_class(owner: type) -> tuple[str, ...]:
    return tuple(
        name
        for kind in owner.__mro__
        if "__slots__" in vars(kind) and is_of_user(kind)
        for name, member in vars(kind).items()
        if isinstance(member, types.MemberDescriptorType)
    )


def is_object_of_user(value: Any) -> bool:
    """Whether it is an object with attributes, of no class of Python or a framework."""
    package = package_of(type(value))
    if package in sys.stdlib_module_names and package not in _NAMESPACES:
        return False
    has_attributes = hasattr(value, "__dict__") or bool(slots_of(value))
    return is_of_user(type(value)) and has_attributes


class _ContextCell:
    """A context variable with the interface of a cell."""

    def __init__(self, variable: ContextVar[Any]):
        self._variable = variable

    @property
    def cell_contents(self) -> Any:
        return self._variable.get(None)

    @cell_contents.setter
    def cell_contents(self, value: Any) -> None:
        self._variable.set(value)


class _Slots(dict):
    """The attributes of an object in `__slots__`, which assignments change."""

    def __init__(self, value: Any):
        super().__init__(slots_of(value))
        self._value = value

    def __iter__(self) -> Iterator[str]:
        return iter(slots_of(self._value))

    def __contains__(self, name: object) -> bool:
        return name in slots_of(self._value)

    def __getitem__(self, name: str) -> Any:
        return slots_of(self._value)[name]

    def get(self, name: str, default: Any = None) -> Any:
        return slots_of(self._value).get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._value, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._value, name)


@functools.cache
def attributes_of_layers() -> frozenset[str]:
    """The attributes that every layer of Keras has, which Keras itself maintains."""
    return frozenset(vars(keras.layers.Layer(name="attributes", dtype="float32")))


class _OfClass(dict):
    """Some attributes of a class, which assignments change."""

    def __init__(self, kind: type, names: dict[str, Any]):
        super().__init__(names)
        self._kind = kind

    def __contains__(self, name: object) -> bool:
        return name in vars(self._kind)

    def __getitem__(self, name: str) -> Any:
        return vars(self._kind)[name]

    def get(self, name: str, default: Any = None) -> Any:
        return vars(self._kind).get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        type.__setattr__(self._kind, name, value)


class _Names(dict):
    """Some names of a module: reads and assignments are those of the module."""

    def __init__(self, module: dict[str, Any], names: dict[str, Any]):
        super().__init__(names)
        self._module = module

    def __getitem__(self, name: str) -> Any:
        return self._module[name]

    def __contains__(self, name: object) -> bool:
        return name in self._module and super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        return self._module.get(name, default)

    def __setitem__(self, name: str, value: Any) -> None:
        self._module[name] = value


def is_of_python(value: Any) -> bool:
    """Whether a class or function is one of Python's own modules."""
    package = package_of(value)
    return package in sys.stdlib_module_names and package != "__main__"


def is_of_user(value: Any) -> bool:
    return package_of(value) not in _FOREIGN


def is_installed(value: Any) -> bool:
    """Whether a class or function is of an installed package, not the user's own."""
    return _is_installed(package_of(value))


@functools.cache
def _is_installed(package: str) -> bool:
    """Whether a package is installed, and not the user's own code."""
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    return any("-packages" in place for place in places if place)


def package_of(value: Any) -> str:
    module = getattr(value, "__module__", None)
    # Classes of classes have a descriptor.
    return module.partition(".")[0] if isinstance(module, str) else "builtins"


def _is_equal(now: Any, before: Any) -> bool:
    is_plain = isinstance(now, _PLAIN) and isinstance(before, _PLAIN)
    return is_plain and type(now) is type(before) and now == before


def _is_same_state(now: Any, before: Any) -> bool:
    """Whether states of a generator are equal: dicts and tuples with arrays."""
    if isinstance(now, dict):
        return all(_is_same_state(now[key], before[key]) for key in now)
    if isinstance(now, np.ndarray):
        return bool(np.array_equal(now, before))
    return bool(now == before)


def _has_tensors(value: Any) -> bool:
    try:
        leaves = keras.tree.flatten(value)
    except (TypeError, ValueError):
        return False
    return any(keras.ops.is_tensor(leaf) for leaf in leaves)


def _copy_of(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value)


def _is_same_content(value: Any, before: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(np.array_equal(value, before))
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(key in value and value[key] is before[key] for key in before)
    if isinstance(value, set):
        return value == set(before)
    if isinstance(value, (bytearray, array)):
        return list(value) == before
    return all(now is then for now, then in zip(value, before, strict=True))


def _restore(value: Any, before: Any) -> None:
    if isinstance(value, np.ndarray):
        value[...] = before
        return
    if isinstance(value, array):
        value[:] = array(value.typecode, before)
        return
    value.clear()
    if isinstance(value, (dict, set)):
        value.update(before)
    else:
        value.extend(before)
