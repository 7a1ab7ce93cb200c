"""A scope that replaces the values of variables, and its policies."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Any, ClassVar

import keras

from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.thread_state import current_stateless_scope


class StatePolicy(abc.ABC):
    """Reads and assignments of variables in a `StateScope`."""

    #: Groups of patches that are installed while such a scope is open.
    patches: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def read(self, variable: Any) -> Any:
        """The value of a variable; None for its own value or its initializer's."""

    @abc.abstractmethod
    def assign(self, variable: Any, value: Any) -> None:
        """Assigns a variable in the scope."""

    def initial_value(self, value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
        """Equivalent arguments of a `keras.Variable` that is made in the scope."""
        return value, shape, dtype

    def scope(self) -> StateScope:
        """A new scope with this policy."""
        return StateScope(self)


class StateScope(keras.StatelessScope):
    """A `keras.StatelessScope` with the reads and assignments of a policy.

    Losses are collected; variables made inside get no values.

    Args:
        policy: the policy.
    """

    def __init__(self, policy: StatePolicy):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.policy = policy

    def __enter__(self) -> StateScope:
        patching.begin_use(self.policy.patches)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            super().__exit__(kind, error, traceback)
        finally:
            patching.end_use(self.policy.patches)

    def get_current_value(self, variable: Any) -> Any:
        return self.policy.read(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.policy.assign(*update)


class ShapesOnly(StatePolicy):
    """Planning: variables made in the scope have shapes and dtypes, and no values."""

    def __init__(self) -> None:
        self._assigned: dict[int, Any] = {}

    def read(self, variable: Any) -> Any:
        return self._assigned.get(id(variable))

    def assign(self, variable: Any, value: Any) -> None:
        self._assigned[id(variable)] = value

    def initial_value(self, value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
        tensor = keras.ops.convert_to_tensor(value, dtype)
        name = keras.backend.standardize_dtype(tensor.dtype)
        return (lambda shape, dtype=None: tensor), tensor.shape, name


def policy_of(scope: Any) -> StatePolicy | None:
    """The policy of a scope; None for another `StatelessScope`, and for None."""
    return scope.policy if isinstance(scope, StateScope) else None


def current_policy() -> StatePolicy | None:
    """The policy of this thread's innermost scope."""
    return policy_of(current_stateless_scope())
