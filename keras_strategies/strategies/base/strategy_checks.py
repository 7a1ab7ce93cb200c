"""Checks of calls of a strategy's methods."""

from __future__ import annotations

from typing import Any

from keras_strategies.errors import ContextError, ModelScopeError
from keras_strategies.runtime import context
from keras_strategies.runtime.engine import StrategyCore


class StrategyChecks(StrategyCore):
    """A strategy, with checks of the context and the models of its methods."""

    def _check_outside_replicas(self, method: str) -> None:
        if context.current_replica() is not None:
            raise ContextError(
                f"`{method}` was called inside a replica function of "
                f"{context.current_strategy()!r}, where code runs on each replica. "
                "Call it outside of `run`; inside, `ks.get_replica_context()` has "
                "`all_reduce`, `all_gather` and `merge_call`."
            )

    def _check_owns(self, model: Any, what: str) -> None:
        if not self.owns(model):
            raise ModelScopeError(
                f"Model {model.name!r} was not created in the scope of {self!r}, "
                f"which therefore cannot {what} it. Create it in that scope, or call "
                "the method of the strategy that it was created under."
            )
