"""Distribution strategies for Keras 3 on JAX, Torch and TensorFlow.

>>> import keras, keras_strategies as ks
>>> strategy = ks.MirroredStrategy()
>>> with strategy.scope():
...     model = keras.Sequential([keras.layers.Dense(1)])
...     model.compile("adam", "mse")
>>> model.fit(x, y, batch_size=256)

The public names are listed in `__init__.pyi`. Each is imported at its first use, so
that the launcher and the resolvers run without Keras, which imports a framework.
"""

import ast as _ast
import importlib as _importlib
import importlib.util as _importlib_util
import os as _os
import pkgutil as _pkgutil
import sys as _sys
from types import ModuleType as _ModuleType

__version__ = "0.2.0"


def _origins() -> dict[str, str]:
    """The module of each public name, read from the stub."""
    # Not `importlib.resources`, which takes longer than the rest of this import.
    stub = _pkgutil.get_data(__name__, "__init__.pyi")
    assert stub is not None
    return {
        alias.name: statement.module
        for statement in _ast.parse(stub).body
        if isinstance(statement, _ast.ImportFrom) and statement.module
        for alias in statement.names
    }


_ORIGINS = _origins()
__all__ = sorted(_ORIGINS)


def __getattr__(name: str) -> object:
    origin = _ORIGINS.get(name)
    if origin is None:
        raise AttributeError(_unknown(name))
    if origin == __name__:
        return _import(f"{__name__}.{name}")
    value = getattr(_import(origin), name)
    globals()[name] = value
    return value


def _import(module: str) -> _ModuleType:
    """Imports a module, which may import Keras and its backend.

    TensorFlow reads its log level when it is imported. The level is set to warnings and
    errors meanwhile, unless the user has set one or has imported Keras or TensorFlow.
    """
    level = "TF_CPP_MIN_LOG_LEVEL"
    is_set = level in _os.environ or {"keras", "tensorflow"} & _sys.modules.keys()
    if not is_set:
        _os.environ[level] = "1"
    try:
        return _importlib.import_module(module)
    except ModuleNotFoundError as error:
        text = _missing_backend(error.name)
        if text is None:
            raise
    finally:
        if not is_set:
            del _os.environ[level]
    from keras_strategies.errors import BackendError

    raise BackendError(text)


def _missing_backend(name: str | None) -> str | None:
    """What to do where Keras cannot import its backend; None for other modules."""
    backends = "jax", "torch", "tensorflow"
    if name not in backends:
        return None
    found = [each for each in backends if _find_spec(each) is not None]
    chosen = _os.environ.get("KERAS_BACKEND")
    reason = f"KERAS_BACKEND={chosen!r}" if chosen else "KERAS_BACKEND is not set"
    text = f"Keras uses the backend {name!r} ({reason}), which is not installed. "
    if not found:
        return text + "Install a backend: `pip install jax`, torch or tensorflow."
    return (
        f"{text}Installed: {', '.join(found)}. Set KERAS_BACKEND before Keras is "
        f"imported: `export KERAS_BACKEND={found[0]}` in the shell, or "
        f'`os.environ["KERAS_BACKEND"] = "{found[0]}"` at the top of the script.'
    )


def _find_spec(name: str) -> object:
    try:
        return _importlib_util.find_spec(name)
    except (ImportError, ValueError):
        return None


def _unknown(name: str) -> str:
    import difflib

    text = f"module {__name__!r} has no attribute {name!r}."
    close = difflib.get_close_matches(name, __all__, 1)
    return f"{text} Did you mean {close[0]!r}?" if close else text


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
