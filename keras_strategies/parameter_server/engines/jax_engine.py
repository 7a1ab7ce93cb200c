"""Parameter servers and their workers on JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse

from keras_strategies.engines.jax.compat import (
    devices_are_fixed,
    passed_on,
    used_inputs,
)
from keras_strategies.engines.jax.devices import default_device
from keras_strategies.keras_compat.optimizers.applying import applying_through
from keras_strategies.keras_compat.thread_state import values_scope
from keras_strategies.keras_compat.variables.lookups import lookups_through
from keras_strategies.keras_compat.variables.values import raw_value, set_raw_value
from keras_strategies.parameter_server.engines.engine_interface import (
    Body,
    OptimizerCall,
    OptimizerCallRecorder,
    ParameterServerEngine,
    StepProgram,
    StepResult,
    StepVariables,
    TracedOutputs,
)

# Kinds of NumPy dtypes that the buffer protocol supports; bfloat16 has none of them.
_WITH_BUFFER = "biufc"


@dataclass(frozen=True, eq=False)
class _Trace:
    """What a trace of a step has besides arrays: the arguments `gradients` belong to.

    Args:
        calls: list of `OptimizerCall`.
        changed: list of variables with new values.
        outputs: the step's return value.
    """

    calls: list[OptimizerCall]
    changed: list[Any]
    outputs: TracedOutputs


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class _Traced:
    """Arrays of a step and the trace that they come from.

    `jax.jit` stores the structure of the results with each program. The trace is part
    of it, so each call returns the trace of the program that ran, whatever decides
    between programs: shapes, dtypes as JAX converts them, weak types, settings.
    """

    arrays: Any
    trace: _Trace

    def tree_flatten(self) -> tuple[tuple[Any], _Trace]:
        return (self.arrays,), self.trace

    @classmethod
    def tree_unflatten(cls, trace: _Trace, children: tuple[Any]) -> _Traced:
        return cls(children[0], trace)


class JaxStepProgram(StepProgram):
    """A jitted function of variables' values, positions and batch."""

    def __init__(self, body: Body, variables: StepVariables, gradients: bool):
        super().__init__(body, variables, gradients)
        self._ids: dict[Any, Any] = {}
        self._step = jax.jit(self._pure)

    # Lookups

    def lookups(self, batch: Any) -> list[tuple[Any, np.ndarray]]:
        if not self.variables.tables:
            return []
        leaves, structure = jax.tree.flatten(batch)
        key = (structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._ids:
            self._ids[key] = self._find_lookups(batch)
        tables, places, program = self._ids[key]
        if not tables:
            return []
        if None not in places:
            found = [leaves[place] for place in places]
        else:
            found = program(batch)
        return list(zip(tables, _arrays(list(found)), strict=True))

    def _find_lookups(self, batch: Any) -> tuple[list[Any], list[int | None], Any]:
        """Traces the step with zeros for tables, and extracts the computation of ids.

        Returns:
            The table of each lookup; the index of the batch's leaf that its ids are,
            None if they are computed; and a program of a batch that returns ids.
        """
        while True:
            variables = [*self.variables.tables, *self.variables.others]
            tables = list(self.variables.tables)
            found: list[Any] = []
            assigned: list[Any] = []

            def trace(
                values: Any,
                batch: Any,
                found: Any = found,
                assigned: Any = assigned,
                variables: Any = variables,
            ) -> Any:
                found.clear()
                assigned.clear()
                ids: list[Any] = []

                def take(x: Any, indices: Any, axis: Any) -> Any:
                    if axis != 0 or not any(x is t for t in self.variables.tables):
                        return NotImplemented
                    indices = jnp.asarray(indices)
                    found.append(x)
                    ids.append(indices)
                    shape = (*indices.shape, *x.shape[1:])
                    return jnp.zeros(shape, x.dtype)

                with (
                    values_scope(zip(variables, values, strict=True)) as scope,
                    lookups_through(take),
                    applying_through(OptimizerCallRecorder()),
                ):
                    outputs = self.body(batch)
                for variable, value in zip(variables, values, strict=True):
                    if scope.get_current_value(variable) is not value:
                        assigned.append(variable)
                kept = [scope.get_current_value(v) for v in self.variables.others]
                return ids, (TracedOutputs(outputs, _is_computed).tensors, kept)

            specs = [jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for v in variables]
            by_ids, read = used_inputs(trace, specs, batch)
            if any(by_ids):
                # Ids that depend on variables are unknown before the step.
                dense = list({id(t): t for t in found}.values())
            else:
                dense = [
                    table
                    for table, is_read in zip(tables, read[: len(tables)], strict=True)
                    if is_read or any(table is v for v in assigned)
                ]
            if dense:
                self.variables.mark_dense(dense)
                continue

            def ids_of(batch: Any, trace: Any = trace, specs: Any = specs) -> Any:
                return trace([jnp.zeros(s.shape, s.dtype) for s in specs], batch)[0]

            return list(found), passed_on(ids_of, batch), jax.jit(ids_of)

    # The step

    def _pure(self, values: Any, positions: Any, batch: Any) -> Any:
        variables = [*self.variables.tables, *self.variables.others]
        places = iter(positions)

        def take(x: Any, indices: Any, axis: Any) -> Any:
            if axis != 0 or not any(x is t for t in self.variables.tables):
                return NotImplemented
            # Positions are in the window, so none has to be replaced by NaN.
            return jnp.take(x.value, next(places), axis=0, mode="clip")

        recorder = OptimizerCallRecorder()
        with (
            values_scope(zip(variables, values, strict=True)) as scope,
            lookups_through(take),
            applying_through(recorder),
        ):
            outputs = self.body(batch)
        changed = []
        for variable, before in zip(variables, values, strict=True):
            after = scope.get_current_value(variable)
            if after is not before:
                changed.append((variable, after))
        split = TracedOutputs(outputs, _is_computed)
        gradients = [call.gradients for call in recorder.calls]
        return _Traced(
            (split.tensors, gradients, [value for _, value in changed]),
            _Trace(recorder.calls, [variable for variable, _ in changed], split),
        )

    def run(
        self,
        batch: Any,
        lookups: Sequence[tuple[Any, np.ndarray]],
        positions: Sequence[np.ndarray],
    ) -> StepResult:
        variables = [*self.variables.tables, *self.variables.others]
        values = [raw_value(variable) for variable in variables]
        found = self._step(values, list(positions), batch)
        outputs, gradients, changed = _arrays(found.arrays)
        trace = found.trace
        return StepResult(
            trace.outputs.filled(outputs),
            [
                OptimizerCall(call.optimizer, call.variables, g)
                for call, g in zip(trace.calls, gradients, strict=True)
            ],
            list(zip(trace.changed, changed, strict=True)),
        )


def _is_computed(leaf: Any) -> bool:
    """Whether a program returns a leaf: arrays and numbers, not strings."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, int, float, complex))


def _arrays(values: Any) -> Any:
    """A structure of NumPy arrays on the host; copies from an accelerator overlap."""
    if default_device().platform == "cpu":
        return jax.tree.map(_array, values)
    return jax.device_get(values)


def _array(value: Any) -> np.ndarray:
    """An array on the memory of a JAX array, where Python's buffers have its dtype.

    `np.asarray` alone takes several times as long.
    """
    if isinstance(value, jax.Array) and value.dtype.kind in _WITH_BUFFER:
        return np.asarray(memoryview(value))  # type: ignore[arg-type]
    return np.asarray(value)


def _assign(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=True):
        if value is not variable.value:
            variable.assign(value)


class JaxParameterServerEngine(ParameterServerEngine):
    """Steps and updates are jitted; arrays are passed without copies where possible."""

    pads_rows = True

    def expanded(self, value: Any) -> tuple[Any, list[Any]] | None:
        if not isinstance(value, sparse.JAXSparse):
            return None
        components, shape = value.tree_flatten()
        return (type(value), shape), list(components)

    def composed(self, spec: Any, components: Sequence[Any]) -> Any:
        kind, shape = spec
        return kind.tree_unflatten(shape, list(map(jnp.asarray, components)))

    def on_cpu(self) -> contextlib.AbstractContextManager[Any]:
        if not devices_are_fixed():
            jax.config.update("jax_platforms", "cpu")
        if jax.default_backend() == "cpu":
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[Any] = jax.default_device(
            jax.local_devices(backend="cpu")[0]
        )
        return context

    def model_body(self, model: Any, kind: str) -> Body:
        def values(variables: Any) -> list[Any]:
            return [variable.value for variable in variables]

        def body(batch: Any) -> Any:
            trainable = values(model.trainable_variables)
            others = values(model.non_trainable_variables)
            if kind == "predict":
                outputs, others = model.predict_step((trainable, others), batch)
                _assign(model.non_trainable_variables, others)
                return outputs
            metrics = values(model.metrics_variables)
            if kind == "test":
                logs, (_, others, metrics) = model.test_step(
                    (trainable, others, metrics), batch
                )
            else:
                optimizer = values(model.optimizer.variables)
                state = (trainable, others, optimizer, metrics)
                logs, (_, others, _, metrics) = model.train_step(state, batch)
            _assign(model.non_trainable_variables, others)
            _assign(model.metrics_variables, metrics)
            return logs

        return body

    def program(
        self, body: Body, variables: StepVariables, gradients: bool
    ) -> StepProgram:
        return JaxStepProgram(body, variables, gradients)

    def set_value(self, variable: Any, value: np.ndarray) -> None:
        # Jitted functions move NumPy arrays to the worker's device.
        set_raw_value(variable, value)

    def get_value(self, variable: Any) -> np.ndarray:
        return np.asarray(raw_value(variable))

    @property
    def most_rows(self) -> int:
        # Otherwise JAX wraps ids to int32, which are other rows.
        return super().most_rows if jax.config.read("jax_enable_x64") else 2**31

    def compile_update(
        self, update: Callable[..., Any], uses_only_builtin_keras: bool
    ) -> Callable[..., Any]:
        jitted = jax.jit(update)

        def run(*arguments: Any) -> Any:
            return _arrays(jitted(*arguments))

        return run
