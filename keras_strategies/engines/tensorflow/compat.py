"""All that this package uses of TensorFlow beyond its public interface.

Tested with TensorFlow 2.21. `PRIVATE_NAMES` has a row for each name;
`tests/test_manifest.py` fails if one is missing in the installed version.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.autograph.operators import control_flow
from tensorflow.python.data.experimental.ops import distribute
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager import execute, record
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import func_graph, ops
from tensorflow.python.ops import (
    control_flow_util,
    control_flow_util_v2,
    control_flow_v2_func_graphs,
    gen_nn_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
    gradients_util,
    resource_variable_ops,
)

from keras_strategies.keras_compat.private_names import Private

_PYTHON = "tensorflow.python"
_VARIABLES = f"{_PYTHON}.ops.resource_variable_ops"

PRIVATE_NAMES = (
    Private(
        f"{_PYTHON}.autograph.core.config",
        ("CONVERSION_RULES", "DoNotConvert"),
        "AutoGraph leaves this package out, as it does Keras.",
    ),
    Private(
        f"{_PYTHON}.autograph.operators.control_flow",
        ("_py_for_stmt", "_tf_iterator_for_stmt", "for_loop_registry"),
        "`for` loops over distributed datasets in programs.",
    ),
    Private(
        f"{_PYTHON}.data.experimental.ops.distribute",
        ("_AutoShardDataset", "compute_batch_size"),
        "Workers read separate files, as with `experimental_distribute_dataset`.",
    ),
    Private(
        "tensorflow.data.Dataset", ("_inputs",), "The readers of an input pipeline."
    ),
    Private(
        f"{_PYTHON}.data.ops.shuffle_op._ShuffleDataset",
        ("_seed", "_seed2"),
        "Pipelines with an order that cannot be repeated.",
    ),
    Private(
        f"{_PYTHON}.data.ops.readers.TFRecordDatasetV2",
        ("_filenames",),
        "The files of a reader.",
    ),
    Private(
        f"{_PYTHON}.data.ops.iterator_ops.OwnedIterator",
        ("_iterator_resource", "_type_spec"),
        "Iterators that are created when they are read.",
    ),
    Private(
        f"{_PYTHON}.distribute.distribute_lib",
        (
            "_get_default_replica_mode",
            "_pop_per_thread_mode",
            "_push_per_thread_mode",
        ),
        "Keras on replicas runs under the default strategy.",
    ),
    Private(
        f"{_PYTHON}.eager.context",
        ("FunctionCallOptions", "context", "global_seed"),
        "The runtime of this process, and the options of its programs.",
    ),
    Private(
        f"{_PYTHON}.eager.context.Context",
        (
            "_collective_leader",
            "_handle",
            "_rng",
            "abort_collective_ops",
            "config",
            "configure_collective_ops",
            "enable_collective_ops",
            "ensure_initialized",
            "function_call_options",
        ),
        "Seeds of operations; options of programs; collectives of workers.",
    ),
    Private(
        f"{_PYTHON}.eager.polymorphic_function.polymorphic_function",
        ("Function",),
        "Functions that replicas call are traced in copies.",
    ),
    Private(
        f"{_PYTHON}.pywrap_tfe",
        ("TFE_ContextSetRunEagerOpAsFunction",),
        "Eager operations of row checks run without a program for each.",
    ),
    Private(
        f"{_PYTHON}.eager.record",
        (
            "could_possibly_record",
            "record_operation",
            "should_record_backprop",
            "stop_recording",
        ),
        "Gradients between the global batch and the replicas.",
    ),
    Private(
        f"{_PYTHON}.eager.execute",
        ("execute",),
        "Shapes in the graph of a layer call are computed for several batch sizes.",
    ),
    Private(
        f"{_PYTHON}.framework.func_graph",
        ("FuncGraph",),
        "A layer call is traced in a graph of its own.",
    ),
    Private(
        f"{_PYTHON}.framework.ops.Graph",
        ("_get_function", "_is_function"),
        "Graphs of the functions that operations of a graph call.",
    ),
    Private(
        f"{_PYTHON}.ops.control_flow_util_v2",
        ("get_func_graph",),
        "Graphs of the branches and bodies of control flow.",
    ),
    Private(
        f"{_PYTHON}.eager.backprop.GradientTape",
        ("_persistent",),
        "Whether a tape can compute gradients twice.",
    ),
    Private(
        f"{_PYTHON}.ops.gradients_util",
        ("_GradientsHelper",),
        "Gradients from the operations of a graph, without a tape.",
    ),
    Private(
        f"{_PYTHON}.framework.ops",
        ("colocate_with",),
        "Copies of variables are assigned on their own devices.",
    ),
    Private(
        f"{_PYTHON}.framework.ops.Graph",
        ("_override_gradient_function", "_variable_creator_stack"),
        "Gradient functions freed with their graph; plain variables on replicas.",
    ),
    Private(
        f"{_PYTHON}.ops.control_flow_util",
        ("GraphOrParentsInXlaContext",),
        "Mirrored variables cannot be assigned in an XLA program.",
    ),
    Private(
        f"{_PYTHON}.ops.gen_nn_ops",
        (
            "conv2d",
            "conv2d_backprop_input",
            "conv3d",
            "conv3d_backprop_input_v2",
            "depthwise_conv2d_native",
            "dilation2d",
            "fractional_max_pool",
            "max_pool",
            "max_pool3d",
            "max_pool_v2",
            "max_pool_with_argmax",
        ),
        "Kernels that fail on a replica without rows.",
    ),
    Private(
        f"{_PYTHON}.ops.gen_stateless_random_ops",
        (
            "stateless_multinomial",
            "stateless_parameterized_truncated_normal",
            "stateless_random_binomial",
            "stateless_random_poisson",
        ),
        "Random numbers of a replica's rows.",
    ),
    Private(
        f"{_PYTHON}.ops.gen_stateless_random_ops_v2",
        (
            "stateless_random_gamma_v3",
            "stateless_random_normal_v2",
            "stateless_random_uniform_full_int_v2",
            "stateless_random_uniform_int_v2",
            "stateless_random_uniform_v2",
            "stateless_truncated_normal_v2",
        ),
        "Random numbers of a replica's rows.",
    ),
    Private(
        f"{_PYTHON}.ops.control_flow_v2_func_graphs",
        ("ControlFlowFuncGraph",),
        "Draws in loops and branches of a call are draws of the call.",
    ),
    Private(
        _VARIABLES,
        ("ResourceVariable", "VariableSpec", "_UnreadVariable", "variable_accessed"),
        "Mirrored variables, and what their assignments return.",
    ),
    Private(
        f"{_VARIABLES}.BaseResourceVariable",
        (
            "_export_to_saved_model_graph",
            "_in_graph_mode",
            "_lazy_read",
            "_read_variable_op",
            "_restore_from_tensors",
            "_shape",
            "_unique_id",
        ),
        "Reads and assignments of mirrored variables.",
    ),
    Private(f"{_VARIABLES}.VariableSpec", ("_component_specs",), "Their trace types."),
    Private(
        f"{_PYTHON}.framework.ops.EagerTensor",
        ("_id",),
        "The identity of an argument in a trace.",
    ),
    Private(
        "tensorflow.__internal__.CompositeTensor",
        ("_type_spec",),
        "Per-replica values are composite tensors.",
    ),
    Private(
        "tensorflow.TypeSpec",
        ("_component_specs", "_from_components", "_serialize", "_to_components"),
        "The type of per-replica values.",
    ),
    Private(
        f"{_PYTHON}.eager.polymorphic_function.polymorphic_function.Function",
        ("_jit_compile",),
        "A `tf.function` that is passed to `run` is traced with its replica.",
    ),
    Private(
        f"{_PYTHON}.eager.polymorphic_function.polymorphic_function.Function",
        ("_clone",),
        "A `tf.function` that replicas or row proofs call is traced in a copy.",
    ),
)


# Programs.


def exclude_from_autograph(package: str) -> None:
    """Excludes a package from AutoGraph, as TensorFlow excludes Keras."""
    rule = autograph_config.DoNotConvert(package)
    if not any(str(rule) == str(r) for r in autograph_config.CONVERSION_RULES):
        autograph_config.CONVERSION_RULES = (rule, *autograph_config.CONVERSION_RULES)


def register_for_loop(iterable: type, statement: Callable[..., None]) -> None:
    """Registers AutoGraph's `for` statement over objects of a class.

    Args:
        iterable: the class.
        statement: callable of such an object and the parts of a loop, which
            `python_for_loop` and `program_for_loop` take.
    """
    with contextlib.suppress(KeyError):  # Registered before.
        control_flow.for_loop_registry.register(iterable, statement)


def python_for_loop(iterable: Any, *loop: Any) -> None:
    """Runs a `for` loop by Python."""
    control_flow._py_for_stmt(iterable, *loop)


def program_for_loop(iterator: Any, *loop: Any) -> None:
    """Makes a `for` loop over an iterator of batches a loop of the program."""
    control_flow._tf_iterator_for_stmt(iterator, *loop)


def is_compiled_by_xla(graph: Any) -> bool:
    """Whether a graph, or one around it, is traced for XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def program_options() -> Any:
    """The current options for calls of programs."""
    return eager_context.context().function_call_options


