"""Colocation of new variables: `extended.colocate_vars_with`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from keras_strategies.keras_compat.backends.keras_on_jax import layout_of

Layout = TypeVar("Layout")


class _Colocation(threading.local):
    variable: Any = None


_colocation = _Colocation()


@contextlib.contextmanager
def colocated_with(variable: Any) -> Iterator[None]:
    """Places variables that this thread creates inside as another variable."""
    previous = _colocation.variable
    _colocation.variable = variable
    try:
        yield
    finally:
        _colocation.variable = previous


def colocation_reference() -> Any:
    """The variable to colocate new ones with; None for the strategy's placement."""
    return _colocation.variable


def layout_or_colocated(
    variable: Any, default: Callable[[Any], Layout], replicated: Layout
) -> Layout:
    """The layout of a variable on a mesh.

    Args:
        variable: Keras variable.
        default: makes its layout, if it has none and is not colocated.
        replicated: the layout without axes.

    Returns:
        Its own layout, that of the variable that it is colocated with, or the default.
    """
    own: Layout | None = layout_of(variable)
    if own is not None:
        return own
    reference = colocation_reference()
    if reference is None:
        return default(variable)
    # On the same devices: sharded equally where the shapes are equal.
    same_shape = tuple(reference.shape) == tuple(variable.shape)
    found: Layout | None = layout_of(reference) if same_shape else None
    return replicated if found is None else found
