"""Variables whose values are kept elsewhere, by parameter servers for one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from keras_strategies.keras_compat.state import current_stateless_scope


class VariableHost(Protocol):
    """What keeps the values of variables that are not in this process."""

    #: Whether variables have values of their own just now.
    is_local: bool

    def create(self, variable: Any, value: Any) -> None:
        """A variable begins with this value, a tensor or a function that makes it."""

    def create_with(self, variable: Any, initializer: Callable[..., Any]) -> None:
        """A variable begins with what an initializer makes."""

    def read(self, variable: Any) -> Any:
        """The whole value, a NumPy array."""

    def write(self, variable: Any, value: Any) -> None:
        """Sets the whole value."""

    def add(self, variable: Any, delta: Any) -> None:
        """Adds to the whole value, in one piece."""

    def is_large(self, variable: Any) -> bool:
        """Whether a whole value is more than this process should hold."""

    def pieces(self, variable: Any) -> Iterator[tuple[int, Any]]:
        """The value as pairs of a first row and consecutive rows, NumPy arrays."""

    def write_rows(self, variable: Any, start: int, rows: Any) -> None:
        """Sets consecutive rows."""


class RemoteValue:
    """Stands in a variable for a value that is elsewhere.

    Keras asks `_value` for a shape when it is made, and for `requires_grad` on Torch.
    """

    def __init__(self, shape: Any, dtype: Any):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.requires_grad = False


def host_made_variable(variable: Any, host: VariableHost) -> None:
    """Lets a variable that has been made keep its value in a `VariableHost`."""
    host_variable(variable, host)


def host_variable(variable: Any, host: VariableHost) -> None:
    """Lets a variable that is about to be made keep its value in a `VariableHost`.

    Keras 3.15: `KerasVariable.__init__` and `_deferred_initialize` call `_initialize`
    or `_initialize_with_initializer`; `value` is what everything reads, and
    `_direct_assign` what everything writes.
    """
    kind: Any = type(variable)
    object.__setattr__(variable, "_keras_strategies_host", host)
    variable.__class__ = _hosted(kind)


def host_of(variable: Any) -> Any:
    """What keeps a variable's value, None if it does itself."""
    return variable.__dict__.get("_keras_strategies_host")


def is_streamed(value: Any) -> bool:
    """Whether something is a variable that is saved and loaded piece by piece."""
    host = getattr(value, "__dict__", {}).get("_keras_strategies_host")
    return (
        host is not None
        and not host.is_local
        and current_stateless_scope() is None
        and host.is_large(value)
    )


@functools.cache
def _hosted(kind: Any) -> Any:
    import keras

    class Hosted(kind):
        def _initialize(self, value: Any) -> None:
            host = host_of(self)
            host.create(self, value() if callable(value) else value)
            shape = value.shape if self._shape is None else self._shape
            self._value = RemoteValue(shape, self._dtype)

        def _initialize_with_initializer(self, initializer: Any) -> None:
            self._value = RemoteValue(self._shape, self._dtype)
            host_of(self).create_with(self, initializer)

        @property
        def value(self) -> Any:
            if host_of(self).is_local:
                return super().value
            scope = current_stateless_scope()
            if scope is not None:
                found = scope.get_current_value(self)
                if found is None:
                    # Shapes are being worked out; nothing reads the number.
                    found = keras.ops.zeros(self._shape, dtype=self._dtype)
                return self._maybe_autocast(found)
            if self._value is None:
                return self._maybe_autocast(
                    keras.ops.zeros(self._shape, dtype=self._dtype)
                )
            value = keras.ops.convert_to_tensor(host_of(self).read(self), self._dtype)
            return self._maybe_autocast(value)

        def _direct_assign(self, value: Any) -> None:
            host_of(self).write(self, value)

        def assign(self, value: Any) -> Any:
            pieces = getattr(value, "pieces", None)
            if pieces is None or not is_streamed(self):
                return super().assign(value)
            if tuple(value.shape) != tuple(self._shape):
                raise ValueError(
                    f"Variable {self.path!r} has the shape {tuple(self._shape)}, and "
                    f"its new value has {tuple(value.shape)}. They must be the same."
                )
            for start, rows in pieces():
                host_of(self).write_rows(self, start, rows)
            return self

        def pieces(self) -> Iterator[tuple[int, Any]]:
            """The value as pairs of a first row and consecutive rows."""
            found: Iterator[tuple[int, Any]] = host_of(self).pieces(self)
            return found

        def assign_add(self, value: Any) -> Any:
            if current_stateless_scope() is not None or host_of(self).is_local:
                return super().assign_add(value)
            return host_of(self).add(self, value)

        def assign_sub(self, value: Any) -> Any:
            if current_stateless_scope() is not None or host_of(self).is_local:
                return super().assign_sub(value)
            return host_of(self).add(self, -keras.ops.convert_to_tensor(value))

        def numpy(self) -> Any:
            return host_of(self).read(self)

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            found = host_of(self).read(self)
            return found if dtype is None else found.astype(dtype)

        def __len__(self) -> int:
            return int(self._shape[0])

        def __getitem__(self, index: Any) -> Any:
            if current_stateless_scope() is not None or host_of(self).is_local:
                return self.value[index]
            return keras.ops.convert_to_tensor(host_of(self).read_slice(self, index))

        def __repr__(self) -> str:
            return (
                f"<Variable path={self.path}, shape={tuple(self._shape)}, "
                f"dtype={self._dtype}, {host_of(self).place(self)}>"
            )

    Hosted.__name__ = kind.__name__
    Hosted.__qualname__ = kind.__qualname__
    return Hosted
