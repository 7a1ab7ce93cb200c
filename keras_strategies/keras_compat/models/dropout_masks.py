"""Dropout masks of recurrent cells, which replicas of one process must not share.

Keras 3.15: `DropoutRNNCell` keeps the masks of a call in attributes, until the layer
resets them at its end. Replicas that are threads call the same cell at the same time.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any


class _ThreadsMasks:
    """A cell with the masks of one thread.

    Args:
        cell: the cell.
    """

    def __init__(self, cell: Any):
        self._cell = weakref.ref(cell)
        self._dropout_mask = None
        self._recurrent_dropout_mask = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cell(), name)


class _Cells(threading.local):
    def __init__(self) -> None:
        self.masks: weakref.WeakKeyDictionary[Any, _ThreadsMasks] = (
            weakref.WeakKeyDictionary()
        )


_cells = _Cells()


def masks_of_thread(original: Any, self: Any, *args: Any) -> Any:
    """Calls a method of a cell that reads or assigns its masks."""
    masks = _cells.masks.get(self)
    if masks is None:
        masks = _cells.masks[self] = _ThreadsMasks(self)
    return original(masks, *args)
