"""Variables with values in other processes, such as parameter servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from keras_strategies.errors import BackendError, InvalidArgumentError
from keras_strategies.keras_compat.thread_state import current_stateless_scope

_TENSORFLOW_ONLY = (
    "_copy_trackable_to_cpu",
    "_export_to_saved_model_graph",
    "_restore_from_tensors",
    "_serialize_to_tensors",
    "_shared_name",
    "handle",
    "sparse_read",
)


class VariableHost(Protocol):
    """Storage of the values of variables outside of this process."""

    @property
    def is_local(self) -> bool:
        """Whether variables currently have values in this process."""

    def create(self, variable: Any, value: Any) -> None:
        """Stores the initial value of a variable, a tensor."""

    def create_with(self, variable: Any, initializer: Callable[..., Any]) -> None:
        """Stores the initial value of a variable, computed by an initializer."""

    def read(self, variable: Any) -> Any:
        """The unsharded value, a NumPy array."""

    def read_slice(self, variable: Any, index: Any) -> Any:
        """The part of the unsharded value that NumPy indexing selects, an array."""

    def write(self, variable: Any, value: Any) -> None:
        """Sets the unsharded value."""

    def add(self, variable: Any, delta: Any) -> Any:
        """Adds to the unsharded value as one update; returns the new value."""

    def is_large(self, variable: Any) -> bool:
        """Whether the unsharded value is too large for this process."""

    def pieces(self, variable: Any) -> Iterator[tuple[int, Any]]:
        """The value as pairs of a first row and consecutive rows, NumPy arrays."""

    def write_pieces(self, variable: Any, pieces: Iterable[tuple[int, Any]]) -> None:
        """Sets consecutive rows, each pair of a first row and an array."""

    def write_durably(self, write: Callable[[], None]) -> None:
        """Calls `write` until what it has written cannot be lost."""

    def places(self, variable: Any) -> list[tuple[str, int, int]]:
        """Device, first row and the row after the last of each part."""

    def place(self, variable: Any) -> str:
        """Placement of a variable, for its representation."""


def _no_gradients(variable: Any) -> str:
    return (
        f"The value of variable {variable.path!r} is on parameter servers, and a "
        "gradient was computed by a copy in this process, which autograd does not "
        "record. Call `ks.value_and_grad(loss_fn, variables)` in a function that "
        "`strategy.run` or `ClusterCoordinator.schedule` runs on a worker: only the "
        "rows that a batch looks up are sent there."
    )


def _refuse_backward(tensor: Any, message: str) -> Any:
    """A tensor of Torch that raises an error in the backward pass."""
    import torch

    if not torch.is_grad_enabled() or not tensor.is_floating_point():
        return tensor

    def refuse(gradient: Any) -> None:
        raise BackendError(message)

    tensor = tensor.detach().requires_grad_(True)
    tensor.register_hook(refuse)
    return tensor


class HostedValue:
    """Placeholder in a variable for a value in another process.

    Keras reads the shape of `_value` when it is made, and `requires_grad` on Torch.
    """

    def __init__(self, shape: Any, dtype: Any):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.requires_grad = False


def host_variable(variable: Any, host: VariableHost) -> None:
    """Stores the value of a variable, made or not, in a `VariableHost`.

    Keras 3.15: `KerasVariable.__init__` and `_deferred_initialize` call `_initialize`
    or `_initialize_with_initializer`; `value` is what everything reads, and
    `_direct_assign` what everything writes.
    """
    kind: Any = type(variable)
    object.__setattr__(variable, "_keras_strategies_host", host)
    variable.__class__ = _hosted(kind)


def is_hosted(value: Any) -> bool:
    """Whether something is a variable with a value in a `VariableHost`."""
    return "_keras_strategies_host" in getattr(value, "__dict__", {})


def host_of(variable: Any) -> VariableHost:
    """The host of a hosted variable's value."""
    return variable.__dict__["_keras_strategies_host"]  # type: ignore[no-any-return]


def is_streamed(value: Any) -> bool:
    """Whether something is a variable that is saved and loaded piece by piece."""
    return (
        is_hosted(value)
        and not host_of(value).is_local
        and current_stateless_scope() is None
        and host_of(value).is_large(value)
    )


