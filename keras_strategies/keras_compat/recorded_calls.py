"""The calls of Keras's backend that code of a replica makes, where calls are eager.

A call is the name of a function, or of an operator of tensors, and its arguments
without the values of tensors. So two calls of a layer that differ in a list of them
have computed other things.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import numpy as np

from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.symbolic_backend import (
    OPERATORS,
    routed_functions,
    unchanged_backend,
)

#: What a replica has called, in its order.
Calls = list[tuple[Any, ...]]
_PLAIN = frozenset([bool, complex, float, int, str, type(None)])
#: They compute nothing of their own.
_OF_SHAPES = frozenset(["is_tensor", "shape"])
#: They are in most other functions, and are noted where they may round: where
#: `keras.ops` calls them, in these modules.
_CONVERSIONS = frozenset(["cast", "convert_to_tensor"])
_OF_CONVERSIONS = ("core", "ops")
#: Torch's tensors in the trace of a program.
_NAMES = {"FunctionalTensor": "Tensor"}
#: Bytes of an array whose values are compared, such as those of indices.
_LARGEST = 4096
#: Operators that have their own rows at `OPERATORS`.
_OF_TENSORS = f"{OPERATORS} __matmul__ __rmatmul__ __neg__ __abs__ __invert__"


class CallHandler(Protocol):
    """What replicas do where code of theirs calls layers, and functions."""

    def layer_call(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """`call(*args, **kwargs)`, a call of a layer."""

    def function_call(
        self, name: str, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """`original(*args, **kwargs)`, a function of Keras or an operator."""


class _Thread(threading.local):
    calls: Calls | None = None
    handler: CallHandler | None = None


_thread = _Thread()
_installed: list[tuple[Any, str]] = []


class recorded_calls:
    """Context that notes the calls of this thread."""

    def __enter__(self) -> Calls:
        if not _installed:
            _install()
        calls: Calls = []
        self._before, _thread.calls = _thread.calls, calls
        return calls

    def __exit__(self, *exception: Any) -> None:
        _thread.calls = self._before


class unrecorded:
    """Context without notes: calls of the library differ from replica to replica."""

    def __enter__(self) -> None:
        self._before = _thread.calls, _thread.handler
        _thread.calls = _thread.handler = None

    def __exit__(self, *exception: Any) -> None:
        _thread.calls, _thread.handler = self._before


@contextlib.contextmanager
def calls_handled_by(handler: CallHandler) -> Iterator[None]:
    """Context in which an object makes the calls of this thread."""
    if not _installed:
        _install()
    before, _thread.handler = _thread.handler, handler
    try:
        with layer_calls_through(handler.layer_call):
            yield
    finally:
        _thread.handler = before


def are_recorded() -> bool:
    """Whether calls of this thread are noted now."""
    return _thread.calls is not None


def _install() -> None:
    """Functions and operators note their calls from now on, in threads that record."""
    with unchanged_backend():
        if _installed:
            return
        wrapped: dict[int, Any] = {}
        for module, name, _ in routed_functions():
            is_conversion = name in _CONVERSIONS
            is_inner = module.__name__.rpartition(".")[2] not in _OF_CONVERSIONS
            if name in _OF_SHAPES or (is_conversion and is_inner):
                continue
            original = patching.original_of(module, name)
            if id(original) not in wrapped:
                note = _noting_rounding if is_conversion else _noting
                wrapped[id(original)] = note(name, original)
            patching.wrap_original(module, name, wrapped[id(original)])
            _installed.append((module, name))
        for kind in _tensor_classes():
            for name in _OF_TENSORS.split():
                if hasattr(kind, name):
                    setattr(kind, name, _noting(name, getattr(kind, name)))
                    _installed.append((kind, name))


def _tensor_classes() -> list[Any]:
    framework = sys.modules[keras.backend.backend()]
    if keras.backend.backend() == "jax":
        return [framework.core.Tracer, type(keras.ops.zeros(()))]
    return [framework.Tensor]


def _noting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls = _thread.calls
        if calls is not None:
            given = [x if type(x) in _PLAIN else _static(x) for x in args]
            if kwargs:
                given += [(key, _static(kwargs[key])) for key in kwargs]
            calls.append((name, *given))
        handler = _thread.handler
        if handler is not None:
            return handler.function_call(name, original, args, kwargs)
        return original(*args, **kwargs)

    return call


def _noting_rounding(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Notes conversions to integers, which round."""

    @functools.wraps(original)
    def call(x: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        calls = _thread.calls
        if calls is not None and dtype is not None and "float" not in str(dtype):
            calls.append((name, str(dtype)))
        return original(x, dtype, *args, **kwargs)

    return call


def _static(value: Any) -> Any:
    """An argument without the values of tensors, to compare."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list or kind is tuple:
        return tuple(map(_static, value))
    if kind is slice:
        return "slice", *map(_static, (value.start, value.stop, value.step))
    if kind is dict:
        return tuple((key, _static(each)) for key, each in value.items())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.nbytes <= _LARGEST:
        return value.shape, value.dtype.str, value.tobytes()
    return _NAMES.get(kind.__name__, kind.__name__)
