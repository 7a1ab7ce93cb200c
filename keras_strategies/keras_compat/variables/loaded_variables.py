"""Variables of a model that is made to be loaded: no initial values before a file's."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any

from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.saving.mapped_tensors import mapping_tensors
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.thread_state import current_stateless_scope
from keras_strategies.keras_compat.variables.creation import (
    variable_maker,
    without_maker,
)


class _Loading(threading.local):
    #: Variables without values by id, in their order; None outside of a block.
    waiting: dict[int, Any] | None = None
    #: Layers whose parameters, on Torch, are registered at the end of the block.
    untracked: list[Any]
    #: Progress in variables, of large models; None before the first one is loaded.
    bar: Any = None


#: Entries of a model whose progress is shown.
_LARGE = 2**28

_loading = _Loading()
# Classes of keras_hub whose `from_preset` is such a block.
_presets: set[Any] = set()


@contextlib.contextmanager
def values_of_files() -> Iterator[None]:
    """A block of code that makes a model and assigns most of its variables.

    Variables of strategies, made by an initializer of Keras, have no value until they
    are assigned: an initial value takes more time than one from a file. Those without
    one at the end of the block get their initial values, which are the same then:
    Keras draws them from a number that the initializer has.

    Reads in the block give initial values, as Keras's own deferred variables do.
    """
    if _loading.waiting is not None or current_stateless_scope() is not None:
        yield
        return
    _loading.waiting, _loading.untracked, _loading.bar = {}, [], None
    try:
        with patching.installed_while("loading"), mapping_tensors():
            yield
            _initialize_all()
    finally:
        _loading.waiting = None


def _initialize_all() -> None:
    waiting, _loading.waiting = _loading.waiting or {}, None
    for variable in waiting.values():
        variable._deferred_initialize()
    if waiting and _loading.bar is not None:
        _loading.bar.add(len(waiting))
    for layer in _loading.untracked:
        layer._track_variables()


def wait(variable: Any, initializer: Any) -> bool:
    """Whether a variable that is being made waits for a value of a file.

    Keras 3.15: as in a `StatelessScope`, the variable has `_initializer` and no
    `_value`. On JAX its layout is that of the variable's path.
    """
    if _loading.waiting is None or current_stateless_scope() is not None:
        return False
    if variable.synchronization == "on_read" or not _is_reproducible(initializer):
        return False
    variable._value, variable._initializer = None, initializer
    if hasattr(variable, "_initialize_layout"):
        variable._initialize_layout()
    _loading.waiting[id(variable)] = variable
    return True


def end_wait(variable: Any) -> bool:
    """Whether a variable has waited until now, for the value that it gets."""
    waiting = _loading.waiting
    if not waiting or id(variable) not in waiting:
        return False
    if _loading.bar is None:
        _loading.bar = _progress_bar(list(waiting.values()))
    del waiting[id(variable)]
    _loading.bar.add(1)
    variable._initializer = None
    return True


def give_first_value(variable: Any, value: Any) -> None:
    """Makes a variable that waits of what an engine has made of an array."""
    end_wait(variable)
    variable._initialize(value)


def _progress_bar(variables: list[Any]) -> Any:
    """Keras's bar; a silent one of small models, and on workers but the chief."""
    import keras

    workers = getattr(strategy_of(variables[0]), "workers", None)
    is_shown = sum(math.prod(v.shape) for v in variables) >= _LARGE and (
        workers is None or workers.is_chief
    )
    return keras.utils.Progbar(
        len(variables), verbose=int(is_shown), unit_name="variable"
    )


def is_waiting(variable: Any) -> bool:
    """Whether a variable has no value before it is assigned."""
    return id(variable) in (_loading.waiting or ())


def track_variables(original: Any, layer: Any) -> None:
    """`TorchLayer._post_build`: registers values, once all are there."""
    if any(map(is_waiting, layer.variables)):
        _loading.untracked.append(layer)
    else:
        original(layer)


def end_waits_for_optimizer() -> None:
    """Called when a variable is made, for the slots of an optimizer.

    Keras 3.15 on TensorFlow: `TFOptimizer.add_variable_from_reference` reads the
    `tf.Variable` of the variable that the slot belongs to.
    """
    import keras

    if not _loading.waiting or keras.backend.backend() != "tensorflow":
        return
    if isinstance(variable_maker(), keras.optimizers.Optimizer):
        # On TensorFlow, variables that an optimizer makes have no copies.
        with without_maker():
            _initialize_all()


def _is_reproducible(initializer: Any) -> bool:
    """Whether it is one of Keras, and draws from a number, not from a generator."""
    import keras

    kind = type(initializer)
    return (
        isinstance(initializer, keras.initializers.Initializer)
        and kind.__module__.partition(".")[0] == "keras"
        and isinstance(getattr(initializer, "seed", 0), int)
    )


def load_presets_into_variables() -> None:
    """Makes `from_preset` of an imported keras_hub a block of `values_of_files`."""
    keras_hub = sys.modules.get("keras_hub")
    models = getattr(keras_hub, "models", None)
    for kind in (getattr(models, name, None) for name in ("Backbone", "Task")):
        original = vars(kind).get("from_preset") if kind else None
        if isinstance(original, classmethod):
            _wrap(kind, original.__func__)


def _wrap(kind: Any, original: Any) -> None:
    if kind in _presets:
        return
    _presets.add(kind)

    @functools.wraps(original)
    def from_preset(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with values_of_files():
            return original(cls, *args, **kwargs)

    kind.from_preset = classmethod(from_preset)
