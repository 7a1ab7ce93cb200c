"""Code of users that a trace cannot follow, by the names that it refers to.

A function that names its framework may use it on tensors, or ask whether it gets one of
them: then a call with symbolic tensors is another than a call with tensors.
"""

from __future__ import annotations

import collections
import contextlib
import dis
import itertools
import os
import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.recorded_calls import are_recorded
from keras_strategies.keras_compat.symbolic_backend import current_tracer
from keras_strategies.rows.python_state import GENERATORS
from keras_strategies.rows.row_tensors import NotTraced, is_library

#: Names by which code could tell a tensor of a trace, or find a framework.
_ABOUT_TRACES = """
    KerasTensor RowTensor __import__ __module__ __mro__ _getframe currentframe
    getprofile gettrace import_module is_keras_tensor record_history
"""
_OF_TRACES = frozenset(_ABOUT_TRACES.split())
#: Attributes that only tensors of a trace have, if code asks for them by a string.
_ATTRIBUTES = frozenset(["ragged", "sparse"])
#: Names that ask for the class of a tensor, or for a module, if used together.
_TOGETHER = ({"isinstance", "type"}, {"issubclass", "type"}, {"sys", "modules"})
_OF_CLASSES = frozenset(["__name__", "__qualname__"])
#: Code objects and the numbers of lines in them.
Lines = set[tuple[types.CodeType, int]]
#: Packages there run other lines where they have computed something before.
_INSTALLED = "-packages"
_PYTHON = str(Path(random.__file__).parent)
#: Files of libraries that have been called.
_known: set[str] = set()


def checked_code() -> contextlib.AbstractContextManager[Lines]:
    """A context in which a function of the user's that cannot be traced does not begin.

    Yields:
        The lines of the user's that run.

    Raises:
        NotTraced: in place of the function, or under a debugger, which stays.
    """
    if sys.gettrace() is not None:
        raise NotTraced("runs under a debugger, or its coverage is measured")
    # What declared layers compute is not traced.
    return _noting(lambda: current_tracer() is not None, _check)


def noted_lines() -> contextlib.AbstractContextManager[Lines]:
    """A context that notes the lines of the user's where calls are recorded.

    None are noted under a debugger.
    """
    if sys.gettrace() is not None:
        return contextlib.nullcontext(set())
    return _noting(are_recorded, lambda frame: None)


@contextlib.contextmanager
def _noting(
    follows: Callable[[], bool], begins: Callable[[types.FrameType], None]
) -> Iterator[Lines]:
    """Notes the lines of functions of the user's.

    Args:
        follows: returns whether calls are noted now.
        begins: is called where a function begins for the first time.
    """
    lines: Lines = set()
    # The code objects stay, as their `id`s are those of others otherwise.
    seen: dict[int, tuple[Any, bool]] = {}

    def note(frame: types.FrameType, event: str, argument: Any) -> Any:
        lines.add((frame.f_code, frame.f_lineno))
        return note

    def called(frame: types.FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code  # Python calls this for each function of any library.
        if code.co_filename in _known or not follows():
            return None
        if id(code) not in seen:
            file = _file(frame)
            is_known = _is_known(file)
            seen[id(code)] = code, not (is_known or _INSTALLED in file)
            if not is_known:
                begins(frame)
            elif file == code.co_filename:
                _known.add(file)
        return note if seen[id(code)][1] else None

    sys.settrace(called)
    try:
        yield lines
    finally:
        sys.settrace(None)


def _check(frame: types.FrameType) -> None:
    """Raises an error for a function that cannot be traced."""
    code = frame.f_code
    # The locals are made a dict by the first use.
    around = frame.f_locals if code.co_freevars else {}
    names = [*code.co_names, *code.co_freevars]
    named = [(name, around.get(name, frame.f_globals.get(name))) for name in names]
    texts = {each for each in code.co_consts if isinstance(each, str)}
    if _tells_traces(code, texts):
        raise NotTraced(
            f"asks in {code.co_name!r} of which class a tensor is, or who calls it"
        )
    # What a library draws from is an argument, or an attribute of its object.
    given = list(frame.f_locals.items())
    held = [x for _, each in given[:1] for x in getattr(each, "__dict__", {}).items()]
    for name, value in (*named, *given, *held):
        if isinstance(getattr(value, "__self__", value), GENERATORS) or (
            name == "random" and _draws(code, dict(named))
        ):
            raise NotTraced(f"may draw random numbers of {name!r}")
    for name, value in named:
        if _is_of_framework(name, value):
            at = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
            raise NotTraced(
                f"uses {name!r} in {code.co_name!r} ({at}), which is not Keras; "
                "use `keras.ops`, or declare the layer with `ks.row_wise`"
            )


def _draws(code: types.CodeType, named: dict[str, Any]) -> bool:
    """Whether code uses the modules `random` or `numpy.random`."""
    for one, other in itertools.pairwise(dis.get_instructions(code)):
        if one.opname not in ("IMPORT_NAME", "LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME"):
            continue
        modules = sys.modules if one.opname == "IMPORT_NAME" else named
        value = modules.get(one.argval)
        is_random = value is np and other.argval == "random"
        if is_random or value is random or value is np.random:
            return True
    return False


def _is_of_framework(name: str, value: Any) -> bool:
    is_module = isinstance(value, types.ModuleType)
    module = value.__name__ if is_module else getattr(value, "__module__", None)
    package = module.partition(".")[0] if isinstance(module, str) else ""
    names = (package.removesuffix("lib"), name.partition(".")[0])
    return keras.backend.backend() in names or name in _OF_TRACES


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
    file, names = frame.f_code.co_filename, frame.f_globals
    if not file.startswith("<"):
        return file
    if str(names.get("__name__")).startswith("namedtuple_"):
        return collections.__file__  # It is generated without a module.
    return str(names.get("__file__", file))


def _is_known(file: str) -> bool:
    if is_library(file) or f"{os.sep}keras_hub{os.sep}" in file:
        return True  # Keras's models ask which kernels their framework has.
    return file.startswith(_PYTHON) and _INSTALLED not in file