@contextlib.contextmanager
def program_config(change: Callable[[Any], None]) -> Iterator[None]:
    """A context in which programs are called with a modified `ConfigProto`.

    A program is optimized again for each configuration that it is called with.

    Args:
        change: function that changes this process's `ConfigProto` in place.
    """
    context, given = eager_context.context(), program_options()
    context.function_call_options = _changed_options(
        change, given.config_proto_serialized, given.executor_type
    )
    try:
        yield
    finally:
        context.function_call_options = given


@functools.lru_cache(maxsize=16)
def _changed_options(
    change: Callable[[Any], None], serialized: bytes, executor_type: Any
) -> Any:
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    change(config)
    return eager_context.FunctionCallOptions(executor_type, config)


def without_colocation() -> contextlib.AbstractContextManager[None]:
    """A context without colocation constraints: the device alone places operations."""
    context: contextlib.AbstractContextManager[None]
    context = ops.colocate_with(None, ignore_existing=True)
    return context


@contextlib.contextmanager
def default_strategy() -> Iterator[None]:
    """A context with the default strategy of `tf.distribute`, also on its replicas.

    Under another strategy Keras's optimizers would reduce gradients a second time, and
    variables would be created once per replica.
    """
    graph = tf.compat.v1.get_default_graph()
    creators = graph._variable_creator_stack
    graph._variable_creator_stack = []
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()
        graph._variable_creator_stack = creators


