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
    wanted = [
        v for v in variables if v.trainable and keras.backend.is_float_dtype(v.dtype)
    ]

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        outer = current_stateless_scope()
        call = _Differentiated(outer, lambda: fn(*args, **kwargs), wanted, has_aux)
        loss, aux, found = call()
        gradients = [found.get(id(variable)) for variable in variables]
        return ((loss, aux) if has_aux else loss), gradients

    return wrapped


class _Differentiated:
    """A function as a pure one of the values of variables, differentiated once."""

    def __init__(
        self,
        outer: Any,
        fn: Callable[[], Any],
        variables: Sequence[Any],
        has_aux: bool,
    ):
        self._outer = outer
        self._fn = fn
        self._variables = list({id(v): v for v in variables}.values())
        self._has_aux = has_aux
        self._state: Any = None
        self._overrides = ValueOverrides()
        self._aux: Any = None

    def __call__(self) -> tuple[Any, Any, dict[int, Any]]:
        values = [self._value(variable) for variable in self._variables]
        differentiate = jax.value_and_grad(self._pure, has_aux=True)
        (_, (loss, arrays, updates)), gradients = differentiate(values)
        self._state.commit(updates)
        rest = iter(arrays)
        aux = map_structure(
            lambda leaf: next(rest) if leaf is _ARRAY else leaf, self._aux
        )
        ids = [id(variable) for variable in self._variables]
        found = {
            key: gradient
            for key, gradient in zip(ids, gradients, strict=True)
            if key in self._overrides.read
        }
        return loss, aux, found

    def _value(self, variable: Any) -> Any:
        if self._outer is not None:
            value = self._outer.get_current_value(variable)
            if value is not None:
                return value
        if raw_value(variable) is None:
            # Created in this trace, which sees the initializer's value.
            return jnp.asarray(variable.value, variable.dtype)
        return jnp.asarray(raw_value(variable))

    def _pure(self, values: list[Any]) -> Any:
        outer = policy_of(self._outer)
        self._overrides = overrides = ValueOverrides(self._variables, values)
        inner: TracedReplicaState | NestedState
        if isinstance(outer, TracedReplicaState):
            inner = outer.nested(overrides)
        else:
            inner = NestedState(self._outer, overrides)
        self._state = inner
        with inner.scope():
            result = self._fn()
        loss, aux = result if self._has_aux else (result, None)
        loss = jnp.asarray(loss)
        arrays: list[Any] = []

        def without_array(leaf: Any) -> Any:
            if isinstance(leaf, jax.Array):
                arrays.append(leaf)
                return _ARRAY
            return leaf

        check_values(aux)
        self._aux = map_structure(without_array, aux)
        return loss, (loss, arrays, inner.updated_values())
