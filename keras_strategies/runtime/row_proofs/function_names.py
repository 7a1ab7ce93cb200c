"""Values of modules and of closures that the code of a layer refers to."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategies.keras_compat.models.row_wise_layers import NAMES_OF_TRAINING
from keras_strategies.runtime.row_proofs.python_state import is_of_user, names_in

_MISSING = object()
_NO_SETTINGS = (types.BuiltinFunctionType, keras.layers.Layer, keras.Variable)


@dataclass(frozen=True)
class NamedValues:
    """Values of names in a module.

    Args:
        space: the module's `vars`.
        names: tuple of str.
        values: what they were.
    """

    space: dict[str, Any]
    names: tuple[str, ...]
    values: tuple[Any, ...]

    @property
    def are_same(self) -> bool:
        get = self.space.get
        return all(
            get(name, _MISSING) is value
            for name, value in zip(self.names, self.values, strict=True)
        )


@dataclass(frozen=True)
class CellValue:
    """A variable of a function around a function, and what it was."""

    cell: Any
    value: Any

    @property
    def are_same(self) -> bool:
        return _contents(self.cell) is self.value


Read = NamedValues | CellValue


class FunctionNames:
    """What the functions of a layer's call refer to in modules and closures.

    Args:
        functions: the functions of the user's classes and attributes.

    Attributes:
        reads: the values, to be compared later.
        values: the same values, one by one, in an order that the functions determine.
    """

    def __init__(self, functions: Iterator[types.FunctionType]):
        self.reads: list[Read] = []
        self.values: list[Any] = []
        self._seen: set[int] = set()
        for function in functions:
            self._add_function(function)

    def _add_function(self, function: types.FunctionType) -> None:
        if id(function) in self._seen or not is_of_user(function):
            return
        self._seen.add(id(function))
        names = names_in(function.__code__)
        self._add_names(function.__globals__, sorted(names), names)
        for cell in function.__closure__ or ():
            value = _contents(cell)
            if _may_be_setting(value):
                self.reads.append(CellValue(cell, value))
                self._add_value(value, names)

    def _add_names(
        self, space: dict[str, Any], names: list[str], attributes: frozenset[str]
    ) -> None:
        found = [n for n in names if n in space and _may_be_setting(space[n])]
        if not found:
            return
        values = tuple(space[name] for name in found)
        self.reads.append(NamedValues(space, tuple(found), values))
        for value in values:
            self._add_value(value, attributes)

    def _add_value(self, value: Any, attributes: frozenset[str]) -> None:
        if isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.ModuleType):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._add_names(vars(value), sorted(attributes), attributes)
            return
        self.values.append(value)


def functions_of_class(kind: Any) -> Iterator[types.FunctionType]:
    """The functions of a user's class that a call may use."""
    for name, value in list(vars(kind).items()):
        if name in NAMES_OF_TRAINING:
            continue
        if isinstance(value, property):
            value = value.fget
        value = getattr(value, "__func__", value)
        if isinstance(value, types.FunctionType):
            yield value


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING  # Not assigned yet.


def _may_be_setting(value: Any) -> bool:
    """Whether a value is not a module, class or function of Python or a framework."""
    if isinstance(value, types.ModuleType):
        package = value.__name__.partition(".")[0]
        return package not in sys.stdlib_module_names and is_of_user(_Named(package))
    if value is _MISSING or isinstance(value, _NO_SETTINGS):
        return False
    if isinstance(value, (type, types.FunctionType)):
        package = (getattr(value, "__module__", None) or "").partition(".")[0]
        return package not in sys.stdlib_module_names and is_of_user(value)
    return not keras.ops.is_tensor(value)


class _Named:
    """Something of a package."""

    def __init__(self, package: str):
        self.__module__ = package
