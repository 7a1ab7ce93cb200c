"""Programs: AutoGraph, their options, scopes and functions."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import config as autograph_config
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.ops import (
    control_flow_util,
)

from keras_strategies.engines.tensorflow.compat.workers import runtime
from keras_strategies.keras_compat.private_names import Private
from keras_strategies.runtime.once import once

_PYTHON = "tensorflow.python"

PRIVATE_NAMES = (
    Private(
        f"{_PYTHON}.eager.context.Context",
        ("function_call_options",),
        "The options of programs.",
    ),
    Private(
        f"{_PYTHON}.framework.ops.Graph",
        ("_variable_creator_stack",),
        "Plain variables on replicas.",
    ),
    Private(
        f"{_PYTHON}.autograph.core.config",
        ("CONVERSION_RULES", "DoNotConvert"),
        "AutoGraph leaves this package out, as it does Keras.",
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
        f"{_PYTHON}.ops.control_flow_util",
        ("GraphOrParentsInXlaContext",),
        "Mirrored variables cannot be assigned in an XLA program.",
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


def exclude_from_autograph(package: str) -> None:
    """Excludes a package from AutoGraph, as TensorFlow excludes Keras."""
    rule = autograph_config.DoNotConvert(package)
    if not any(str(rule) == str(r) for r in autograph_config.CONVERSION_RULES):
        autograph_config.CONVERSION_RULES = (rule, *autograph_config.CONVERSION_RULES)


def is_compiled_by_xla(graph: Any) -> bool:
    """Whether a graph, or one around it, is traced for XLA."""
    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


def program_options() -> Any:
    """The current options for calls of programs."""
    return runtime().function_call_options


@contextlib.contextmanager
def program_config(change: Callable[[Any], None]) -> Iterator[None]:
    """A context in which programs are called with a modified `ConfigProto`.

    A program is optimized again for each configuration that it is called with.

    Args:
        change: function that changes this process's `ConfigProto` in place.
    """
    context, given = runtime(), program_options()
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
    return type(program_options())(executor_type, config)


def without_colocation() -> contextlib.AbstractContextManager[None]:
    """A context without colocation constraints: the device alone places operations."""
    if tf.executing_eagerly():
        return contextlib.nullcontext()
    graph = tf.compat.v1.get_default_graph()
    context: contextlib.AbstractContextManager[None]
    context = graph.colocate_with(None, ignore_existing=True)
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


@once
def _copy_functions_of_threads() -> None:
    kind: Any = type(tf.function(lambda: None))
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
