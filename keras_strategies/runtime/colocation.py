"""Colocation of new variables: `extended.colocate_vars_with`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


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