@functools.cache
def _hosted(kind: Any) -> Any:
    import keras

    class Hosted(kind):
        #: The original class of the variable.
        _kind = kind

        def _initialize(self, value: Any) -> None:
            host_of(self).create(self, value() if callable(value) else value)
            shape = value.shape if self._shape is None else self._shape
            self._value = HostedValue(shape, self._dtype)

        def _initialize_with_initializer(self, initializer: Any) -> None:
            self._value = HostedValue(self._shape, self._dtype)
            host_of(self).create_with(self, initializer)

        @property
        def value(self) -> Any:
            if host_of(self).is_local:
                return super().value
            scope = current_stateless_scope()
            if scope is not None:
                found = scope.get_current_value(self)
                if found is None:
                    # Only shapes are inferred: the number is not read.
                    found = keras.ops.zeros(self._shape, dtype=self._dtype)
                return self._maybe_autocast(found)
            if self._value is None:
                return self._maybe_autocast(
                    keras.ops.zeros(self._shape, dtype=self._dtype)
                )
            value = keras.ops.convert_to_tensor(host_of(self).read(self), self._dtype)
            if keras.backend.backend() == "torch" and self.trainable:
                value = _refuse_backward(value, _no_gradients(self))
            return self._maybe_autocast(value)

        def _direct_assign(self, value: Any) -> None:
            host_of(self).write(self, value)

        def assign(self, value: Any) -> Any:
            pieces = getattr(value, "pieces", None)
            if pieces is None or not is_streamed(self):
                return super().assign(value)
            if tuple(value.shape) != tuple(self._shape):
                raise InvalidArgumentError(
                    f"Variable {self.path!r} has the shape {tuple(self._shape)}, and "
                    f"its new value has {tuple(value.shape)}. They must be equal."
                )
            host_of(self).write_pieces(self, pieces())
            return self

        def pieces(self) -> Iterator[tuple[int, Any]]:
            """The value as pairs of a first row and consecutive rows."""
            return host_of(self).pieces(self)

        def assign_add(self, value: Any) -> Any:
            if current_stateless_scope() is not None or host_of(self).is_local:
                return super().assign_add(value)
            return host_of(self).add(self, value)

        def assign_sub(self, value: Any) -> Any:
            if current_stateless_scope() is not None or host_of(self).is_local:
                return super().assign_sub(value)
            return host_of(self).add(self, -keras.ops.convert_to_tensor(value))

        def numpy(self) -> Any:
            return host_of(self).read(self)

        @property
        def device(self) -> str:
            """The device of the value."""
            return host_of(self).places(self)[0][0]

        # TensorFlow: gradients, lookups, checkpoints and SavedModels.

        @property
        def handle(self) -> Any:
            if host_of(self).is_local:
                raw: Any = self._value
                return raw.handle
            raise BackendError(_no_gradients(self))

        def sparse_read(self, indices: Any, name: Any = None) -> Any:
            # `tf.gather` calls it, and with it `tf.nn.embedding_lookup`.
            from keras_strategies.keras_compat.variables.lookups import looked_up

            found = looked_up(self, indices, 0)
            if found is NotImplemented:
                found = keras.ops.take(self.value, indices, axis=0)
            return found

        @property
        def _shared_name(self) -> str:
            if host_of(self).is_local:
                raw: Any = self._value
                return str(raw._shared_name)
            return str(self.path)

        def _serialize_to_tensors(self) -> dict[str, Any]:
            value = keras.ops.convert_to_tensor(host_of(self).read(self), self._dtype)
            return {"VARIABLE_VALUE": value}

        def _restore_from_tensors(self, restored_tensors: dict[str, Any]) -> Any:
            self.assign(restored_tensors["VARIABLE_VALUE"])
            return self

        def _copy_trackable_to_cpu(self, object_map: Any) -> None:
            raise BackendError(
                f"Variable {self.path!r} is on parameter servers, and `tf.saved_model."
                "save` saves variables of this process. Call `model.export(path)`, "
                "which reads them first, or save with `model.save(path)` and load the "
                "file without a strategy."
            )

        def _export_to_saved_model_graph(
            self, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any
        ) -> Any:
            return self._copy_trackable_to_cpu(object_map)

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            found = host_of(self).read(self)
            return found if dtype is None else found.astype(dtype)

        def __len__(self) -> int:
            return int(self._shape[0])

        def __getitem__(self, index: Any) -> Any:
            if current_stateless_scope() is not None or host_of(self).is_local:
                return self.value[index]
            return keras.ops.convert_to_tensor(host_of(self).read_slice(self, index))

        def __repr__(self) -> str:
            return (
                f"<Variable path={self.path}, shape={tuple(self._shape)}, "
                f"dtype={self._dtype}, {host_of(self).place(self)}>"
            )

    if not hasattr(kind, "_serialize_to_tensors"):
        for name in _TENSORFLOW_ONLY:
            delattr(Hosted, name)
    Hosted.__name__ = kind.__name__
    Hosted.__qualname__ = kind.__qualname__
    return Hosted


def track_variables(original: Any, self: Any) -> None:
    from torch.nn import ParameterDict

    if any(is_hosted(variable) for variable in self.variables):
        self._torch_params = ParameterDict()
    else:
        original(self)


def track_variable(original: Any, self: Any, variable: Any) -> None:
    if not is_hosted(variable):
        original(self, variable)
