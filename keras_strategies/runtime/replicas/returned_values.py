"""Checks of functions and of what they return: code that would run later."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.errors import InvalidArgumentError


def check_returns(fn: Callable[..., Any], what: str) -> None:
    """Raises for generator and coroutine functions: their bodies run after the call.

    Args:
        fn: callable.
        what: str, the receiving argument or method, for the message.

    Raises:
        InvalidArgumentError: if `fn` is a generator function or a coroutine function.
    """
    checks = (
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
        inspect.iscoroutinefunction,
    )
    if any(check(fn) for check in checks):
        raise InvalidArgumentError(
            f"`{what}` received {fn!r}, a generator or coroutine function: its "
            "body would run later, outside of the replicas. Return tensors, or a "
            "list of the yielded values."
        )


def check_results(results: Sequence[Any]) -> None:
    """Raises if replicas return a generator or coroutine."""
    for result in results:
        if isinstance(result, (types.GeneratorType, types.CoroutineType)):
            raise InvalidArgumentError(
                f"A function of `run` returned {result!r}, which would run later, "
                "outside of the replicas. Return a list of the yielded values."
            )