# Gradients.


def record_operation(
    name: str,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    gradient: Callable[..., list[Any]],
) -> None:
    """Records outputs as those of an operation on the active tapes.

    Args:
        name: str, the operation's type.
        outputs: tensors.
        inputs: tensors or handles of variables.
        gradient: callable from the outputs' gradients to the list of the inputs'.
    """
    record.record_operation(name, outputs, inputs, gradient)


def without_recording() -> contextlib.AbstractContextManager[None]:
    """A context in which no tape records."""
    context: contextlib.AbstractContextManager[None] = record.stop_recording()
    return context


def is_any_tape_active() -> bool:
    return bool(record.could_possibly_record())


def is_recorded(tensors: Sequence[Any]) -> bool:
    """Whether a tape records what is computed from some of the tensors."""
    return bool(record.should_record_backprop(tensors))


def is_persistent(tape: tf.GradientTape) -> bool:
    """Whether a tape can compute gradients more than once."""
    return bool(tape._persistent)


def graph_gradients(
    targets: Sequence[Any], sources: Sequence[Any], given: Sequence[Any], graph: Any
) -> list[Any]:
    """Gradients from the operations of a graph, as `tf.gradients`.

    Args:
        targets: tensors of the graph, with their gradients in `given`.
        sources: tensors of the graph that gradients are returned of.
        given: tensors of the graph or of one inside of it.
        graph: the `tf.Graph`.
    """
    return list(
        gradients_util._GradientsHelper(targets, sources, given, src_graph=graph)
    )


