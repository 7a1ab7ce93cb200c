"""Use of Keras on Torch beyond its public interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from keras_strategies.errors import ContextError
from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.state_scope import current_policy
from keras_strategies.keras_compat.thread_state import current_stateless_scope
from keras_strategies.keras_compat.variables.values import raw_value


def distribution_class() -> Any:
    """Base class of `keras.distribution.ModelParallel` and its siblings."""
    from keras.src.distribution.distribution_lib import Distribution

    return Distribution


def repeat(original: Any, x: Any, repeats: Any, axis: int | None = None) -> Any:
    import torch

    is_shape = isinstance(x, torch.Tensor) and x.is_meta
    if not is_shape or not isinstance(repeats, int):
        return original(x, repeats, axis)
    return torch.repeat_interleave(x, repeats, dim=axis)


def post_quantize(original: Any, self: Any, mode: str, **kwargs: Any) -> None:
    if current_stateless_scope() is None:
        original(self, mode, **kwargs)


def sparse_categorical_crossentropy(
    original: Any, target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    import torch

    def is_plain(value: Any) -> bool:
        return type(value) is torch.Tensor

    if not (
        from_logits
        and is_plain(target)
        and is_plain(output)
        # Convolutions have classes before pixels in memory, as Keras moves them.
        and output.ndim > 2
        and output.is_contiguous()
        and axis in (-1, output.ndim - 1)
        and target.shape in (output.shape[:-1], (*output.shape[:-1], 1))
    ):
        return original(target, output, from_logits=from_logits, axis=axis)
    labels = target.to(device=output.device, dtype=torch.long).reshape(-1)
    logits = output.reshape(-1, output.shape[-1])
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    return losses.reshape(output.shape[:-1])


class _Modules:
    copy: Callable[[Any, dict[int, Any], Any], Any]
    changed_buffers: Callable[[Any], list[str]]


def hook_torch_modules(
    copy: Callable[[Any, dict[int, Any], Any], Any],
    changed_buffers: Callable[[Any], list[str]],
) -> None:
    """Sets the function by which replicas call torch modules.

    Args:
        copy: returns a module with other parameters, given the module, tensors by the
            `id` of its parameters, and a device.
        changed_buffers: returns the names of buffers of a copy that were changed.
    """
    _Modules.copy = copy
    _Modules.changed_buffers = changed_buffers


def call_module(
    original: Any, self: Any, *args: Any, training: Any = None, **kwargs: Any
) -> Any:
    import torch

    if current_policy() is None:
        return original(self, *args, training=training, **kwargs)
    self.train(training is not False)
    values = {id(raw_value(v)): v.value for v in self.variables}
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
    device = next(iter(tensors or values.values())).device
    module = _Modules.copy(self.module, values, device)
    found = module(*args, **kwargs)
    changed = _Modules.changed_buffers(module)
    if changed:
        raise ContextError(
            f"The torch module of layer {self.name!r} changes its buffer "
            f"{changed[0]!r} on each replica, from the rows of that replica. Use a "
            "layer of Keras for it (such as `keras.layers.BatchNormalization`), or "
            "call the model with `training=False`."
        )
    return found


class _Tensors:
    full_tensor: Callable[[Any], Any]
    read: Callable[[Any], Any]
    assign: Callable[[Any, Any], None]


def hook_torch_dtensors(
    full_tensor: Callable[[Any], Any],
    read: Callable[[Any], Any],
    assign: Callable[[Any, Any], None],
) -> None:
    """Installs hooks for models with DTensors as variables; later calls do nothing.

    Args:
        full_tensor: gathers a DTensor into an ordinary tensor; others are unchanged.
        read: returns the value of a variable or its tensor, a NumPy array, if it has
            been gathered, else None.
        assign: gives a DTensor the values of a tensor.
    """
    _Tensors.full_tensor, _Tensors.read, _Tensors.assign = full_tensor, read, assign
    patching.install("torch dtensors")


def regularization_losses(original: Any, self: Any) -> list[Any]:
    return [_Tensors.full_tensor(loss) for loss in original(self)]


def to_numpy(original: Any, x: Any) -> Any:
    found = _Tensors.read(x)
    if found is not None:
        return found
    # A collective of all processes, if `x` is in shards.
    value = x.value if isinstance(x, keras.Variable) else x
    return original(_Tensors.full_tensor(value))


def assign_shards(shards: Any, value: Any) -> None:
    """Gives a DTensor the values of a tensor, each process its shard."""
    _Tensors.assign(shards, value)


def track_parameters_again(model: Any) -> None:
    """Takes the values of variables as torch parameters of a model and its layers.

    Keras 3.15: `TorchLayer._track_variables` keeps the values that variables have then,
    in `_torch_params`. The layers of Keras lack the `_functional` of a `Sequential`.
    """
    for layer in list(model.modules()):
        if hasattr(layer, "_torch_params"):
            layer._track_variables()


def own_memory(variable: Any, value: Any) -> None:
    """Copies the value of a variable that was made of a value, if it has its memory.

    Keras 3.15 makes a parameter of a tensor, or of a NumPy array, without a copy.
    """
    if keras.backend.backend() != "torch":
        return
    import torch

    parameter = variable._value
    if type(parameter) is torch.nn.Parameter and (
        parameter.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    ):
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
