"""Functions and data of a user's script, given to commands as `train.py:build`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from keras_strategies.errors import InvalidArgumentError


def target(text: str) -> tuple[Path, str]:
    """The file and the name of the function.

    Args:
        text: str, `script.py:build`.

    Raises:
        ValueError: if the text has another form, or there is no such file.
    """
    file, colon, name = text.rpartition(":")
    if not colon or not name.isidentifier():
        raise InvalidArgumentError(
            f"{text!r} is not FILE:FUNCTION, such as train.py:build. The "
            "function makes and compiles the model."
        )
    if not Path(file).is_file():
        raise InvalidArgumentError(f"Script {file!r} not found in {Path.cwd()}.")
    return Path(file), name


def loaded(text: str) -> tuple[Any, Any]:
    """The module of a target, and its function.

    Raises:
        ValueError: if there is no such file or function.
    """
    file, name = target(text)
    sys.path.insert(0, str(file.parent.resolve()))
    module = importlib.import_module(file.stem)
    found = getattr(module, "__file__", None)
    if found is None or not Path(found).samefile(file):
        raise InvalidArgumentError(
            f"Script {str(file)!r} cannot be imported, because its name is that of "
            f"another module, {found}. Rename it."
        )
    return module, named(module, name)


def named(module: Any, name: str) -> Any:
    """What a script defines at its top level.

    Raises:
        ValueError: if it does not.
    """
    if not hasattr(module, name):
        raise InvalidArgumentError(
            f"Script {module.__file__!r} has no {name!r} at its top level. It needs a "
            "function that makes and compiles the model, and `data`: arrays `(x, y)`, "
            "a dict of arguments of `fit`, or a function that returns them."
        )
    return getattr(module, name)
