"""Cost of a training step, read from its compiled program.

It is compiled for shapes, and arrays are never allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from keras_strategies.engines.jax.fit.compiled_steps import CompiledStep
from keras_strategies.engines.jax.fit.hlo_collectives import sent_bytes
from keras_strategies.keras_compat.backends.keras_on_jax import layout_of
from keras_strategies.runtime.placement import StepCost

#: Callable of a shape and a dtype; returns what the program gets for such an array.
AbstractArray = Callable[[tuple[int, ...], Any], Any]


def step_cost(
    model: Any, step: CompiledStep, batch: Any, abstract: AbstractArray
) -> StepCost:
    """The cost of a step.

    Args:
        model: a built model, its variables with layouts; values are not needed.
        step: the training step.
        batch: structure of objects with a shape and a dtype.
        abstract: returns an array of a batch as the program gets it.
    """
    state, given = _abstract_arguments(model, batch, abstract)
    compiled = step.jitted(state).lower(*state, given).compile()
    memory = compiled.memory_analysis()
    peak = memory and (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    sent = sent_bytes(compiled.as_text() or "")
    return StepCost(peak, sent, "read from the compiled step")


def _abstract_arguments(
    model: Any, batch: Any, abstract: AbstractArray
) -> tuple[list[list[jax.ShapeDtypeStruct]], Any]:
    """The state and the batch of a training step."""
    groups = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    state = [[_abstract(variable) for variable in group] for group in groups]
    given = jax.tree.map(
        lambda leaf: abstract(
            tuple(leaf.shape), jax.dtypes.canonicalize_dtype(str(leaf.dtype))
        ),
        batch,
    )
    return state, given


def _abstract(variable: Any) -> jax.ShapeDtypeStruct:
    layout = layout_of(variable).backend_layout
    dtype = jax.dtypes.canonicalize_dtype(variable.dtype)
    return jax.ShapeDtypeStruct(tuple(variable.shape), dtype, sharding=layout)
