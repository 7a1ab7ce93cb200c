"""Parameter servers and their workers on TensorFlow."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow.devices import local_devices
from keras_strategies.keras_compat.optimizers.applying import applying_through
from keras_strategies.keras_compat.variables.lookups import lookups_through
from keras_strategies.keras_compat.variables.values import raw_value, set_raw_value
from keras_strategies.parameter_server.engines.engine_interface import (
    Body,
    CompilableStep,
    OptimizerCall,
    OptimizerCallRecorder,
    ParameterServerEngine,
    StepProgram,
    StepResult,
    StepVariables,
    TracedOutputs,
    assigned_tables,
    changed_in,
    regularized_scope,
    writable,
)
from keras_strategies.parameter_server.wire.arrays.row_arrays import (
    ALIGNMENT,
    empty_aligned,
)

# Dtypes that NumPy lacks.
_WITHOUT_BUFFER = (tf.bfloat16, tf.string)
# Kinds of NumPy dtypes that TensorFlow has.
_WITH_BUFFER = "biuf"
# Attribute of a `tf.Variable`: the value that the next program assigns.
_PENDING_VALUE = "_keras_strategies_given"
# XLA halves the time to sum the gradients of lookups, but compiles for each shape. It
# is used from this number of ids on, for this number of shapes.
_XLA_IDS = 4096
_XLA_SHAPES = 4
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")


class _Traced:
    """A function of tensors, traced for one signature.

    Calls of a `ConcreteFunction` bind and check arguments, which takes as long as an
    update of small variables; this calls the inner function.

    Args:
        function: takes tensors; returns a list of tensors and None.
        specs: the `tf.TensorSpec` of each argument.
        jit_compile: bool, whether XLA compiles it.

    Attributes:
        concrete: the `ConcreteFunction`.
    """

    def __init__(
        self,
        function: Callable[..., list[Any]],
        specs: list[Any],
        jit_compile: bool | None = None,
    ):
        traced = tf.function(
            function, input_signature=specs, autograph=False, jit_compile=jit_compile
        )
        self.concrete = traced.get_concrete_function()
        self._captured = self.concrete.captured_inputs
        outputs = self.concrete.structured_outputs
        self._is_tensor = [output is not None for output in outputs]

    def __call__(self, *tensors: Any) -> list[Any]:
        found = self.concrete.inference_fn.call_flat(*tensors, *self._captured)
        if all(self._is_tensor):
            return list(found)
        given = iter(found)
        return [next(given) if there else None for there in self._is_tensor]


class TensorFlowStepProgram(StepProgram):
    """Two TensorFlow functions, traced for each signature of a batch."""

    def __init__(self, body: Body, variables: StepVariables, gradients: bool):
        super().__init__(body, variables, gradients)
        self._ids: dict[Any, _Lookups] = {}
        self._steps: dict[Any, _Step] = {}
        # Numbers of ids and rows with gradients that XLA sums.
        self._xla_shapes: set[Any] = set()

    def lookups(self, batch: Any) -> list[tuple[Any, np.ndarray]]:
        if not self.variables.tables:
            return []
        key = _key(batch)
        if key not in self._ids:
            self._ids[key] = self._find_lookups(_signature(batch))
        tables, places, program = self._ids[key]
        if not tables:
            return []
        leaves = keras.tree.flatten(batch)
        if None not in places:
            found = [leaves[place] for place in places]
        else:
            found = [_numpy(ids) for ids in program(*map(_tensor, leaves))]
        return list(zip(tables, found, strict=True))

    def _find_lookups(self, signature: Any) -> _Lookups:
        while True:
            tables = list(self.variables.tables)
            found, assigned, program = self._trace_lookups(signature)
            read = _read_handles(program.concrete.graph)
            read.update(id(_handle(table)) for table in assigned)
            dense = [t for t in tables if id(_handle(t)) in read]
            if not dense and _depend_on_state(program.concrete.outputs):
                # Ids that depend on variables are unknown before the step.
                dense = list({id(t): t for t in found}.values())
            if not dense:
                return found, _passed_on(program.concrete), program
            self.variables.mark_dense(dense)

    def _trace_lookups(self, signature: Any) -> tuple[list[Any], list[Any], _Traced]:
        """A program of a batch that returns ids, their tables, and assigned ones."""
        found: list[Any] = []
        assigned: list[Any] = []
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

        def ids_of(*leaves: Any) -> Any:
            found.clear()
            ids.clear()
            with (
                regularized_scope(self.variables) as scope,
                lookups_through(take),
                applying_through(OptimizerCallRecorder()),
            ):
                self.body(keras.tree.pack_sequence_as(signature, list(leaves)))
            assigned[:] = assigned_tables(scope, self.variables)
            return list(ids)

        return found, assigned, _Traced(ids_of, _flat(signature))

    def _is_table(self, x: Any) -> bool:
        return any(x is table for table in self.variables.tables)

    def run(
        self,
        batch: Any,
        lookups: Sequence[tuple[Any, np.ndarray]],
        positions: Sequence[np.ndarray],
    ) -> StepResult:
        by_xla = self._sums_by_xla(positions)
        key = (_key(batch), len(positions), by_xla)
        if key not in self._steps:
            self._steps[key] = self._make_step(_signature(batch), positions, by_xla)
        program, structure, calls, changed_variables, split = self._steps[key]
        arrays = [
            *(np.asarray(where, np.int32) for where in positions),
            *(_pending_value(variable) for variable in self._variables()),
            *keras.tree.flatten(batch),
        ]
        found = map(_numpy, program(*map(_tensor, arrays)))
        outputs, gradients, changed = keras.tree.pack_sequence_as(
            structure, list(found)
        )
        return StepResult(
            split.filled(outputs),
            [
                OptimizerCall(call.optimizer, call.variables, list(g))
                for call, g in zip(calls, gradients, strict=True)
            ],
            list(zip(changed_variables, changed, strict=True)),
        )

    def _sums_by_xla(self, positions: Sequence[np.ndarray]) -> bool:
        """Whether XLA sums the gradients of these lookups."""
        tables = self.variables.tables
        count = sum(where.size for where in positions)
        if not (self.gradients and tables) or count < _XLA_IDS:
            return False
        if "CPU" not in raw_value(tables[0]).device:
            return False
        rows = (len(_pending_value(table)) for table in tables)
        shapes = (*(where.size for where in positions), *rows)
        if len(self._xla_shapes) < _XLA_SHAPES:
            self._xla_shapes.add(shapes)
        return shapes in self._xla_shapes

    def _variables(self) -> list[Any]:
        return [*self.variables.tables, *self.variables.others]

    def _make_step(
        self, signature: Any, positions: Sequence[np.ndarray], by_xla: bool
    ) -> _Step:
        """Traces the step as a function of positions, values and a batch."""
        sum_rows = tf.math.unsorted_segment_sum
        if by_xla:
            sum_rows = tf.function(sum_rows, autograph=False, jit_compile=True)
        count = len(positions)
        recorder = OptimizerCallRecorder()
        changed_variables: list[Any] = []
        variables = self._variables()
        raws = [raw_value(variable) for variable in variables]
        structure: Any = None
        split: Any = None

        def compute(*arguments: Any) -> list[Any]:
            nonlocal structure, split
            places = iter(arguments[:count])
            batch = keras.tree.pack_sequence_as(signature, list(arguments[count:]))
            recorder.calls.clear()
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
                lookups_through(take),
                applying_through(recorder),
            ):
                outputs = self.body(batch)
            changed = []
            for variable in variables:
                after = changed_in(scope, variable)
                if after is not None:
                    changed_variables.append(variable)
                    changed.append(after)
            gradients = [
                [_dense(g, sum_rows) for g in call.gradients] for call in recorder.calls
            ]
            split = TracedOutputs(outputs, _is_computed)
            structure = (split.tensors, gradients, changed)
            return list(keras.tree.flatten(structure))

        if isinstance(self.body, CompilableStep):
            compute = tf.function(compute, autograph=False, jit_compile=True)

        def step(*arguments: Any) -> list[Any]:
            values = arguments[count : count + len(raws)]
            # Keras differentiates by `tf.Variable`s.
            for raw, value in zip(raws, values, strict=True):
                raw.assign(value, read_value=False)
            return compute(*arguments[:count], *arguments[count + len(raws) :])

        specs = [
            *(tf.TensorSpec([None] * p.ndim, tf.int32) for p in positions),
            *(tf.TensorSpec(raw.shape, raw.dtype) for raw in raws),
            *_flat(signature),
        ]
        program = _Traced(step, specs)
        structure = keras.tree.map_structure(lambda leaf: 0, structure)
        calls = list(recorder.calls)
        return program, structure, calls, list(changed_variables), split


#: The table of each lookup; the index of the batch's leaf that its ids are, None if
#: they are computed; and a program of the leaves that returns ids.
_Lookups = tuple[list[Any], list[int | None], _Traced]
#: A program, the structure of its flat outputs, its optimizer calls, the variables that
#: it changes, and the step's outputs.
_Step = tuple[_Traced, Any, list[OptimizerCall], list[Any], TracedOutputs]


def _is_computed(leaf: Any) -> bool:
    """Whether a program returns a leaf: tensors and numbers, not strings.

    Ragged tensors and sparse gradients are composite tensors.
    """
    kinds = (np.ndarray, np.generic, int, float, complex, keras.Variable)
    return tf.is_tensor(leaf) or isinstance(leaf, kinds)


def _dense(gradient: Any, sum_rows: Callable[..., Any]) -> Any:
    """A dense gradient, with rows summed by a function of values, rows and number."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.cast(gradient.dense_shape[0], tf.int32)
    indices = tf.cast(gradient.indices, tf.int32)
    return sum_rows(gradient.values, indices, rows)


