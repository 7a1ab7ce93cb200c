"""What is particular to Keras on JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras_strategies.keras_compat.input import thread_input
from keras_strategies.keras_compat.patching import is_patched, replace

# What each kind of loop carries from step to step, in the order of its state.
_STATE_NAMES = {
    "train": (
        "trainable_variables",
        "non_trainable_variables",
        "optimizer_variables",
        "metrics_variables",
    ),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}


def hook_jax_input() -> None:
    """Lets a `BatchPlacer` place batches on JAX; later calls do nothing.

    It has a method `place(batch)` as well, for `train_on_batch` and its siblings.

    Keras 3.15: `JAXEpochIterator._get_iterator` keeps the layouts of the first
    batch for all; `_distribute_data` serves `train_on_batch` and `test_on_batch`.
    """
    from keras.src.backend.jax import trainer

    def wrap_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _get_iterator(self: Any) -> Any:
            placer = thread_input.placer
            if placer is None:
                return original(self)
            return placer.batches(self.data_adapter.get_jax_iterator())

        return _get_iterator

    def wrap_distribute(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _distribute_data(data: Any, *args: Any, **kwargs: Any) -> Any:
            if thread_input.placer is None:
                return original(data, *args, **kwargs)
            return thread_input.placer.place(data)

        return _distribute_data

    if not is_patched(trainer):
        replace(trainer, "_distribute_data", wrap_distribute)
        replace(trainer.JAXEpochIterator, "_get_iterator", wrap_iterator)


def hook_jax_placement(
    put: Callable[[Any, Any], Any], is_spread: Callable[[Any], bool]
) -> None:
    """Lets `put(array, sharding)` place variables on devices of several processes.

    Keras 3.15: `distribute_tensor` of the JAX backend's `distribution_lib`, which
    `JaxVariable._direct_assign` calls. `jax.device_put`, which it uses, asks all
    processes whether they have the same value, even where only one may have it yet.

    Args:
        put: places an array that this process has.
        is_spread: says whether an array lies on devices of several processes.
    """
    from keras.src.backend.jax import distribution_lib

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def distribute_tensor(tensor: Any, layout: Any) -> Any:
            import jax

            sharding = getattr(layout, "backend_layout", layout)
            if (
                not isinstance(sharding, jax.sharding.Sharding)
                or sharding.is_fully_addressable
                or isinstance(tensor, jax.core.Tracer)
                or is_spread(tensor)
            ):
                return original(tensor, layout)
            return put(tensor, sharding)

        return distribute_tensor

    if not is_patched(distribution_lib):
        replace(distribution_lib, "distribute_tensor", wrap)


def record_jax_state(model: Any, kind: str, state: Any) -> None:
    """Says which arrays the variables stand for while a loop is under way.

    Keras 3.15 on JAX takes the values away from the variables for the length of
    an epoch and notes the current ones in `_jax_state` after each step, which is
    too late for an exception in a step.
    """
    # object.__setattr__: Keras would track the arrays.
    names = _STATE_NAMES[kind]
    object.__setattr__(model, "_jax_state", dict(zip(names, state, strict=True)))


def sync_jax_state(model: Any) -> None:
    """Gives the variables of a model in a loop their current values."""
    model.jax_state_sync()


def restore_jax_state(model: Any) -> None:
    """Gives the variables their values back after a loop ended with an error.

    `fit` of Keras 3.15 does so, `evaluate`, `predict` and `*_on_batch` do not.
    """
    state = getattr(model, "_jax_state", None) or {}
    arrays = [array for group in state.values() for array in group]
    # A program that failed while it ran has used up what it was given.
    if not any(array.is_deleted() for array in arrays):
        model.jax_state_sync()


def move_variable(variable: Any, layout: Any) -> None:
    """Changes the layout that a variable's values have, now and in future.

    Keras 3.15: `JaxVariable._layout` (None, or a `TensorLayout`), which
    `_direct_assign` applies.
    """
    variable._layout = layout
    if variable._value is not None:
        variable._direct_assign(variable._value)


def set_layout(variable: Any, layout: Any) -> None:
    """Gives a variable without a value the layout that one would have.

    Keras 3.15: `JaxVariable._layout`.
    """
    variable._layout = layout


def layout_of(variable: Any) -> Any:
    """The layout that a variable's values have on JAX, None without one."""
    return variable._layout