def with_gradient(
    tensors: Sequence[Any], gradient: Callable[..., list[Any]]
) -> list[Any]:
    """The tensors, with a gradient function that is freed with their graph.

    Args:
        tensors: tensors of the current graph.
        gradient: callable from the results' gradients to the list of the tensors'.
    """

    def of_operation(operation: Any, *gradients: Any) -> list[Any]:
        return gradient(*gradients)

    graph = tf.compat.v1.get_default_graph()
    with graph._override_gradient_function({"IdentityN": of_operation}):
        outputs = tf.identity_n(tensors)
    record_gradient(outputs, tensors, gradient)
    return list(outputs)


def record_gradient(
    outputs: Sequence[Any], inputs: Sequence[Any], gradient: Callable[..., list[Any]]
) -> None:
    """Makes tapes compute gradients of some tensors from those of others.

    Args:
        outputs: tensors.
        inputs: the tensors that they are computed from.
        gradient: callable from the outputs' gradients to the list of the inputs'. They
            can be objects that convert to tensors, which arrive as they are unless
            several are added.
    """
    record.record_operation("CustomGradient", list(outputs), list(inputs), gradient)


def tape_id(tensor: Any) -> Any:
    """The number by which tapes know a tensor."""
    return tensor._id


def is_in_program() -> bool:
    """Whether a program is traced, outside of its inner functions and loops."""
    graph = tf.compat.v1.get_default_graph()
    outer = getattr(graph, "outer_graph", None)
    return outer is not None and not outer.building_function


# Graphs of layer calls.


def new_graph(name: str) -> Any:
    """An empty graph that captures tensors from outside, as a `tf.function` traces."""
    return func_graph.FuncGraph(name)


def calls_its_type(operation: Any) -> bool:
    """Whether an operation's type is the name of a function of its graph."""
    found: bool = operation.graph._is_function(operation.type)
    return found


def called_graph(operation: Any, attribute: str | None) -> Any:
    """The graph of a function that an operation calls.

    Args:
        operation: the `tf.Operation`.
        attribute: str, its attribute with the function, and its number where that is a
            list, as in "branches 1"; None where the operation's type is its name.
    """
    if attribute is None:
        name = operation.type
    else:
        attribute, _, number = attribute.partition(" ")
        value = operation.get_attr(attribute)
        name = (value[int(number)] if number else value).name
    function = operation.graph._get_function(name)
    found = getattr(function, "graph", None)
    if found is None:
        found = control_flow_util_v2.get_func_graph(operation, None, name)
    return found


def constant_value(operation: Any) -> Any:
    """The array of a `Const`, or of a `Fill` with constants."""
    if operation.type == "Fill":
        sizes, value = (constant_value(tensor.op) for tensor in operation.inputs)
        return np.broadcast_to(value, sizes)
    return tf.make_ndarray(operation.get_attr("value"))


def computed(operation: Any, arrays: Sequence[Any]) -> list[Any]:
    """The results of an operation of a graph for other inputs; in eager mode.

    Args:
        operation: the `tf.Operation`.
        arrays: arrays, one for each of its inputs.

    Raises:
        tf.errors.OpError: if it cannot be computed for them.
    """
    attributes: list[Any] = []
    for name in operation.node_def.attr:
        if not name.startswith("_"):
            value = operation.get_attr(name)
            is_dtype = isinstance(value, tf.DType)
            attributes += [name, value.as_datatype_enum if is_dtype else value]
    inputs = [
        tf.constant(array, tensor.dtype)
        for array, tensor in zip(arrays, operation.inputs, strict=True)
    ]
    results = execute.execute(
        operation.type,
        len(operation.outputs),
        inputs,
        tuple(attributes),
        eager_context.context(),
    )
    return [result.numpy() for result in results]


