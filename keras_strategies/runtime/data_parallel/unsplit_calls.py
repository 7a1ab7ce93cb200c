"""Record of the calls that one device computes because they are small."""

from __future__ import annotations

import weakref
from typing import Any


class UnsplitCalls:
    """By layer or model and the name of a method, the sizes of batches."""

    def __init__(self) -> None:
        self._rows: weakref.WeakKeyDictionary[Any, dict[str, set[int]]] = (
            weakref.WeakKeyDictionary()
        )

    def add(self, layer: Any, name: str, rows: int) -> None:
        """Records a call of the method `name`, or "call" for a layer call."""
        self._rows.setdefault(layer, {}).setdefault(name, set()).add(rows)

    def of(self, model: Any) -> dict[str, list[int]]:
        """The sorted sizes of batches of each method of a model."""
        found = self._rows.get(model, {})
        return {name: sorted(rows) for name, rows in found.items()}
