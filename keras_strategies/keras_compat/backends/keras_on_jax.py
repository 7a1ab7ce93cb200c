"""Use of Keras on JAX beyond its public interface."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.models.input_adapters import (
    array_batches,
    own_batches,
    thread_input,
)

# Groups of variables in the state of each kind of loop, in its order.
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
    adapter = self.data_adapter
    batches = own_batches(adapter)
    if batches is None and placer.reads_own_rows:
        batches = array_batches(adapter, placer.unread)
    if batches is None:
        batches = adapter.get_jax_iterator()
    return placer.batches(batches, self.steps_per_epoch)


class _Placement:
    put: Callable[[Any, Any], Any]
    is_spread: Callable[[Any], bool]
    read: Callable[[Any, Any], Any]


def hook_jax_placement(
    put: Callable[[Any, Any], Any],
    is_spread: Callable[[Any], bool],
    read: Callable[[Any, Any], Any],
) -> None:
    """Installs hooks for variables on devices of several processes.

    `numpy`, `get_weights`, `convert_to_numpy` and the saving of models read a variable
    by `Variable.__array__`.

    Args:
        put: callable of an array of this process and a sharding; places the array.
        is_spread: callable of an array, whether it is on devices of several processes.
        read: callable of a variable and its value that returns a NumPy array; None for
            values that JAX reads itself.
    """
    _Placement.put, _Placement.is_spread, _Placement.read = put, is_spread, read
    patching.install("jax workers")


class _Convolutions:
    grouped: Callable[..., Any]


def hook_convolutions(grouped: Callable[..., Any]) -> None:
    """Installs a hook for convolutions with several groups of channels.

    Args:
        grouped: called as `grouped(convolve, inputs, kernel)`, with Keras's function of
            inputs and kernel.
    """
    _Convolutions.grouped = grouped
    patching.install("jax convolutions")


def convolution(
    original: Any, inputs: Any, kernel: Any, *args: Any, **kwargs: Any
) -> Any:
    bound = inspect.signature(original).bind(inputs, kernel, *args, **kwargs)
    layout = keras.config.image_data_format()
    layout = bound.arguments.get("data_format") or layout
    channels = np.shape(inputs)[-1 if layout == "channels_last" else 1]
    if channels == np.shape(kernel)[-2]:
        return original(inputs, kernel, *args, **kwargs)
    return depthwise_convolution(original, inputs, kernel, *args, **kwargs)


def depthwise_convolution(
    original: Any, inputs: Any, kernel: Any, *args: Any, **kwargs: Any
) -> Any:
    def convolve(inputs: Any, kernel: Any) -> Any:
        return original(inputs, kernel, *args, **kwargs)

    return _Convolutions.grouped(convolve, inputs, kernel)


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
    """Records the current arrays of a model's variables during a loop.

    Keras 3.15 on JAX empties the variables for the length of an epoch and records
    their arrays in `_jax_state` after each step, which is too late for an exception in
    a step.
    """
    # object.__setattr__: Keras would track the arrays.
    names = _STATE_NAMES[kind]
    object.__setattr__(model, "_jax_state", dict(zip(names, state, strict=True)))


def hold_jax_state(model: Any, kind: str, state: Any) -> None:
    """Records the arrays of a loop, while the variables are empty."""
    record_jax_state(model, kind, state)
    model._jax_state_synced = False


def recorded_jax_state(model: Any, kind: str) -> tuple[Any, ...]:
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


def sync_jax_state(model: Any) -> None:
    """Assigns the current arrays of a loop to the model's variables."""
    model.jax_state_sync()


def restore_jax_state(model: Any) -> None:
    """Assigns the arrays of a loop to the variables after it ended with an error.

    `fit` of Keras 3.15 does so, `evaluate`, `predict` and `*_on_batch` do not.
    """
    state = getattr(model, "_jax_state", None) or {}
    arrays = [array for group in state.values() for array in group]
    # A program that failed during execution has deleted its donated inputs.
    if not any(array.is_deleted() for array in arrays):
        model.jax_state_sync()


def move_variable(variable: Any, layout: Any) -> None:
    """Changes the layout of a variable's present and future values.

    Keras 3.15: `JaxVariable._layout` (None, or a `TensorLayout`), which
    `_direct_assign` applies.
    """
    variable._layout = layout
    if variable._value is not None:
        variable._direct_assign(variable._value)


def set_layout(variable: Any, layout: Any) -> None:
    """Sets the layout of the future values of a variable without a value.

    Keras 3.15: `JaxVariable._layout`.
    """
    variable._layout = layout


def layout_of(variable: Any) -> Any:
    """The layout of a variable's values on JAX; None without one."""
    return getattr(variable, "_layout", None)
