"""Parameter servers and their workers on TensorFlow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_strategies import keras_compat
from keras_strategies.backends.parameter_server import (
    Applied,
    Body,
    Engine,
    Program,
    Sink,
    StepResult,
    Variables,
    changed_in,
    regularized_scope,
)

# NumPy has these from `ml_dtypes`, or as objects.
_WITHOUT_BUFFER = (tf.bfloat16, tf.string)
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


class TensorFlowProgram(Program):
    """Two `tf.function`s, traced for each signature of a batch."""

    def __init__(self, body: Body, variables: Variables, gradients: bool):
        super().__init__(body, variables, gradients)
        self._ids: dict[Any, Any] = {}
        self._steps: dict[Any, Any] = {}

    def lookups(self, batch: Any) -> list[tuple[Any, np.ndarray]]:
        if not self.variables.tables:
            return []
        signature = _signature(batch)
        key = _key(signature)
        if key not in self._ids:
            self._ids[key] = self._find_lookups(signature)
        tables, program = self._ids[key]
        if not tables:
            return []
        found = program(*_leaves(batch))
        return [(t, ids.numpy()) for t, ids in zip(tables, found, strict=True)]

    def _find_lookups(self, signature: Any) -> tuple[list[Any], Any]:
        while True:
            tables = list(self.variables.tables)
            found, program = self._trace_lookups(signature)
            read = _read_handles(program.graph)
            whole = [t for t in tables if id(_handle(t)) in read]
            if not whole and _depend_on_state(program.outputs):
                # Ids that depend on values are not known ahead of the step.
                whole = list({id(t): t for t in found}.values())
            if not whole:
                return found, program
            self.variables.become_dense(whole)

    def _trace_lookups(self, signature: Any) -> tuple[list[Any], Any]:
        """A program of a batch that returns ids, and the tables that they are for."""
        found: list[Any] = []
        ids: list[Any] = []

        def take(x: Any, indices: Any, axis: Any) -> Any:
            if axis != 0 or not self._is_table(x):
                return NotImplemented
            indices = tf.convert_to_tensor(indices)
            found.append(x)
            ids.append(indices)
            shape = tf.concat([tf.shape(indices), list(x.shape)[1:]], 0)
            rows = tf.zeros(shape, x.dtype)
            rows.set_shape([*indices.shape, *list(x.shape)[1:]])
            return rows

        @tf.function(input_signature=_flat(signature), autograph=False)
        def ids_of(*leaves: Any) -> Any:
            found.clear()
            ids.clear()
            with (
                regularized_scope(self.variables),
                keras_compat.lookups_through(take),
                keras_compat.applying_through(Sink()),
            ):
                self.body(keras.tree.pack_sequence_as(signature, list(leaves)))
            return list(ids)

        return found, ids_of.get_concrete_function()

    def _is_table(self, x: Any) -> bool:
        return any(x is table for table in self.variables.tables)

    def run(self, batch: Any, positions: Sequence[np.ndarray]) -> StepResult:
        signature = _signature(batch)
        key = _key(signature)
        if key not in self._steps:
            self._steps[key] = self._make_step(signature, positions)
        program, applied, changed_variables = self._steps[key]
        places = [tf.convert_to_tensor(np.asarray(p, np.int64)) for p in positions]
        outputs, gradients, changed = program(*places, *_leaves(batch))
        outputs, gradients, changed = keras.tree.map_structure(
            _numpy, (outputs, gradients, changed)
        )
        return StepResult(
            outputs,
            [
                Applied(a.optimizer, a.variables, list(g))
                for a, g in zip(applied, gradients, strict=True)
            ],
            list(zip(changed_variables, changed, strict=True)),
        )

    def _make_step(self, signature: Any, positions: Sequence[np.ndarray]) -> Any:
        count = len(positions)
        specs = [tf.TensorSpec([None] * p.ndim, tf.int64) for p in positions]
        sink = Sink()
        changed_variables: list[Any] = []
        variables = [*self.variables.tables, *self.variables.others]

        def step(*arguments: Any) -> Any:
            places = iter(arguments[:count])
            batch = keras.tree.pack_sequence_as(signature, list(arguments[count:]))
            sink.applied.clear()
            changed_variables.clear()

            def take(x: Any, indices: Any, axis: Any) -> Any:
                if axis != 0 or not self._is_table(x):
                    return NotImplemented
                where = next(places)
                rows = tf.gather(x.value, where)
                rows.set_shape([*indices.shape, *list(x.shape)[1:]])
                return rows

            with (
                regularized_scope(self.variables) as scope,
                keras_compat.lookups_through(take),
                keras_compat.applying_through(sink),
            ):
                outputs = self.body(batch)
            changed = []
            for variable in variables:
                after = changed_in(scope, variable)
                if after is not None:
                    changed_variables.append(variable)
                    changed.append(after)
            gradients = [[_dense(g) for g in a.gradients] for a in sink.applied]
            return outputs, gradients, changed

        program = tf.function(
            step, input_signature=[*specs, *_flat(signature)], autograph=False
        )
        program.get_concrete_function()
        return program, list(sink.applied), list(changed_variables)


def _dense(gradient: Any) -> Any:
    """A gradient whose rows are summed."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.cast(gradient.dense_shape[0], tf.int32)
    indices = tf.cast(gradient.indices, tf.int32)
    return tf.math.unsorted_segment_sum(gradient.values, indices, rows)


