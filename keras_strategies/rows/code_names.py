"""Code of users that a trace cannot follow, by the names that it refers to.

A function that names its framework may use it on tensors, or ask whether it gets one of
them: then a call with symbolic tensors is another than a call with tensors.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.recorded_calls import are_recorded
from keras_strategies.keras_compat.symbolic_backend import current_tracer
from keras_strategies.rows.row_tensors import NotTraced, is_library

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
#: Names by which code could tell a tensor of a trace, or find a framework.
_OF_TRACES = frozenset(
    [
        "KerasTensor",
        "RowTensor",
        "__import__",
        "__module__",
        "__mro__",
        "_getframe",
        "currentframe",
        "getprofile",
        "gettrace",
        "import_module",
        "is_keras_tensor",
        "record_history",
    ]
)
#: Attributes that only tensors of a trace have, if code asks for them by a string.
_ATTRIBUTES = frozenset(["ragged", "sparse"])
#: Names that ask for the class of a tensor, or for a module, if used together.
_TOGETHER = (
    frozenset(["isinstance", "type"]),
    frozenset(["issubclass", "type"]),
    frozenset(["sys", "modules"]),
)
_OF_CLASSES = frozenset(["__name__", "__qualname__"])
#: Code objects and the numbers of lines in them.
Lines = set[tuple[types.CodeType, int]]
#: Packages there run other lines where they have computed something before.
_INSTALLED = "-packages"
_PYTHON = str(Path(random.__file__).parent)


@contextlib.contextmanager
def checked_code() -> Iterator[Lines]:
    """A context in which a function of the user's that cannot be traced does not begin.

    Yields:
        The lines of the user's that run.

    Raises:
        NotTraced: in place of the function.
    """
    check = _Check()
    # A debugger or a profiler of the user's stays.
    if sys.gettrace() is None:
        sys.settrace(check)
        reset: Any = sys.settrace
    elif sys.getprofile() is None:
        sys.setprofile(check)
        reset = sys.setprofile
    else:
        raise NotTraced("runs under a debugger and a profiler")
    try:
        yield check.lines
    finally:
        reset(None)


@contextlib.contextmanager
def noted_lines() -> Iterator[Lines]:
    """A context that notes the lines of the user's where calls are recorded.

    None are noted under a debugger.
    """
    lines: Lines = set()
    if sys.gettrace() is not None:
        yield lines
        return
    sys.settrace(_LinesOfReplica(lines))
    try:
        yield lines
    finally:
        sys.settrace(None)


class _Lines:
    """Notes the lines of functions of the user's, as a trace function of Python."""

    def __init__(self, lines: Lines):
        self.lines = lines
        # The code objects stay, as their `id`s are those of others otherwise.
        self._seen: dict[int, tuple[Any, bool]] = {}

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if event != "call" or not self.follows():
            return None
        code = frame.f_code
        if id(code) not in self._seen:
            file = _file(frame)
            is_known = _is_known(file)
            self._seen[id(code)] = code, not (is_known or _INSTALLED in file)
            if not is_known:
                self.begins(frame)
        return self._note if self._seen[id(code)][1] else None

    def _note(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        self.lines.add((frame.f_code, frame.f_lineno))
        return self._note

    def follows(self) -> bool:
        """Whether calls are noted now."""
        return True

    def begins(self, frame: types.FrameType) -> None:
        """Is called where a function of the user's begins for the first time."""


class _LinesOfReplica(_Lines):
    def follows(self) -> bool:
        return are_recorded()


class _Check(_Lines):
    """Is called for each call of a function."""

    def __init__(self) -> None:
        super().__init__(set())
        self._framework = keras.backend.backend()

    def follows(self) -> bool:
        # What declared layers compute is not traced.
        return current_tracer() is not None

    def begins(self, frame: types.FrameType) -> None:
        self._check(frame)

    def _check(self, frame: types.FrameType) -> None:
        code = frame.f_code
        named = [(name, frame.f_globals.get(name)) for name in code.co_names]
        # The locals are made a dict by the first use.
        around = frame.f_locals if code.co_freevars else {}
        named += [(name, around.get(name)) for name in code.co_freevars]
        texts = {each for each in code.co_consts if isinstance(each, str)}
        if _tells_traces(code, texts):
            raise NotTraced(
                f"asks in {code.co_name!r} of which class a tensor is, or who calls it"
            )
        for name, value in named:
            if isinstance(value, _GENERATORS):
                raise NotTraced(f"may draw random numbers of {name!r}")
            elif self._is_of_framework(name, value):
                at = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
                raise NotTraced(
                    f"uses {name!r} in {code.co_name!r} ({at}), which is not Keras; "
                    "use `keras.ops`, or declare the layer with `ks.row_wise`"
                )

    def _is_of_framework(self, name: str, value: Any) -> bool:
        is_module = isinstance(value, types.ModuleType)
        module = value.__name__ if is_module else getattr(value, "__module__", None)
        package = module.partition(".")[0] if isinstance(module, str) else ""
        names = (package.removesuffix("lib"), name.partition(".")[0])
        return self._framework in names or name in _OF_TRACES


def _tells_traces(code: types.CodeType, texts: set[str]) -> bool:
    """Whether code could tell a tensor of a trace by the names in it."""
    names = frozenset(code.co_names)
    asks = not names.isdisjoint(_OF_CLASSES) and any("ensor" in x for x in texts)
    is_int = current_tracer().is_any and names >= {"isinstance", "int"}
    together = any(names >= each for each in _TOGETHER)
    by_text = not texts.isdisjoint(_OF_TRACES | _ATTRIBUTES)
    return asks or is_int or together or by_text


def _file(frame: types.FrameType) -> str:
    """The file of a function; of one that is generated, that of its module."""
    file = frame.f_code.co_filename
    is_generated = file.startswith("<")
    return str(frame.f_globals.get("__file__", file)) if is_generated else file


def _is_known(file: str) -> bool:
    if is_library(file) or f"{os.sep}keras_hub{os.sep}" in file:
        return True  # Keras's models ask which kernels their framework has.
    return file.startswith(_PYTHON) and _INSTALLED not in file
