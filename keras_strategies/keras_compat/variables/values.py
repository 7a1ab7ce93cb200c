"""Stored values of variables, without scopes and autocast, and guards of reads."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


def raw_value(variable: Any) -> Any:
    """The backend's own variable or array, before scopes and autocast.

    Keras 3.15: `KerasVariable._value`.
    """
    return variable._value


def stored_dtype(variable: Any) -> str:
    """The dtype of a variable's stored value, without autocast.

    Keras 3.15: `KerasVariable._dtype`.
    """
    return str(variable._dtype)


def declared_shape(variable: Any) -> tuple[int, ...]:
    """The shape of a variable that may have no value yet (`KerasVariable._shape`)."""
    return tuple(int(n) for n in variable._shape)


def autocast_dtype(variable: Any) -> str | None:
    """The dtype that reading a float variable gives here; None for its own dtype.

    Keras 3.15: `KerasVariable._autocast`, `_dtype` (`dtype` is the one that is read),
    and the global attribute "autocast_scope", that of the innermost layer call.
    """
    scope = _autocast_scope_getter()()
    if scope is None or not variable._autocast or "float" not in variable._dtype:
        return None
    return None if scope.dtype == variable._dtype else scope.dtype


@functools.cache
def _autocast_scope_getter() -> Callable[[], Any]:
    from keras.src.backend.common.variables import get_autocast_scope

    return get_autocast_scope  # type: ignore[no-any-return]


class IdMap(Generic[T]):
    """Values of objects by identity, with weak references to the objects."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], T]] = {}

    def get(self, key: Any) -> T | None:
        """The value of an object; None without one."""
        reference, value = self._found.get(id(key), (None, None))
        return value if reference is not None and reference() is key else None

    def set(self, key: Any, value: T) -> None:
        """Sets the value of an object, for as long as the object lives."""
        number = id(key)
        gone = weakref.ref(key, lambda _: self._found.pop(number, None))
        self._found[number] = (gone, value)

    def discard(self, key: Any) -> None:
        """Drops the value of an object."""
        self._found.pop(id(key), None)

    def __iter__(self) -> Iterator[Any]:
        for reference, _ in list(self._found.values()):
            key = reference()
            if key is not None:
                yield key

    def __contains__(self, key: Any) -> bool:
        found = self._found.get(id(key))
        return found is not None and found[0]() is key


class IdSet(IdMap[bool]):
    """A set of objects by identity, with weak references."""

    def add(self, value: Any) -> None:
        """Adds an object."""
        self.set(value, True)


def guard_value(variable: Any, check: Callable[[Any], None]) -> None:
    """Calls `check(variable)` before each read of the variable's value.

    Keras 3.15: `KerasVariable.value`, which everything reads that does not assign;
    `_direct_assign` reads it too on Torch.
    """
    kind: Any = type(variable)
    variable.__class__ = _guarded(kind, check)


@functools.cache
def _guarded(kind: Any, check: Callable[[Any], None]) -> Any:
    class Guarded(kind):
        _is_assigned = False

        @property
        def value(self) -> Any:
            if not self._is_assigned:
                check(self)
            return super().value

        def _direct_assign(self, value: Any) -> None:
            self._is_assigned = True
            try:
                super()._direct_assign(value)
            finally:
                self._is_assigned = False

    Guarded.__name__ = kind.__name__
    Guarded.__qualname__ = kind.__qualname__
    return Guarded


def set_raw_value(variable: Any, value: Any) -> None:
    """Replaces the stored array of a variable, without conversion or placement.

    Keras 3.15: `KerasVariable._value`; `assign` would convert and place it again.
    """
    variable._value = value