def inferred_shapes(
    operation: Any, inputs: Sequence[tuple[Any, Sequence[int | None] | None]]
) -> list[list[int | None] | None]:
    """The shapes that an operation's results have for other inputs.

    Args:
        operation: the `tf.Operation`.
        inputs: for each of its inputs its array or None, and its shape.

    Returns:
        list: for each result its shape, None for an unknown rank; empty if TensorFlow
        cannot tell.
    """
    with tf.Graph().as_default() as graph:
        tensors = [
            tf.compat.v1.placeholder(tensor.dtype, shape)
            if array is None
            else tf.constant(array, tensor.dtype)
            for tensor, (array, shape) in zip(operation.inputs, inputs, strict=True)
        ]
        attributes = {
            name: value
            for name, value in operation.node_def.attr.items()
            if not name.startswith("_")
        }
        dtypes = [tensor.dtype for tensor in operation.outputs]
        try:
            made = graph.create_op(operation.type, tensors, dtypes, attrs=attributes)
        except (ValueError, TypeError, RuntimeError):
            # A RuntimeError of an operation that is a function of its graph.
            return []
        return [
            None if tensor.shape.rank is None else tensor.shape.as_list()
            for tensor in made.outputs
        ]


# Operations that fail on zero rows.

#: With oneDNN, a convolution of zero rows has the channels of its input, and the
#: gradient of a maximum ends the process; some of the kernels without it raise errors.
#: Types of operations by the functions that make them.
FAILING_KERNELS = {
    "conv2d": "Conv2D",
    "conv2d_backprop_input": "Conv2DBackpropInput",
    "conv3d": "Conv3D",
    "conv3d_backprop_input_v2": "Conv3DBackpropInputV2",
    "depthwise_conv2d_native": "DepthwiseConv2dNative",
    "dilation2d": "Dilation2D",
    "fractional_max_pool": "FractionalMaxPool",
    "max_pool": "MaxPool",
    "max_pool3d": "MaxPool3D",
    "max_pool_v2": "MaxPoolV2",
    "max_pool_with_argmax": "MaxPoolWithArgmax",
}


