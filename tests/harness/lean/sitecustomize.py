"""For the processes of tests: Keras is imported without what none of them uses of it.

Keras imports scikit-learn for its wrappers, Matplotlib for its galleries, and JAX for
Orbax on whatever backend, where they are installed. That is a second and a half of a
core, a third of what a process needs to start, and the tests start hundreds. Here Keras
finds them missing, as it does for people who have not installed them; whoever imports
them when Keras is there gets them.

Python runs this file at its start where `tests/run.py` has put its folder on the path.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_UNUSED = {"matplotlib", "sklearn", "jax"}


class _LeftOut(Loader):
    """Of a module that is found and cannot be imported."""

    def create_module(self, spec: ModuleSpec) -> None:
        raise ModuleNotFoundError(f"{spec.name} is left out in tests", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Not reached, but the import system asks for it."""


class _LeaveOut:
    """Finds what nobody needs while Keras is imported, to leave it out."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _UNUSED:
            return None
        # Asked now: a script may choose its backend itself.
        if name == "jax" and os.environ.get("KERAS_BACKEND") == "jax":
            return None
        keras = getattr(sys.modules.get("keras"), "__spec__", None)
        # Set by Python's import system until the module has been run to its end.
        if not getattr(keras, "_initializing", False):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _LeftOut()
        return spec


sys.meta_path.insert(0, _LeaveOut)