def _handle(variable: Any) -> Any:
    return raw_value(variable).handle


def _read_handles(graph: Any) -> set[int]:
    """Captured variables that a graph reads, by `id` of their handles."""
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


def _passed_on(program: Any) -> list[int | None]:
    """For each output of a program the index of an identical input, or None."""
    inputs = [id(tensor) for tensor in program.inputs]
    found: list[int | None] = []
    for tensor in program.outputs:
        while id(tensor) not in inputs and _preserves_integers(tensor.op):
            tensor = tensor.op.inputs[0]
        found.append(inputs.index(id(tensor)) if id(tensor) in inputs else None)
    return found


def _preserves_integers(operation: Any) -> bool:
    if operation.type not in ("Identity", "Cast"):
        return False
    return all(
        tensor.dtype in (tf.int32, tf.int64)
        for tensor in (*operation.inputs, *operation.outputs)
    )


def _signature(batch: Any) -> Any:
    def spec(leaf: Any) -> Any:
        array = np.asarray(leaf)
        rest = array.shape[1:]
        return tf.TensorSpec([None, *rest] if array.ndim else [], array.dtype)

    return keras.tree.map_structure(spec, batch)


def _flat(signature: Any) -> list[Any]:
    return list(keras.tree.flatten(signature))


def _key(batch: Any) -> Any:
    """Key of a batch's signature."""
    return repr(
        keras.tree.map_structure(lambda a: (a.shape[1:], a.ndim, a.dtype.str), batch)
    )


