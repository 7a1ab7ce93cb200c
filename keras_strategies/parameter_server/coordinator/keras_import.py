"""`import keras` in the processes of a cluster, without what they do not need."""

from __future__ import annotations

import importlib
import os
import sys

#: Optional imports of Keras 3.15, for scikit-learn's estimators, pictures and sharded
#: checkpoints. They take up to half of the time of `import keras`, where installed.
_NOT_NEEDED = ("jax", "matplotlib", "sklearn")


def import_keras() -> None:
    """Imports Keras, which finds that some of its optional imports are missing.

    Functions that workers call can import them, as in any process.
    """
    if "keras" in sys.modules:
        return
    backend = os.environ.get("KERAS_BACKEND", "")
    unused = [name for name in _NOT_NEEDED if name != backend]
    hidden = [name for name in unused if name not in sys.modules]
    for name in hidden:
        # Python's own way to say that an import fails.
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        importlib.import_module("keras")
    finally:
        for name in hidden:
            del sys.modules[name]