def _handle(variable: Any) -> Any:
    return keras_compat.raw_value(variable).handle


def _read_handles(graph: Any) -> set[int]:
    """The captured variables that operations of a graph read, by `id` of handles."""
    captured = {id(inner): outer for outer, inner in graph.captures}
    found = set()
    for operation in graph.get_operations():
        if operation.type in _READS:
            outer = captured.get(id(operation.inputs[0]))
            if outer is not None:
                found.add(id(outer))
    return found


def _depend_on_state(outputs: Any) -> bool:
    """Whether tensors depend on variables or on random numbers."""
    waiting = [tensor.op for tensor in outputs]
    seen = set()
    while waiting:
        operation = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if operation.type in _READS or "Random" in operation.type:
            return True
        waiting += [tensor.op for tensor in operation.inputs]
    return False


def _leaves(batch: Any) -> list[Any]:
    return [tf.convert_to_tensor(leaf) for leaf in keras.tree.flatten(batch)]


def _signature(batch: Any) -> Any:
    def spec(leaf: Any) -> Any:
        array = np.asarray(leaf)
        rest = array.shape[1:]
        return tf.TensorSpec([None, *rest] if array.ndim else [], array.dtype)

    return keras.tree.map_structure(spec, batch)


def _flat(signature: Any) -> list[Any]:
    return list(keras.tree.flatten(signature))


def _key(signature: Any) -> Any:
    return str(signature)


def _numpy(value: Any) -> Any:
    """An array on the memory of an eager tensor, where NumPy knows its dtype."""
    if not isinstance(value, tf.Tensor):
        return value
    if value.dtype in _WITHOUT_BUFFER:
        return value.numpy()
    return np.asarray(memoryview(value))


class TensorFlowEngine(Engine):
    """Windows are variables whose first axis is open."""

    def program(self, body: Body, variables: Variables, gradients: bool) -> Program:
        return TensorFlowProgram(body, variables, gradients)

    def new_variable(
        self, path: str, trainable: bool, dtype: str, shape: tuple[int, ...]
    ) -> Any:
        made = super().new_variable(path, trainable, dtype, shape)
        # Matrices may be tables, whose windows have any number of rows. What has been
        # traced holds on to this variable, so it is never another one.
        open_shape = [None, *shape[1:]] if len(shape) == 2 else list(shape)
        first = [min(shape[0], 1), shape[1]] if len(shape) == 2 else list(shape)
        raw = tf.Variable(
            tf.zeros(first, dtype), shape=open_shape, dtype=dtype, trainable=trainable
        )
        keras_compat.set_raw_value(made, raw)
        return made

    def set_value(self, variable: Any, value: np.ndarray) -> None:
        keras_compat.raw_value(variable).assign(value)

    def get_value(self, variable: Any) -> np.ndarray:
        return keras_compat.raw_value(variable).numpy()  # type: ignore[no-any-return]

    def compile_update(
        self, update: Callable[..., Any], is_of_keras: bool
    ) -> Callable[..., Any]:
        # Each variable has programs of its own, which is no mistake.
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
        program = tf.function(update, autograph=False, reduce_retracing=True)

        def run(*arguments: Any) -> Any:
            tensors = keras.tree.map_structure(
                lambda a: None if a is None else tf.convert_to_tensor(a), arguments
            )
            return keras.tree.map_structure(_numpy, list(program(*tensors)))

        return run


ENGINE = TensorFlowEngine()
