"""Compiled functions, and their Python functions."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable
from typing import Any

# The functions passed to `ks.function`, by the compiled function.
_originals: weakref.WeakKeyDictionary[Any, Callable[..., Any]] = (
    weakref.WeakKeyDictionary()
)


def register_compiled(compiled: Any, fn: Callable[..., Any]) -> None:
    """Registers the Python function of a compiled one."""
    _originals[compiled] = fn


def original_function(fn: Any) -> Any:
    """The Python function of a `ks.function` or `tf.function`; others unchanged."""
    try:
        found = _originals.get(fn)
    except TypeError:  # Not hashable, or without weak references.
        found = None
    if found is not None:
        return found
    # A `tf.function`; of a method, which TensorFlow wraps, with its object.
    python = getattr(fn, "python_function", fn)
    if python is fn:
        return fn
    method: Any = getattr(python, "__wrapped__", None)
    owner = getattr(getattr(method, "__self__", None), "target", None)
    return python if owner is None else types.MethodType(method.__func__, owner)
