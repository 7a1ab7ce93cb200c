"""Deferred variables: made in a stateless scope, initialized later."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategies.keras_compat.variables.values import raw_value


def has_deferred_variables() -> bool:
    """Whether there are variables that were made in a stateless scope without values.

    Keras 3.15: the global attribute "uninitialized_variables". The list is made if
    there is none, so that threads with a copy of this one's state share it.
    """
    from keras.src.backend.common import global_state

    return bool(
        global_state.get_global_attribute(
            "uninitialized_variables", [], set_to_default=True
        )
    )


def build_optimizer_without_values(optimizer: Any, variables: list[Any]) -> None:
    """`optimizer.build` for variables that have no values.

    Those of `FitDriver.plan_variables` have what the optimizer reads.

    Keras 3.15 on TensorFlow: `_var_key` and `add_variable_from_reference` of
    `TFOptimizer` read the `tf.Variable`, which makes it.
    """
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    if all(raw_value(variable) is not None for variable in variables):
        optimizer.build(variables)
        return
    add = functools.partial(BaseOptimizer.add_variable_from_reference, optimizer)
    methods = {"_var_key": id, "add_variable_from_reference": add}
    for name, method in methods.items():
        object.__setattr__(optimizer, name, method)
    try:
        optimizer.build(variables)
    finally:
        for name in methods:
            object.__delattr__(optimizer, name)


@contextlib.contextmanager
def discarding_deferred_variables() -> Iterator[None]:
    """Variables that are made inside, in a stateless scope, never get values.

    Keras 3.15: the global attribute "uninitialized_variables".
    """
    from keras.src.backend.common import global_state

    before = list(global_state.get_global_attribute("uninitialized_variables", []))
    try:
        yield
    finally:
        global_state.set_global_attribute("uninitialized_variables", before)


def deferred_variables() -> list[Any]:
    """The variables that were made in a stateless scope and have no values yet.

    Keras 3.15: the global attribute "uninitialized_variables".
    """
    from keras.src.backend.common import global_state

    return list(global_state.get_global_attribute("uninitialized_variables", []))


def initialize_deferred_variables(scope_of: Callable[[Any], Any]) -> bool:
    """Initializes the variables that were made in a stateless scope.

    Keras 3.15: as `initialize_all_variables`, by `KerasVariable._deferred_initialize`.

    Args:
        scope_of: callable of a variable that returns a context, or None.

    Returns:
        Whether there were any.
    """
    from keras.src.backend.common import global_state

    waiting = global_state.get_global_attribute("uninitialized_variables", [])
    global_state.set_global_attribute("uninitialized_variables", [])
    for variable in waiting:
        with scope_of(variable) or contextlib.nullcontext():
            variable._deferred_initialize()
    return bool(waiting)
