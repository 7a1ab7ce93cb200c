"""Models and optimizers that consist of Keras's own code."""

from __future__ import annotations

import enum
import types
from typing import Any

#: Packages without state between calls that a recorded graph would miss.
_KNOWN = ("keras", "torch", "builtins", "numpy")

_CONTAINERS = (list, tuple, set, frozenset)


def uses_only_builtin_keras(*made: Any) -> bool:
    """Whether objects refer only to code of Keras.

    All callables among their attributes, and theirs in turn, are checked: layers and
    losses of the user's, functions for an activation or a metric. Each object is
    visited once: the layers of a functional model refer to all others.
    """
    from keras import Variable

    seen: set[int] = set()
    waiting = list(made)
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, Variable):
            continue
        seen.add(id(found))
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, _CONTAINERS):
            waiting += found
        elif isinstance(found, types.ModuleType):
            # Such as the backend of a `SeedGenerator`.
            if found.__name__.partition(".")[0] not in _KNOWN:
                return False
        elif callable(found) or _is_known(type(found)):
            has_name = hasattr(found, "__name__")
            if not _is_known(found if has_name else type(found)):
                return False
            if not isinstance(found, (type, enum.Enum)):
                waiting += getattr(found, "__dict__", {}).values()
                waiting += [getattr(found, "__self__", None)]
    return True


def _is_known(found: Any) -> bool:
    package = (getattr(found, "__module__", None) or "").partition(".")[0]
    return package in _KNOWN
