"""Variables with DTensors as values, on Torch."""

from __future__ import annotations

from typing import Any

from keras_strategies.keras_compat.backends.keras_on_torch import assign_shards
from keras_strategies.keras_compat.hooks import installed_hooks


class DTensorVariable:
    """A variable with a shard in each process. It stands before its own class."""

    def _direct_assign(self, value: Any) -> None:
        # Not `self.value`, which is a copy in an `AutocastScope`.
        assign_shards(self._value, value)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        # Keras would show the value, for which all processes would have to gather it.
        own: Any = self
        text = f"<Variable path={own.path}, shape={own.shape}, dtype={own.dtype}>"
        return installed_hooks().representation(self, text)
