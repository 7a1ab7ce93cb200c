"""`ks.value_and_grad` on JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
from jax import numpy as jnp

from keras_strategies.engines.jax.function.refused_values import check_values
from keras_strategies.engines.jax.function.trace_state import (
    NestedState,
    ValueOverrides,
)
from keras_strategies.engines.jax.run.traced_replica_state import TracedReplicaState
from keras_strategies.keras_compat.state_scope import policy_of
from keras_strategies.keras_compat.thread_state import current_stateless_scope
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.values import map_structure

# Placeholder of an array of `aux`, which the differentiated function returns.
_ARRAY = object()


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
) -> Callable[..., Any]:
    """See `ks.value_and_grad`."""
    wanted = {
        id(v): v
        for v in variables
        if v.trainable and keras.backend.is_float_dtype(v.dtype)
    }

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        outer = current_stateless_scope()
        overrides = ValueOverrides()
        state: TracedReplicaState | NestedState
        aux: Any = None

        def pure(values: list[Any]) -> Any:
            """The loss, and as auxiliary outputs all that the trace has made."""
            nonlocal overrides, state, aux
            overrides = ValueOverrides(list(wanted.values()), values)
            state = _state_inside(outer, overrides)
            with state.scope():
                result = fn(*args, **kwargs)
            loss, aux = result if has_aux else (result, None)
            loss = jnp.asarray(loss)
            arrays: list[Any] = []

            def without_array(leaf: Any) -> Any:
                if isinstance(leaf, jax.Array):
                    arrays.append(leaf)
                    return _ARRAY
                return leaf

            check_values(aux)
            aux = map_structure(without_array, aux)
            return loss, (loss, arrays, state.updated_values())

        values = [_value(outer, variable) for variable in wanted.values()]
        differentiate = jax.value_and_grad(pure, has_aux=True)
        (_, (loss, arrays, updates)), gradients = differentiate(values)
        state.commit(updates)
        rest = iter(arrays)
        aux = map_structure(lambda leaf: next(rest) if leaf is _ARRAY else leaf, aux)
        # A variable that was not read has no gradient.
        found = {
            key: gradient
            for key, gradient in zip(wanted, gradients, strict=True)
            if key in overrides.read
        }
        of_variables = [found.get(id(variable)) for variable in variables]
        return ((loss, aux) if has_aux else loss), of_variables

    return wrapped


def _state_inside(
    outer: Any, overrides: ValueOverrides
) -> TracedReplicaState | NestedState:
    """The state of a differentiated function in a scope."""
    policy = policy_of(outer)
    if isinstance(policy, TracedReplicaState):
        return policy.nested(overrides)
    return NestedState(outer, overrides)


def _value(outer: Any, variable: Any) -> Any:
    if outer is not None:
        value = outer.get_current_value(variable)
        if value is not None:
            return value
    if raw_value(variable) is None:
        # Created in this trace, which sees the initializer's value.
        return jnp.asarray(variable.value, variable.dtype)
    return jnp.asarray(raw_value(variable))
