"""The functions of `keras.random` that draw, and their seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from keras_strategies.keras_compat import patching


class _Draws:
    draw: Callable[..., Any]


def draws_through(draw: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Context in which functions of `keras.random` are called through another one.

    Args:
        draw: called as `draw(original, *args, **kwargs)`; always the same function,
            since the context holds for all threads.
    """
    _Draws.draw = draw
    return patching.installed_while("draws")


def drawn(original: Any, *args: Any, **kwargs: Any) -> Any:
    return _Draws.draw(original, *args, **kwargs)


def next_seed(seed: Any) -> int:
    """The next seed of a generator, as Keras on Torch derives it.

    Args:
        seed: a `keras.random.SeedGenerator`, an int, or None for Keras's generator.
    """
    from keras.src.random.seed_generator import draw_seed

    first, second = draw_seed(seed)
    return int(first + second) & 0xFFFFFFFF
