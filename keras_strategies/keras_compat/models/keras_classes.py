"""Models and optimizers that consist of Keras's own code."""

from __future__ import annotations

import enum
from typing import Any

#: Packages without state between calls that a recorded graph would miss.
_KNOWN = ("keras", "torch", "builtins", "numpy")

_CONTAINERS = (list, tuple, set, frozenset)


def uses_only_builtin_keras(made: Any) -> bool:
    """Whether an object refers only to code of Keras.

    All callables among its attributes, and theirs in turn, are checked: layers and
    losses of the user's, functions for an activation or a metric.
    """
    from keras import Variable

    seen: set[int] = set()
    waiting = [made]
    while waiting:
        found = waiting.pop()
        if id(found) in seen or isinstance(found, Variable):
            continue
        seen.add(id(found))
        if isinstance(found, dict):
            waiting += found.values()
        elif isinstance(found, _CONTAINERS):
            waiting += found
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
