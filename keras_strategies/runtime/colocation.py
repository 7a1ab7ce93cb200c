"""The variable that new ones are placed with: `extended.colocate_vars_with`."""

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
    """Variables of this thread made inside are placed as another one is."""
    previous = _colocation.variable
    _colocation.variable = variable
    try:
        yield
    finally:
        _colocation.variable = previous


def colocation_reference() -> Any:
    """The variable to place a new one with; None for the strategy's own choice."""
    return _colocation.variable
