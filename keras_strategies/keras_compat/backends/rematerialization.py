"""`keras.remat` of functions that layers keep, and of layers with weights in shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _again(original: Any, f: Any) -> Any:
    # Another function for each call, so that JAX traces each.
    return original(lambda *args, **kwargs: f(*args, **kwargs))


class _Rematerialized:
    call: Callable[[Any, Any], Any] = staticmethod(_again)


def hook_remat(rematerialized: Callable[[Any, Any], Any]) -> None:
    """Sets what `keras.remat` does in a call of what it returns.

    Args:
        rematerialized: callable of Keras's `remat` and the function.
    """
    _Rematerialized.call = staticmethod(rematerialized)


def remat(original: Any, f: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        return _Rematerialized.call(original, f)(*args, **kwargs)

    return called