def _tensor(array: Any) -> Any:
    """An eager tensor on the memory of an array, where TensorFlow supports it."""
    array = np.asarray(array)
    if (
        array.dtype.kind not in _WITH_BUFFER
        or not array.size
        or not array.flags.c_contiguous
    ):
        return tf.convert_to_tensor(array)
    if array.__array_interface__["data"][0] % ALIGNMENT:
        # With an aligned copy it takes a third of the time of `convert_to_tensor`.
        aligned = empty_aligned(array.shape, array.dtype)
        aligned[...] = array
        return tf.experimental.dlpack.from_dlpack(aligned.__dlpack__())
    return tf.experimental.dlpack.from_dlpack(writable(array).__dlpack__())


def _numpy(value: Any) -> Any:
    """An array on the memory of an eager tensor, where NumPy has its dtype."""
    if not isinstance(value, tf.Tensor):
        return value
    if value.dtype in _WITHOUT_BUFFER:
        return value.numpy()
    return np.asarray(memoryview(value))


class TensorFlowParameterServerEngine(ParameterServerEngine):
    """Windows are variables with an open first axis; XLA compiles updates."""

    pads_rows = True

    def on_cpu(self) -> contextlib.AbstractContextManager[Any]:
        accelerators = [d for d in local_devices() if d.kind != "cpu"]
        try:
            for kind in {device.kind.upper() for device in accelerators}:
                tf.config.set_visible_devices([], kind)
        except RuntimeError:  # TensorFlow is in use.
            return tf.device("/device:CPU:0")  # type: ignore[no-any-return]
        return contextlib.nullcontext()

    def in_program(self) -> bool:
        return not tf.executing_eagerly()

    def expanded(self, value: Any) -> tuple[Any, list[Any]] | None:
        if not isinstance(value, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
            return None
        return _open_spec(value), tf.nest.flatten(value, expand_composites=True)

    def is_framework_variable(self, value: Any) -> bool:
        return isinstance(value, tf.Variable)

    def composed(self, spec: Any, components: Sequence[Any]) -> Any:
        tensors = list(map(tf.convert_to_tensor, components))
        return tf.nest.pack_sequence_as(spec, tensors, expand_composites=True)

    def model_body(self, model: Any, kind: str) -> Body:
        step: Body = getattr(model, f"{kind}_step")
        return CompilableStep(step, is_requested=True) if model.jit_compile else step

    def program(
        self, body: Body, variables: StepVariables, gradients: bool
    ) -> StepProgram:
        return TensorFlowStepProgram(body, variables, gradients)

    def replace_storage(self, variable: Any, shape: tuple[int, ...]) -> None:
        # Matrices may be tables: their windows have any number of rows. Traced programs
        # refer to this `tf.Variable`, so it is never replaced.
        open_shape = [None, *shape[1:]] if len(shape) == 2 else list(shape)
        first = [min(shape[0], 1), shape[1]] if len(shape) == 2 else list(shape)
        raw = tf.Variable(
            tf.zeros(first, variable.dtype),
            shape=open_shape,
            dtype=variable.dtype,
            trainable=variable.trainable,
        )
        set_raw_value(variable, raw)

    def set_value(self, variable: Any, value: np.ndarray) -> None:
        # Read by the next program, which assigns all values.
        setattr(raw_value(variable), _PENDING_VALUE, value)

    def get_value(self, variable: Any) -> np.ndarray:
        return _pending_value(variable)

    def compile_update(
        self, update: Callable[..., Any], uses_only_builtin_keras: bool
    ) -> Callable[..., Any]:
        # No warnings about retracing: each variable has programs of its own.
        logging.getLogger("tensorflow").setLevel(logging.ERROR)
        programs: dict[Any, Any] = {}

        def run(*arguments: Any) -> Any:
            leaves = keras.tree.flatten(arguments)
            key = tuple(leaf.shape for leaf in leaves)
            if key not in programs:
                programs[key] = _flat_program(
                    update, arguments, uses_only_builtin_keras
                )
            found = programs[key](*map(_tensor, leaves))
            # The structure of the arguments without gradients.
            return keras.tree.pack_sequence_as(
                arguments[:-1], [_numpy(tensor) for tensor in found]
            )

        return run


def _open_spec(value: Any) -> Any:
    """The type of a composite tensor with any number of rows, as of other batches."""
    spec = tf.type_spec_from_value(value)
    if value.shape.rank in (None, 0):
        return spec
    shape = [None, *value.shape[1:]]
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(shape, spec.dtype)
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(
            shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype
        )
    return spec


def _flat_program(
    update: Callable[..., Any], arguments: Any, jit_compile: bool
) -> _Traced:
    def flat(*leaves: Any) -> list[Any]:
        given = keras.tree.pack_sequence_as(arguments, list(leaves))
        return list(keras.tree.flatten(update(*given)))

    specs = [
        tf.TensorSpec(leaf.shape, leaf.dtype) for leaf in keras.tree.flatten(arguments)
    ]
    return _Traced(flat, specs, jit_compile)


def _pending_value(variable: Any) -> np.ndarray:
    """The assigned value of a variable; before the first one, its own."""
    raw = raw_value(variable)
    given: np.ndarray | None = getattr(raw, _PENDING_VALUE, None)
    return raw.numpy() if given is None else given  # type: ignore[no-any-return]
