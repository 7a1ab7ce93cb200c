"""Optimizer classes without the methods of one backend."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_strategies.keras_compat.optimizers.optimizer_parts import optimizers_of

#: Modules with an optimizer's classes of a backend.
_OF_BACKEND = re.compile(r"keras\.src\.backend\.\w+\.optimizers\.")


def plain_optimizer(optimizer: Any) -> None:
    """Replaces the methods of an optimizer that need `tf.Variable`s.

    Keras 3.15 on TensorFlow: `TFOptimizer` reads the `tf.Variable` of each variable
    and updates through `tf.distribute`. With the methods of `BaseOptimizer` it works
    in a `StatelessScope`, as on the other backends.
    """
    kind: Any = type(optimizer)
    plain = _plain(kind)
    if plain is not kind:
        object.__setattr__(optimizer, "__class__", plain)


@functools.cache
def _plain(kind: Any) -> Any:
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    backend_kinds = [k for k in kind.__mro__ if k.__name__ == "TFOptimizer"]
    if not backend_kinds:
        return kind
    names = {
        name
        for name, value in vars(backend_kinds[0]).items()
        if callable(value) and name != "__init__" and hasattr(BaseOptimizer, name)
    }
    methods = {name: _of(BaseOptimizer, name) for name in names}
    # Next to the backend's class, so that an optimizer's own methods come before it.
    plain_base = type("PlainOptimizer", (backend_kinds[0],), methods)
    return type(kind.__name__, (kind, plain_base), {"__module__": kind.__module__})


def _of(kind: Any, name: str) -> Callable[..., Any]:
    """A method that calls the class's current one: patches change over time."""

    @functools.wraps(getattr(kind, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(kind, name)(self, *args, **kwargs)

    return method


def optimizer_kind(optimizer: Any) -> Any:
    """The class that an optimizer had before `plain_optimizer`."""
    kind = type(optimizer)
    return kind.__mro__[1] if _plain(kind.__mro__[1]) is kind else kind


@contextlib.contextmanager
def portable_optimizer(model: Any) -> Iterator[None]:
    """A context in which a model's optimizer is of a class of every backend.

    Keras 3.15 on Torch: an optimizer is of a class in `keras.src.backend.torch`, and a
    file with this class would load an optimizer for Torch tensors on any backend.
    """
    optimizers = [getattr(model, "optimizer", None)]
    changed = []
    while optimizers:
        optimizer = optimizers.pop()
        kind = type(optimizer)
        if kind.__module__.startswith("keras.src.backend."):
            public = next(
                c
                for c in kind.__mro__
                if c.__module__.startswith("keras.src.optimizers.")
            )
            object.__setattr__(optimizer, "__class__", public)
            changed.append((optimizer, kind))
        optimizers += optimizers_of(optimizer)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizers.append(optimizer.inner_optimizer)
    try:
        yield
    finally:
        for optimizer, kind in changed:
            object.__setattr__(optimizer, "__class__", kind)


def model_from_config(
    original: Any, config_json: Any, *args: Any, **kwargs: Any
) -> Any:
    """Loads a model whose file names an optimizer's class of one backend.

    Keras 3.15 on Torch writes its class in `keras.src.backend.torch`, which needs
    Torch tensors on any backend. The class in `keras.optimizers` makes that of the
    backend in use.
    """
    return original(json.dumps(_with_public(json.loads(config_json))), *args, **kwargs)


def _with_public(config: Any) -> Any:
    if isinstance(config, list):
        return [_with_public(each) for each in config]
    if not isinstance(config, dict):
        return config
    found = {key: _with_public(value) for key, value in config.items()}
    module = config.get("module")
    is_of_backend = isinstance(module, str) and _OF_BACKEND.match(module)
    if is_of_backend and hasattr(keras.optimizers, str(config.get("class_name"))):
        found["module"] = "keras.optimizers"
    return found
