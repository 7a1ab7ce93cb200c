"""`import keras` in the cluster's processes, without optional imports."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

#: Optional imports of Keras 3.15: scikit-learn estimators, plots, sharded checkpoints,
#: and data frames in `fit`, which the coordinator reads. They take up to half of the
#: time of `import keras`.
_NOT_NEEDED = ("jax", "matplotlib", "pandas", "sklearn")


def call_with_keras(entry: str, arguments: dict[str, Any]) -> None:
    """Entry point of a process: imports Keras, then calls a function.

    Args:
        entry: str, `"module:function"`.
        arguments: dict of its arguments.
    """
    _import_keras()
    module, function = entry.split(":")
    getattr(importlib.import_module(module), function)(**arguments)


def own_backend() -> dict[str, str]:
    """The environment variable for the backend of this process, if it is known."""
    if "keras" in sys.modules:
        return {"KERAS_BACKEND": sys.modules["keras"].backend.backend()}
    return {k: text for k, text in os.environ.items() if k == "KERAS_BACKEND"}


def _import_keras() -> None:
    """Imports Keras without optional imports that take much time.

    Scheduled functions can import these, as in any process.
    """
    if "keras" in sys.modules:
        return
    backend = os.environ.get("KERAS_BACKEND", "")
    unused = [name for name in _NOT_NEEDED if name != backend]
    hidden = [name for name in unused if name not in sys.modules]
    for name in hidden:
        # Makes the import raise ImportError.
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        importlib.import_module("keras")
    finally:
        for name in hidden:
            del sys.modules[name]
