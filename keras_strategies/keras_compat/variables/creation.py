"""Creation of variables: their owner, path, shape and class."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from keras_strategies.keras_compat.thread_state import outside_stateless_scopes


def variable_maker() -> Any:
    """The layer, metric or optimizer that is making a variable now, or None.

    Keras 3.15: the global attribute "name_scope_stack"; its entries have the
    `caller` that `name_scope` was given.
    """
    from keras.src.backend.common import global_state

    stack = global_state.get_global_attribute("name_scope_stack")
    return stack[-1].caller if stack else None


@contextlib.contextmanager
def without_maker() -> Iterator[None]:
    """Variables that get values inside are not those of the maker (`variable_maker`).

    Keras 3.15: the global attribute "name_scope_stack".
    """
    from keras.src.backend.common import global_state

    stack = global_state.get_global_attribute("name_scope_stack")
    global_state.set_global_attribute("name_scope_stack", [])
    try:
        yield
    finally:
        global_state.set_global_attribute("name_scope_stack", stack)


class OpenShape(tuple[int, ...]):
    """A shape that is equal to every shape with as many axes.

    Keras 3.15: `StatelessScope` compares `Variable.shape` with a value's. In a step of
    a worker, the value of a table is its looked-up rows.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and len(other) == len(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(len(self))


def set_variable_shape(variable: Any, shape: tuple[int | None, ...]) -> None:
    """Sets the declared shape of a variable (`KerasVariable._shape`)."""
    variable._shape = shape


def make_variable(path: str, trainable: bool, dtype: str, value: Any) -> Any:
    """A variable with a path of its own, outside of every scope."""
    import keras

    with outside_stateless_scopes():
        name = path.rsplit("/", 1)[-1]
        made = keras.Variable(value, dtype=dtype, trainable=trainable, name=name)
    made._path = path
    return made


def mix_in(variable: Any, mixin: Any) -> None:
    """Adds a base class to a variable, in front of its own."""
    if not isinstance(variable, mixin):
        kind: Any = type(variable)
        variable.__class__ = _mixed(kind, mixin)


@functools.cache
def _mixed(kind: Any, mixin: Any) -> Any:
    return type(mixin.__name__, (mixin, kind), {"__module__": mixin.__module__})
