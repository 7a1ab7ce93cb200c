"""Use of Keras on JAX beyond its public interface."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.models.input_adapters import thread_input
from keras_strategies.keras_compat.variables.values import raw_value

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


def distribute_data(original: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
    if thread_input.placer is None:
        return original(data, *args, **kwargs)
    # Placers of JAX have a method for `train_on_batch` and its siblings as well.
    return thread_input.placer.place(data)


def epoch_batches(original: Any, self: Any) -> Any:
    placer = thread_input.placer
    if placer is None:
        return original(self)
    return placer.batches(
        self.data_adapter.get_jax_iterator(), self.steps_per_execution
    )


class _Placement:
    put: Callable[[Any, Any], Any]
    is_spread: Callable[[Any], bool]
    read: Callable[[Any, Any], Any]


def hook_jax_placement(
    put: Callable[[Any, Any], Any],
    is_spread: Callable[[Any], bool],
    read: Callable[[Any, Any], Any],
) -> None:
    """Lets variables lie on devices of several processes.

    `Variable.__array__` is what `numpy`, `get_weights`, `convert_to_numpy` and what
    saves a model call.

    Args:
        put: places an array that this process has.
        is_spread: says whether an array lies on devices of several processes.
        read: makes a NumPy array of a variable's value, given both; None for what JAX
            reads itself.
    """
    _Placement.put, _Placement.is_spread, _Placement.read = put, is_spread, read
    patching.install("jax workers")


def distribute_tensor(original: Any, tensor: Any, layout: Any) -> Any:
    import jax

    sharding = getattr(layout, "backend_layout", layout)
    if (
        not isinstance(sharding, jax.sharding.Sharding)
        or sharding.is_fully_addressable
        or isinstance(tensor, jax.core.Tracer)
        or _Placement.is_spread(tensor)
    ):
        return original(tensor, layout)
    return _Placement.put(tensor, sharding)


def variable_array(variable: Any, original: Callable[..., Any], dtype: Any) -> Any:
    """A variable's value for `Variable.__array__`.

    JAX raises where shards are in other processes.
    """
    if not patching.is_installed("jax workers"):
        # Keras's variables on NumPy take no dtype.
        return original() if dtype is None else original(dtype)
    found = _Placement.read(variable, variable.value)
    if found is None:
        return original(dtype)
    return found if dtype is None else found.astype(dtype)


def record_jax_state(model: Any, kind: str, state: Any) -> None:
    """Says which arrays the variables stand for while a loop is under way.

    Keras 3.15 on JAX takes the values away from the variables for the length of
    an epoch and notes the current ones in `_jax_state` after each step, which is
    too late for an exception in a step.
    """
    # object.__setattr__: Keras would track the arrays.
    names = _STATE_NAMES[kind]
    object.__setattr__(model, "_jax_state", dict(zip(names, state, strict=True)))


def hold_jax_state(model: Any, kind: str, state: Any) -> None:
    """Records arrays that a loop has, while the variables are empty."""
    record_jax_state(model, kind, state)
    model._jax_state_synced = False


def held_jax_state(model: Any, kind: str) -> tuple[Any, ...]:
    """The arrays of a loop, taken from the variables if these have them.

    Keras 3.15: `_get_jax_state`, as its loops do after a callback has read variables.
    """
    names = _STATE_NAMES[kind]
    if model._jax_state_synced:
        groups = dict.fromkeys(names, True)
        state = model._get_jax_state(**groups, purge_model_variables=True)
        hold_jax_state(model, kind, state)
    return tuple(model._jax_state[name] for name in names)


def replace_mesh(device_mesh: Any, layouts: Sequence[Any], devices: Any) -> None:
    """Puts a mesh with one axis, and the layouts on it, on other devices.

    Keras 3.15: `DeviceMesh._shape`, `_devices` and `_backend_mesh`, and
    `TensorLayout._backend_layout`, made when they are first read.

    Args:
        device_mesh: `keras.distribution.DeviceMesh`.
        layouts: the `keras.distribution.TensorLayout`s on it.
        devices: array of device names.
    """
    device_mesh._shape, device_mesh._devices = devices.shape, devices
    with contextlib.suppress(AttributeError):
        del device_mesh._backend_mesh
    for layout in layouts:
        with contextlib.suppress(AttributeError):
            del layout._backend_layout


def record_read_jax_state(
    model: Any, groups: dict[str, bool], state: tuple[Any, ...]
) -> None:
    """Records the arrays of variables that Keras is about to empty.

    Args:
        model: the model.
        groups: the arguments of Keras's `_get_jax_state`, by names of groups; True for
            those in `state`.
        state: a list of arrays for each group, in the order of `_STATE_NAMES["train"]`.
    """
    names = [name for name in _STATE_NAMES["train"] if groups.get(name)]
    object.__setattr__(model, "_jax_state", dict(zip(names, state, strict=True)))
    model._jax_state_synced = False


def variables_are_empty(model: Any) -> bool:
    """Whether a loop of Keras has the values of a model's variables.

    Those of 3.15 empty the variables for the length of an epoch, and `train_on_batch`
    does not.
    """
    return any(raw_value(v) is None for v in model.variables)


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
    return getattr(variable, "_layout", None)
