"""The strategy that a model or variable was made under."""

from __future__ import annotations

from typing import Any

STRATEGY_ATTRIBUTE = "_keras_strategies_strategy"


def strategy_of(made: Any) -> Any:
    """The strategy that a model or variable was made under; None without one."""
    return made.__dict__.get(STRATEGY_ATTRIBUTE)
