"""Cost of a training step, read from its trace or its compiled program.

Both are made from shapes, and arrays are never allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from keras_strategies.engines.jax.fit.compiled_steps import Step
from keras_strategies.engines.jax.fit.hlo_collectives import sent_bytes
from keras_strategies.keras_compat.backends.keras_on_jax import layout_of
from keras_strategies.runtime.data_parallel.arithmetic import Arithmetic
from keras_strategies.runtime.placement import StepCost

ShardingOfShape = Callable[[Sequence[int]], jax.sharding.Sharding]


def step_cost(
    model: Any,
    step: Step,
    batch: Any,
    sharding: ShardingOfShape,
    home: jax.sharding.Sharding | None = None,
) -> StepCost:
    """The cost of a step.

    Args:
        model: a built model, its variables with layouts; values are not needed.
        step: the training step, not compiled.
        batch: structure of objects with a shape and a dtype.
        sharding: returns the sharding of an array of a batch, given its shape.
        home: the sharding of all variables in place of their layouts.
    """
    state, given = _abstract_arguments(model, batch, sharding, home)
    program = jax.jit(
        lambda *args: step(args[:-1], args[-1]),
        donate_argnums=(0, 1, 2, 3),
        out_shardings=(None, tuple([a.sharding for a in group] for group in state)),
    )
    compiled = program.lower(*state, given).compile()
    memory = compiled.memory_analysis()
    peak = memory and (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    sent = sent_bytes(compiled.as_text() or "")
    return StepCost(peak, sent, "read from the compiled step")


def step_arithmetic(
    model: Any, step: Step, batch: Any, sharding: ShardingOfShape
) -> Arithmetic:
    """The arithmetic of a step, with the arguments of `step_cost`."""
    arguments = _abstract_arguments(model, batch, sharding)
    return arithmetic_of(jax.make_jaxpr(step)(*arguments).jaxpr)


def _abstract_arguments(
    model: Any,
    batch: Any,
    sharding: ShardingOfShape,
    home: jax.sharding.Sharding | None = None,
) -> tuple[list[list[jax.ShapeDtypeStruct]], Any]:
    """The state and the batch of a training step."""
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = [[_abstract(variable, home) for variable in group] for group in groups]
    given = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            tuple(leaf.shape),
            jax.dtypes.canonicalize_dtype(str(leaf.dtype)),
            sharding=sharding(leaf.shape),
        ),
        batch,
    )
    return state, given


def _abstract(
    variable: Any, home: jax.sharding.Sharding | None
) -> jax.ShapeDtypeStruct:
    layout = home or layout_of(variable).backend_layout
    dtype = jax.dtypes.canonicalize_dtype(variable.dtype)
    return jax.ShapeDtypeStruct(tuple(variable.shape), dtype, sharding=layout)


def arithmetic_of(jaxpr: Jaxpr) -> Arithmetic:
    """The arithmetic of a trace.

    Args:
        jaxpr: the trace; its `scan`s count once for each iteration, other loops once.
    """
    flops: float = 0
    operations = 0
    for equation in jaxpr.eqns:
        inner = [arithmetic_of(each) for each in _inner_traces(equation)]
        if not inner:
            flops += _flops(equation)
            operations += 1
        elif equation.primitive.name == "cond":
            flops += max(each.flops for each in inner)
            operations += max(each.operations for each in inner)
        else:
            times = equation.params.get("length", 1)
            flops += times * sum(each.flops for each in inner)
            operations += times * sum(each.operations for each in inner)
    return Arithmetic(flops, operations)


def _inner_traces(equation: JaxprEqn) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each


def _flops(equation: JaxprEqn) -> int:
    """FLOPs of a matrix product or a convolution; 0 of other operations."""
    # Tokens have none.
    shapes = [tuple(getattr(var.aval, "shape", ())) for var in equation.invars]
    outputs = [getattr(var.aval, "shape", ()) for var in equation.outvars]
    results = math.prod(outputs[0]) if outputs else 0
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2 * results * math.prod(shapes[0][axis] for axis in contracted)
    if equation.primitive.name == "conv_general_dilated":
        filters = equation.params["dimension_numbers"].rhs_spec[0]
        return 2 * results * math.prod(shapes[1]) // shapes[1][filters]
    return 0
