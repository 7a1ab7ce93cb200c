"""Symbolic tensors of a trace, and numbers of rows in it."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import keras
import numpy as np
from keras import ops

from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.keras_compat.symbolic_backend import (
    current_tracer,
    tracing_paused,
)

#: What stands for an unknown length of another axis than that of the rows.
ANY_LENGTH = 1019
_PACKAGES = ("keras", "optree", "torch", "tensorflow", "jax", "jaxlib", "numpy")


class NotTraced(Exception):
    """A call that cannot be followed by its operations in Keras.

    The trace notes it, too, since the code that is traced may catch it.
    """

    def __init__(self, problem: str):
        super().__init__(problem)
        tracer = current_tracer()
        if tracer is not None:
            tracer.note_problem(problem)


class _NoAttribute(NotTraced, AttributeError):
    """An attribute that tensors of the framework may have."""


@functools.cache
def is_library(file: str) -> bool:
    """Whether code of a file is Keras's, a framework's, Python's or of this package."""
    modules = (sys.modules.get(name) for name in _PACKAGES)
    files = [m.__file__ for m in modules if m is not None and m.__file__]
    folders = [Path(__file__).parents[1], *(Path(each).parent for each in files)]
    return file.startswith(("<frozen", *(f"{folder}/" for folder in folders)))


def _is_called_by_user() -> bool:
    """Whether the caller of the function that calls this one is the user's."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    caller = frame.f_back.f_back
    return caller is not None and not is_library(caller.f_code.co_filename)


class RowCount(int):
    """A number of rows, or a multiple, in a program for any number of rows.

    There it is a tensor. The code that is traced may multiply it, divide it by a
    factor of it, and use it as a length; other results would hold for the number of
    this trace only.
    """

    #: NumPy leaves operators to this class.
    __array_ufunc__ = None

    def __mul__(self, other: Any) -> Any:
        product = int(self) * other
        is_count = type(other) is int
        if not is_count and _is_called_by_user():
            refuse_count()
        return RowCount(product) if is_count else product

    def __floordiv__(self, other: Any) -> Any:
        # A multiple of n, divided by a divisor of the factor: the number is prime.
        if type(other) is int and other and not int(self) % other:
            return RowCount(int(self) // other)
        if _is_called_by_user():
            refuse_count()
        return int(self) // other

    __rmul__ = __mul__
    __hash__ = int.__hash__


def refuse_count() -> NoReturn:
    """Raises an error for a result that holds for one number of rows."""
    raise NotTraced("computes with the number of rows, which any batch may have")


def _checked(name: str) -> Callable[..., Any]:
    original = getattr(int, name)

    def method(self: Any, *args: Any) -> Any:
        if _is_called_by_user():
            refuse_count()
        return original(self, *args)

    return method


_OF_NUMBERS = """
    __eq__ __ne__ __add__ __radd__ __sub__ __rsub__ __rfloordiv__ __lt__ __truediv__
    __rtruediv__ __mod__ __rmod__ __divmod__ __rdivmod__ __pow__ __rpow__ __neg__ __le__
    __gt__ __ge__ __bool__ __float__ __abs__ __and__ __or__ __xor__
    __lshift__ __rshift__ __invert__ __round__ __int__ __trunc__ __floor__ __ceil__
