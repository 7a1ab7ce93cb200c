"""Subclasses of variables, and variables as arguments of traces."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops import (
    resource_variable_ops,
)

from keras_strategies.engines.tensorflow.compat.gradients import tape_id
from keras_strategies.keras_compat.private_names import Private

_PYTHON = "tensorflow.python"
_VARIABLES = f"{_PYTHON}.ops.resource_variable_ops"

PRIVATE_NAMES = (
    Private(
        _VARIABLES,
        (
            "ResourceVariable",
            "UninitializedVariable",
            "VariableSpec",
            "_UnreadVariable",
            "variable_accessed",
        ),
        "Mirrored and sharded variables, and what assignments return.",
    ),
    Private(
        f"{_VARIABLES}.BaseResourceVariable",
        (
            "_export_to_saved_model_graph",
            "_in_graph_mode",
            "_lazy_read",
            "_read_variable_op",
            "_restore_from_tensors",
            "_strided_slice_assign",
            "_unique_id",
        ),
        "Reads and assignments of mirrored and sharded variables.",
    ),
    Private(f"{_VARIABLES}.VariableSpec", ("_component_specs",), "Their trace types."),
)


def is_resource_variable(variable: Any) -> bool:
    """Whether a variable is a plain one, with a value or without, not of a subclass."""
    plain = (
        resource_variable_ops.ResourceVariable,
        resource_variable_ops.UninitializedVariable,
    )
    return type(variable) in plain


def value_or_spec(variable: Any) -> Any:
    """The value of a variable, or the `tf.TensorSpec` of one without a value."""
    if isinstance(variable, resource_variable_ops.UninitializedVariable):
        return tf.TensorSpec(variable.shape, variable.dtype)
    return variable.read_value()


def new_variable(value: Any, trainable: bool, name: str) -> Any:
    """A plain variable.

    Args:
        value: tensor, or `tf.TensorSpec` for a variable without a value, which takes no
            memory and which programs are traced with.
        trainable: bool.
        name: str.
    """
    if not isinstance(value, tf.TensorSpec):
        return tf.Variable(value, trainable=trainable, name=name)
    return resource_variable_ops.UninitializedVariable(
        trainable=trainable, name=name, shape=value.shape, dtype=value.dtype
    )


def record_read(variable: Any) -> None:
    """Notifies tapes and graphs that a variable is read."""
    resource_variable_ops.variable_accessed(variable)


class ResourceVariable(resource_variable_ops.BaseResourceVariable):  # type: ignore[misc]
    """A variable with reads that a subclass may replace; not a composite tensor."""

    def replica_value(self) -> Any:
        """The result of a read in place of the variable's value; None for the value."""
        return None

    def _read_variable_op(self, no_copy: bool = False) -> Any:
        value = self.replica_value()
        return super()._read_variable_op(no_copy) if value is None else value

    def exported(self, tensor_map: Any) -> list[Any]:
        """Further handles of the variable in a SavedModel.

        Args:
            tensor_map: dict from a handle to the exported one, to be extended.
        """
        return []

    def _export_to_saved_model_graph(
        self, object_map: Any, tensor_map: Any, options: Any, **kwargs: Any
    ) -> list[Any]:
        handles = super()._export_to_saved_model_graph(
            object_map=object_map, tensor_map=tensor_map, options=options, **kwargs
        )
        return [*handles, *self.exported(tensor_map)]


class VariableWithoutValue(  # type: ignore[misc]
    ResourceVariable, resource_variable_ops.UninitializedVariable
):
    """A variable whose handle has no value, which a subclass has elsewhere.

    Tapes and programs identify it by the handle.

    Args:
        like: `tf.Variable`, of which shape, dtype and name are taken.
    """

    def __init__(self, like: Any):
        super().__init__(
            trainable=like.trainable,
            name=like.name.split(":")[0],
            shape=like.shape,
            dtype=like.dtype,
            synchronization=like.synchronization,
            aggregation=like.aggregation,
        )

    #: Methods of variables that assign single entries by the handle.
    entry_methods = (
        "_strided_slice_assign",
        "batch_scatter_update",
        *(f"scatter_nd_{name}" for name in ("add", "sub", "min", "max", "update")),
    )

    def is_initialized(self, name: str | None = None) -> Any:
        return tf.constant(True)


class WithAssignments:
    """Mix-in of a variable with a hook that is called after each assignment.

    TensorFlow ends every assignment with `BaseResourceVariable._lazy_read`, also
    assignments of slices and of rows, and those by functions of `tf.compat.v1`.
    """

    def assigned(self, operation: Any) -> Any:
        """Called after an assignment.

        Args:
            operation: the assigning operation; None in eager code.

        Returns:
            The result of an assignment with `read_value=False`.
        """
        raise NotImplementedError

    def after(self, operation: Any) -> Any:
        """The result of an assignment: the variable, which can be assigned again."""
        raise NotImplementedError

    def _lazy_read(self, op: Any) -> Any:
        self.assigned(op)
        record_read(self)
        return self.after(op)

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        done = super()._restore_from_tensors(restored_tensors)  # type: ignore[misc]
        return self.assigned(done)


class UnreadVariable(resource_variable_ops._UnreadVariable):  # type: ignore[misc]
    """The result of an assignment: the variable, which can be assigned again.

    Args:
        variable: the variable.
        operation: the assigning operation.
    """

    def __init__(self, variable: Any, operation: Any):
        super().__init__(
            handle=variable.handle,
            dtype=variable.dtype,
            shape=variable.shape,
            in_graph_mode=variable._in_graph_mode,
            parent_op=operation,
            unique_id=variable._unique_id,
        )


def handle_alias(variable: Any, context: Any) -> Any:
    """The number of a variable's handle among the arguments of a trace.

    Args:
        variable: the variable.
        context: a `tf.types.experimental.TracingContext`.
    """
    return context.alias_global_id(tape_id(variable.handle))


def handle_specs(alias: Any) -> list[Any]:
    """The specifications of a variable's tensors as an argument of a trace."""
    spec = resource_variable_ops.VariableSpec([], alias_id=alias)
    return list(spec._component_specs)
