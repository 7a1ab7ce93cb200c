"""For the processes of tests: Keras is imported without what none of them uses of it.

Keras imports scikit-learn for its wrappers, Matplotlib for its galleries, pandas, which
imports PyArrow, with threads that a fork would lack, for its data adapters, and JAX for
Orbax on whatever backend, where they are installed. That is a second and a half of a
core, a third of what a process needs to start, and the tests start hundreds. Here Keras
finds them missing, as it does for people who have not installed them; whoever imports
them when Keras is there gets them.

Python runs this file at its start where `tests/run.py` has put its folder on the path.
It also counts: KS_PROCESSES is a file that gets a line for each interpreter that has
started, and for each that imports a framework.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_UNUSED = {"matplotlib", "pyarrow", "sklearn", "jax"}
# What is imported first of a framework; whether there is one, many ask.
_FRAMEWORKS = {"jax._src", "torch._C", "tensorflow.python"}


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
        # Asked now: a script may choose its backend itself. The NumPy one takes FFTs
        # from JAX.
        if name == "jax" and os.environ.get("KERAS_BACKEND") in ("jax", "numpy"):
            return None
        keras = getattr(sys.modules.get("keras"), "__spec__", None)
        # Set by Python's import system until the module has been run to its end.
        if not getattr(keras, "_initializing", False):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None:
            spec.loader = _LeftOut()
        return spec


class _Count:
    """Notes that a framework is imported."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name in _FRAMEWORKS:
            _note(name.partition(".")[0])


def _note(what: str) -> None:
    if file := os.environ.get("KS_PROCESSES"):
        with open(file, "a") as stream:
            stream.write(f"{os.getpid()} {what}\n")


_note("started")
sys.meta_path[:0] = [_Count, _LeaveOut]
