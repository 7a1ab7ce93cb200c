"""Values of modules and of closures that the code of a layer refers to."""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategies.keras_compat.models.row_wise_layers import NAMES_OF_TRAINING
from keras_strategies.runtime.row_proofs.python_state import (
    global_names,
    is_installed,
    is_of_python,
    is_of_user,
    names_in,
)

_MISSING = object()
_NO_SETTINGS = (types.BuiltinFunctionType, keras.Variable)
#: Functions that find values by names which the code does not show.
_LOOKUPS = frozenset(["globals", "eval", "exec", "__import__"])
#: Attributes of modules of Python by which code finds further values.
_OF_MODULES = {
    "sys": frozenset(["modules", "_getframe"]),
    "importlib": frozenset(["import_module"]),
    "inspect": frozenset(["currentframe", "stack"]),
}
_ENVIRONMENT = frozenset(["environ", "getenv", "environb", "getenvb"])


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

    Attributes:
        reads: the values, to be compared later.
        problem: str, why values cannot be found, as the end of a sentence; "" if not.
    """

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.problem = ""
        self._values: list[tuple[Any, bool]] = []
        self._is_installed = False
        self._seen: set[int] = set()

    def add(self, functions: Iterable[types.FunctionType]) -> list[tuple[Any, bool]]:
        """The values that functions refer to, in an order that they determine.

        Each with whether it is found by code of an installed package.
        """
        before = len(self._values)
        for function in functions:
            self._add_function(function)
        return self._values[before:]

    def _add_function(self, function: types.FunctionType) -> None:
        is_known = is_of_python(function) or not is_of_user(function)
        if id(function) in self._seen or is_known:
            return
        self._seen.add(id(function))
        attributes = names_in(function.__code__)
        names = sorted(global_names(function.__code__))
        before, self._is_installed = self._is_installed, is_installed(function)
        if not self._is_installed:
            self._check_lookups(function, names, attributes)
            self._add_imports(names, attributes)
            self._add(function.__defaults__, function.__kwdefaults__)
        self._add_names(function.__globals__, names, attributes)
        for cell in function.__closure__ or ():
            value = _contents(cell)
            if _may_be_setting(value):
                self.reads.append(CellValue(cell, value))
                self._add_value(value, attributes)
        self._is_installed = before

    def _add(self, *values: Any) -> None:
        self._values += [(value, self._is_installed) for value in values]

    def _add_imports(self, names: list[str], attributes: frozenset[str]) -> None:
        """Adds modules that a function imports itself."""
        for name in names:
            module = sys.modules.get(name)
            if module is not None and _may_be_setting(module):
                self._add_value(module, attributes)

    def _check_lookups(
        self, function: types.FunctionType, names: list[str], attributes: frozenset[str]
    ) -> None:
        found = [n for n in names if n in _LOOKUPS and n not in function.__globals__]
        for name in names:
            value = function.__globals__.get(name)
            if value is os and attributes & _ENVIRONMENT:
                self._add(os.environ)
            elif isinstance(value, types.ModuleType):
                of_module = _OF_MODULES.get(value.__name__, frozenset())
                found += sorted(of_module & attributes)
        if found:
            self.problem = self.problem or (
                f"its code finds values by `{found[0]}`, which a proof cannot follow; "
                "refer to them by their names"
            )

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
                self._add_module(value, attributes)
            return
        self._add(value)

    def _add_module(self, module: types.ModuleType, attributes: frozenset[str]) -> None:
        before = self._is_installed
        self._is_installed = before or is_installed(_Named(module.__name__))
        names = attributes
        if "getattr" in attributes and not self._is_installed:
            # It has names that the code need not show.
            names |= {name for name in vars(module) if name[:2] != "__"}
        self._add_names(vars(module), sorted(names), attributes)
        self._is_installed = before


def functions_of_class(kind: Any) -> Iterator[types.FunctionType]:
    """The functions of a user's class that a call may use."""
    for name, value in list(vars(kind).items()):
        if name in NAMES_OF_TRAINING:
            continue
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
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
    return True


class _Named:
    """Something of a package."""

    def __init__(self, package: str):
        self.__module__ = package
