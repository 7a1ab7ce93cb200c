"""The names that Python code reads, and the members and attributes of these names."""

from __future__ import annotations

import dis
import functools
import sys
import types
from typing import Any

_LIBRARIES = (
    sys.stdlib_module_names
    | {"jax", "jaxlib", "keras", "keras_strategies", "ml_dtypes", "numpy"}
    | {"pandas", "pytest", "_pytest", "scipy", "tensorflow", "torch", "tqdm"}
) - {"__main__"}
# In code with these names, attributes may be read that the code does not name.
_DYNAMIC = {"__dict__", "__getattribute__", "asdict", "astuple", "attrgetter"}
_DYNAMIC |= {"getattr", "getmembers", "globals", "hasattr", "locals", "methodcaller"}
_DYNAMIC |= {"vars"}
#: Among the names of code: it may read any attribute.
EVERY = "*"
#: Methods that a call of a class runs.
CONSTRUCTORS = frozenset(("__init__", "__new__", "__post_init__"))
# Methods that no step calls by an operator.
_NOT_OPERATORS = CONSTRUCTORS | {"__del__", "__getstate__", "__init_subclass__"}
_NOT_OPERATORS |= {"__reduce__", "__repr__", "__setstate__", "__str__"}


def is_library(module: str | None) -> bool:
    """Whether a module is one of a library: its internals are taken as constant."""
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def user_bases(kind: type) -> tuple[type, ...]:
    """A class and its bases, without those of libraries."""
    return tuple(base for base in kind.__mro__ if not is_library(base.__module__))


@functools.lru_cache(maxsize=4096)
def called_members(kind: type) -> frozenset[str]:
    """Methods that operators call, or that override those of a library."""
    known: set[str] = set()
    for base in kind.__mro__[:-1]:
        if is_library(base.__module__):
            known.update(vars(base))
    found = [
        name
        for name, member in vars(kind).items()
        if isinstance(unwrapped(member), types.FunctionType)
        and (name in known or name.startswith("__"))
    ]
    return frozenset(found) - _NOT_OPERATORS


def unwrapped(member: Any) -> Any:
    """The function of a member of a class; other members as they are."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    return getattr(member, "__func__", member)


def contents(cell: Any) -> Any:
    """The value in a cell of a closure; None where it has none."""
    try:
        return cell.cell_contents
    except ValueError:  # Not assigned yet.
        return None


def attributes_of(value: Any) -> dict[str, Any]:
    """An object's own attributes, those in slots included."""
    state = getattr(value, "__dict__", None) or {}
    kind: Any = type(value)
    slots = _slots(kind)
    if not slots:
        return state
    found = dict(state)
    for name in slots:
        if hasattr(value, name):
            found[name] = getattr(value, name)
    return found


@functools.lru_cache(maxsize=4096)
def _slots(kind: Any) -> tuple[str, ...]:
    found: list[str] = []
    for base in user_bases(kind):
        names = base.__dict__.get("__slots__", ())
        found += (names,) if isinstance(names, str) else names
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def names_in(
    code: types.CodeType,
) -> tuple[frozenset[str], tuple[str, ...], tuple[str, ...]]:
    """The names in code, those that may be globals, and those of modules it imports."""
    names, imports = set(code.co_names), set[str]()
    found: set[str] = set()
    opcodes = {dis.opname[opcode] for opcode in code.co_code[::2]}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, own, imported = names_in(constant)
            found |= inner
            names.update(own)
            imports.update(imported)
        elif isinstance(constant, tuple):
            found.update(part for part in constant if isinstance(part, str))
    if "IMPORT_NAME" in opcodes:
        imports |= names
    if names & _DYNAMIC or "MATCH_CLASS" in opcodes:
        found.add(EVERY)
        found.update(each for each in code.co_consts if isinstance(each, str))
    own = tuple(sorted(names))
    return frozenset(found | names), own, tuple(sorted(imports))