"""
for _name in _OF_NUMBERS.split():
    setattr(RowCount, _name, _checked(_name))


class RowTensor(keras.KerasTensor):  # type: ignore[misc]
    """A symbolic tensor of a trace.

    In a program for any number of rows the user's code sees None for their number, and
    Keras's functions a `RowCount`, as they see None and a tensor on replicas.

    Args:
        shape: its shape, with a number for each axis.
        dtype: its dtype.
        index: int, its place among the tensors of the trace.
        any_rows: int, the number that stands for any number of rows; None if the
            numbers of the traces are those of replicas.
    """

    __hash__ = keras.KerasTensor.__hash__
    #: NumPy leaves operators to this class.
    __array_ufunc__ = None

    def __init__(self, shape: Any, dtype: Any, index: int, any_rows: int | None):
        super().__init__(shape, dtype, name="row")
        self.index = index
        #: On Torch: whether no argument or variable has its memory.
        self.is_inner = False
        self.lengths: tuple[int, ...] = tuple(map(int, shape))
        self._any_rows = any_rows

    @property
    def shape(self) -> Any:
        if self._any_rows is None:
            return self.lengths
        is_user = _is_called_by_user()
        return tuple(self._seen_length(length, is_user) for length in self.lengths)

    @property
    def dtype(self) -> Any:
        """That of the framework's tensors for the user's code."""
        own = super().dtype
        return _dtype_of_framework(own) if _is_called_by_user() else own

    def __repr__(self) -> str:
        if _is_called_by_user():
            raise NotTraced("reads the text of a tensor")
        return super().__repr__()

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        raise NotTraced("reads the text of a tensor")

    def _seen_length(self, length: int, is_user: bool) -> Any:
        assert self._any_rows is not None
        is_rows = length and length % self._any_rows == 0
        if is_user:
            return None if is_rows or (length and not length % ANY_LENGTH) else length
        return RowCount(length) if is_rows else length

    def __eq__(self, other: Any) -> Any:
        return ops.equal(self, other)

    def _value_of_python(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotTraced("reads the value of a tensor")

    __bool__ = __int__ = __float__ = __index__ = __complex__ = _value_of_python
    __array__ = _value_of_python

    @property
    def __jax_array__(self) -> Any:
        # Without it, JAX leaves operators to this class.
        raise AttributeError("__jax_array__")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and _is_called_by_user():
            raise _NoAttribute(f"uses the attribute {name!r} of a tensor")
        raise AttributeError(name)

    def __len__(self) -> int:
        if self._any_rows is not None and _is_called_by_user():
            raise NotTraced("takes the length of a tensor, which any batch may have")
        return self.lengths[0]

    def __iter__(self) -> Iterator[Any]:
        if self._any_rows is not None and not self.lengths[0] % self._any_rows:
            raise NotTraced("iterates over rows")
        return iter(ops.unstack(self, axis=0))

    def __getitem__(self, key: Any) -> Any:
        return ops.get_item(self, np.asarray(key) if isinstance(key, list) else key)


def _in_place(name: str) -> Callable[..., Any]:
    """An operator with assignment: tensors of Torch change, those of others do not."""

    def method(self: Any, other: Any) -> Any:
        result = getattr(self, name)(other)
        if keras.backend.backend() == "torch":
            return current_tracer().changed_in_place(self, result)
        return result

    return method


_WITH_ASSIGNMENT = "add sub mul truediv floordiv mod pow and or xor matmul"
for _name in _WITH_ASSIGNMENT.split():
    setattr(RowTensor, f"__i{_name}__", _in_place(f"__{_name}__"))


@functools.cache
def _dtype_of_framework(name: str) -> Any:
    if name == "string":
        return name
    with tracing_paused():
        return ops.zeros((), name).dtype


def is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex, np.generic))


def is_array(value: Any) -> bool:
    """Whether a value is an array or tensor, and not of a trace."""
    # To ask TensorFlow takes long.
    plain = (type(None), bool, int, float, str, list, tuple, dict, keras.KerasTensor)
    if isinstance(value, (np.ndarray, *plain)):
        return isinstance(value, np.ndarray)
    return bool(ops.is_tensor(value))


def symbolic(leaf: Any) -> Any:
    """A symbolic tensor for an array or tensor; other leaves as they are."""
    if not is_array(leaf):
        return leaf
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    return keras.KerasTensor(tuple(leaf.shape), dtype)


def tensors_in(structure: Any) -> list[RowTensor]:
    """The tensors of a trace in a structure."""
    return [x for x in leaves_of(structure) if isinstance(x, RowTensor)]


def shape_of(value: Any) -> tuple[int, ...]:
    if isinstance(value, RowTensor):
        return value.lengths
    return tuple(value.shape) if hasattr(value, "shape") else np.shape(value)


def error_text(error: BaseException) -> str:
    """The class and the first line of an error of a call, without what Keras adds."""
    lines = re.sub(r"\x1b\[\d+m", "", str(error)).split("\n")
    if lines[0].startswith("Exception encountered when calling"):
        lines = lines[1:]
    first = next((line for line in lines if line.strip()), "").strip()
    return f"{type(error).__name__}: {first[:200]}"