def replace_failing_kernels(
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replaces the functions that make operations which fail on zero rows.

    Args:
        replacement: callable of a function, that returns the one in its place, with
            the same arguments.
    """
    for name in FAILING_KERNELS:
        setattr(gen_nn_ops, name, replacement(getattr(gen_nn_ops, name)))


# Random numbers.

#: Functions that make stateless random operations, by the module where
#: `tf.random.stateless_*` look them up in each call.
DRAWS = (
    (
        gen_stateless_random_ops_v2,
        (
            "stateless_random_uniform_v2",
            "stateless_random_normal_v2",
            "stateless_truncated_normal_v2",
            "stateless_random_uniform_int_v2",
            "stateless_random_uniform_full_int_v2",
            "stateless_random_gamma_v3",
        ),
    ),
    (
        gen_stateless_random_ops,
        (
            "stateless_random_binomial",
            "stateless_random_poisson",
            "stateless_parameterized_truncated_normal",
            "stateless_multinomial",
        ),
    ),
)


def replace_draws(
    replacement: Callable[[str, Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replaces the functions that make stateless random operations.

    Args:
        replacement: callable of the name of a function and the function, that returns
            the one in its place, with the same arguments.
    """
    for module, names in DRAWS:
        for name in names:
            setattr(module, name, replacement(name, getattr(module, name)))


def is_in_control_flow_of(graph: Any, inner: Any) -> bool:
    """Whether a graph is another one, or that of a loop or branch in it.

    Args:
        graph: the outer graph.
        inner: the graph.
    """
    kind = control_flow_v2_func_graphs.ControlFlowFuncGraph
    while inner is not graph:
        if not isinstance(inner, kind):
            return False
        inner = inner.outer_graph
    return True


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`; None without one."""
    seed: int | None = eager_context.global_seed()
    return seed


@contextlib.contextmanager
def kernels_alone() -> Iterator[None]:
    """Runs eager operations as plain kernels, without a program for each operation.

    At the first call of each kind of operation, TensorFlow creates a program of that
    one operation: 5 ms, and each call takes six times as long as the kernel. Affects
    all threads of the process; results are the same.
    """
    context = eager_context.context()
    context.ensure_initialized()
    set_programs = pywrap_tfe.TFE_ContextSetRunEagerOpAsFunction
    set_programs(context._handle, False)
    try:
        yield
    finally:
        set_programs(context._handle, True)


def operation_seeds() -> random.Random:
    """The generator of seeds for operations, after `tf.random.set_seed`."""
    generator: random.Random = eager_context.context()._rng
    return generator


# Workers.


def configure_collectives(leader: str, device_filter: str) -> None:
    """Configures collectives of several workers, before the runtime is started.

    Args:
        leader: str, the task that orders collectives.
        device_filter: str, the task with the devices that this process sees.

    Raises:
        RuntimeError: if the runtime is started.
    """
    eager_context.context().configure_collective_ops(
        collective_leader=leader, device_filters=(device_filter,)
    )


def collective_configuration(leader: str) -> Any:
    """The `ConfigProto` of this process, with its virtual devices.

    TensorFlow 2.21: `configure_collective_ops` refuses another leader than the first.

    Args:
        leader: str, the task that orders collectives.
    """
    context = eager_context.context()
    context._collective_leader = leader
    return context.config


def start_collectives(server: Any) -> None:
    """Starts the runtime with a server.

    Args:
        server: a `ServerDef`.

    Raises:
        tf.errors.OpError: if the server cannot start.
    """
    context = eager_context.context()
    context.enable_collective_ops(server)
    context.ensure_initialized()


def replace_collectives(server: Any) -> None:
    """Connects the runtime's server to other servers; variables and programs stay.

    TensorFlow 2.21: `enable_collective_ops` warns that tensors may become unreadable.
    That concerns tensors on devices with other names only; the warning is suppressed.

    Args:
        server: a `ServerDef` with the same task for this process.
    """
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        eager_context.context().enable_collective_ops(server)
    finally:
        logger.setLevel(level)


def abort_collectives(code: int, message: str) -> None:
    """Aborts all collectives under way, with an error."""
    eager_context.context().abort_collective_ops(code, message)


# Variables.


def is_resource_variable(variable: Any) -> bool:
    """Whether a variable is a plain `ResourceVariable`, not of a subclass."""
    return type(variable) is resource_variable_ops.ResourceVariable


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
            shape=variable._shape,
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
    return context.alias_global_id(variable.handle._id)


def handle_specs(alias: Any) -> list[Any]:
    """The specifications of a variable's tensors as an argument of a trace."""
    spec = resource_variable_ops.VariableSpec([], alias_id=alias)
    return list(spec._component_specs)


# Datasets.


def read_by_worker(dataset: tf.data.Dataset, workers: int, index: int) -> Any:
    """Part of a dataset for one of several workers, by the policy in its options."""
    return distribute._AutoShardDataset(dataset, workers, index)


def static_batch_size(dataset: tf.data.Dataset) -> int:
    """The rows of a dataset's batches; -1 if unknown."""
    return int(distribute.compute_batch_size(dataset))


def file_readers(dataset: tf.data.Dataset) -> Iterator[Any]:
    """The files, a tensor or a dataset, of each reader of an input pipeline.

    Readers inside of `interleave` or `flat_map` are not found.
    """
    for each in _pipeline(dataset):
        files = getattr(each, "_filenames", None)
        if files is not None:
            yield files


def shuffles_without_seed(dataset: tf.data.Dataset) -> bool:
    """Whether an input pipeline shuffles in a different order in each process."""
    return any(
        hasattr(each, "_seed2") and not int(each._seed) and not int(each._seed2)
        for each in _pipeline(dataset)
    )


def _pipeline(dataset: tf.data.Dataset) -> Iterator[Any]:
    """A dataset and all of its input datasets."""
    remaining = [dataset]
    while remaining:
        each = remaining.pop()
        remaining += each._inputs()
        yield each


class LazyIterator(tf.data.Iterator):  # type: ignore[misc]
    """An iterator of a dataset that TensorFlow creates when it is first read.

    It may be passed to a `tf.function`, as others.

    Args:
        create: returns the iterator.
        element_spec: structure of its specifications.
        used: an object that exists as long as this iterator.
    """

    def __init__(
        self,
        create: Callable[[], tf.data.Iterator],
        element_spec: Any,
        used: Any = None,
    ):
        self._create = create
        self._element_spec = element_spec
        self._used = used

    @functools.cached_property
    def _iterator(self) -> tf.data.Iterator:
        return self._create()

    @property
    def element_spec(self) -> Any:
        return self._element_spec

    def get_next(self) -> Any:
        return self._iterator.get_next()

    def get_next_as_optional(self) -> Any:
        return self._iterator.get_next_as_optional()

    def __next__(self) -> Any:
        return next(self._iterator)

    @property
    def _type_spec(self) -> Any:
        return self._iterator._type_spec

    @property
    def _iterator_resource(self) -> Any:
        return self._iterator._iterator_resource


def handle_of(iterator: tf.data.Iterator) -> tf.Tensor:
    """A string with which functions of a dataset read an iterator."""
    resource = iterator._iterator_resource
    return tf.raw_ops.IteratorToStringHandle(resource_handle=resource)


def iterator_of(handle: tf.Tensor, dataset: tf.data.Dataset) -> tf.data.Iterator:
    """The iterator of a handle, in a function of a dataset."""
    types, shapes, classes = (
        get(dataset)
        for get in (
            tf.compat.v1.data.get_output_types,
            tf.compat.v1.data.get_output_shapes,
            tf.compat.v1.data.get_output_classes,
        )
    )
    return tf.compat.v1.data.Iterator.from_string_handle(handle, types, shapes, classes)


def make_composite(kind: type, spec_of: Callable[[Any], tf.TypeSpec]) -> None:
    """Makes the objects of a class composite tensors.

    Args:
        kind: the class.
        spec_of: returns the specification of an object, which converts it to
            components and back.
    """
    composite = tf.__internal__.CompositeTensor
    for name, member in vars(composite).items():
        if callable(member) and name not in vars(kind):
            setattr(kind, name, member)
    kind._type_spec = property(spec_of)  # type: ignore[attr-defined]
    composite.register(kind)


class _Copies(threading.local):
    # Copies of the functions that this thread calls, by `id`; None to call themselves.
    of_functions: dict[int, Any] | None = None


_copies = _Copies()


@contextlib.contextmanager
def functions_copied() -> Iterator[None]:
    """Traces what this thread calls of `tf.function` in copies, which are dropped.

    A trace that remains would have captured tensors of this thread's graph, such as a
    replica's copies of variables.
    """
    _copy_functions_of_threads()
    before, _copies.of_functions = _copies.of_functions, {}
    try:
        yield
    finally:
        _copies.of_functions = before


@functools.cache
def _copy_functions_of_threads() -> None:
    kind = polymorphic_function.Function
    original = kind.__call__

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        copies = _copies.of_functions
        if copies is None:
            return original(self, *args, **kwargs)
        if id(self) not in copies:
            # With the function, so that its `id` stays its own.
            copies[id(self)] = self, self._clone(None)
        return original(copies[id(self)][1], *args, **kwargs)

    kind.__call__ = call


def is_for_xla(function: tf.types.experimental.PolymorphicFunction) -> bool | None:
    """The `jit_compile` of a `tf.function`."""
    return function._jit_compile  # type: ignore[no-any-return]
