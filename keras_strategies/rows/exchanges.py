"""Sums over rows that a call uses further: replicas exchange them.

A sum over rows that is multiplied by another, or subtracted from rows, is no sum over
rows any more. If replicas exchange it where it is computed, it is that of all rows: the
same on all of them. The gradient of an exchange is an exchange, so derivatives need no
rules here either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras

from keras_strategies.rows.placed import SAME, Placed
from keras_strategies.rows.row_placements import Exchange, ProvedEvent
from keras_strategies.rows.row_tensors import RowTensor, tensors_in
from keras_strategies.rows.trace import Node

#: One device has more digits of a sum in 16 bits than replicas could exchange.
_DTYPES = ("float32", "float64", "int32", "int64")


class Exchanges:
    """The sums over rows of a call, and which of them are exchanged.

    Args:
        events: those of the first trace.
    """

    def __init__(self, events: Sequence[tuple[ProvedEvent, Node | None]]):
        self._events = events
        self._may = {id(node) for _, node in events if node and not node.is_repeated}
        #: The exchanges, by the `id` of their nodes.
        self.chosen: dict[int, Exchange] = {}
        self._wanted: dict[int, Exchange] = {}
        self._used: dict[int, Exchange] = {}
        #: The sums that another sum is computed from, by its index.
        self._origins: dict[int, dict[int, Exchange]] = {}

    def choose_more(self) -> bool:
        """Whether other exchanges may help; the next propagation has them.

        Sums that are used further may be sums of others, as the mean in a variance.
        """
        found = self._wanted
        self.chosen |= found
        self._wanted, self._used, self._origins = {}, {}, {}
        return bool(found)

    def follow(
        self, node: Node, tensors: Sequence[RowTensor], known: dict[int, Placed]
    ) -> None:
        """Replaces the placement of a sum that is exchanged.

        Args:
            node: an operation that has been placed.
            tensors: its results.
            known: the placements of all tensors, by their indices.
        """
        if not self._may:
            return
        given = tensors_in((node.args, node.kwargs))
        placed = [known[x.index] for x in given]
        if any(known[x.index].is_mixed for x in tensors):
            if not any(each.is_mixed for each in placed):
                for each in given:
                    self.want(each)
            return
        origins: dict[int, Exchange] = {}
        for each in given:
            origins |= self._origins.get(each.index, {})
        if id(node) in self._may and not any(each.is_sum for each in placed):
            origins = self._exchanged(id(node), tensors[0], known)
        for tensor in tensors:
            self._origins[tensor.index] = origins

    def _exchanged(
        self, node: int, made: RowTensor, known: dict[int, Placed]
    ) -> dict[int, Exchange]:
        """The sum that a tensor is; replaces its placement if it is exchanged."""
        dtype = keras.backend.standardize_dtype(made.dtype)
        placed = known[made.index]
        if not placed.is_sum or placed.power not in (0, -1) or dtype not in _DTYPES:
            return {}
        exchange = Exchange(placed.power == -1, made.lengths, dtype)
        if node not in self.chosen:
            return {node: exchange}
        self.chosen[node] = self._used[node] = exchange
        known[made.index] = SAME
        return {}

    def want(self, tensor: Any) -> None:
        """Notes that a tensor should be that of all rows."""
        if isinstance(tensor, RowTensor):
            self._wanted |= self._origins.get(tensor.index, {})

    def proved(self, layer: Any) -> list[ProvedEvent]:
        """The events of a call of a layer; empty without exchanges."""
        if not self._used:
            return []
        pairs = [(event, self._used.get(id(node))) for event, node in self._events]
        events = [replace(event, exchange=exchange) for event, exchange in pairs]
        return events[events[0].layer == id(layer) :]
