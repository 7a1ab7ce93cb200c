"""Row parts: tensors of the global batch with rows that stay on their replicas.

These are outputs of data-parallel calls, and batches of which each worker has read its
own rows. Such a tensor has all rows, for any code that looks at it; its parts are
joined when the first operation needs them. A data-parallel call that gets it as an
argument, such as another layer, a loss or a metric, takes the parts, so that what is
large never leaves its replica.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.rows.row_placements import RowProof
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.user_warnings import user_line

_logger = logging.getLogger("keras_strategies.row_parts")
# By the layer whose output or gradient was joined, the shapes by lines of user code.
_joins: weakref.WeakKeyDictionary[Any, dict[str, tuple[int | None, ...]]] = (
    weakref.WeakKeyDictionary()
)
# Lines that have been logged.
_joining_lines: set[str] = set()


class RowPartsCaller(Protocol):
    """Calls functions on replicas with their parts of arguments."""

    def on_row_parts(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        adds: bool = False,
        only_adds: bool = False,
        known: RowProof | None = None,
    ) -> tuple[bool, Any]:
        """Calls a function on replicas, some of whose arguments are row parts.

        Args:
            layer: a `keras.layers.Layer` that stands for the function in row proofs.
            call: the function.
            args: its arguments.
            kwargs: its keyword arguments.
            adds: see `LayerCall`.
            only_adds: see `LayerCall`.
            known: the proof of a function that is known by type, for arguments that
                have rows or are None.

        Returns:
            Whether it is split, and its results; without a call if it is not.
        """
        ...


class RowParts:
    """A tensor of the global batch in parts; an engine's class is a tensor as well.

    Attributes:
        row_split: the entries of axis 0 on each replica.
        caller: the data-parallel calls of the strategy that has made it.
        layer: returns the layer that has computed it; None if that is gone, or for a
            batch.
    """

    row_split: RowSplit
    caller: RowPartsCaller
    layer: Callable[[], Any]

    @property
    def parts(self) -> list[Any] | None:
        """The part of each local replica, without gradient, on the replica's device.

        None where only `joined` has the rows: once the tensor has been changed in
        place, or in another graph.
        """
        raise NotImplementedError

    @property
    def rows(self) -> Any:
        """The entries of axis 0: int, or a scalar tensor."""
        return sum(self.row_split.every)

    def joined(self) -> Any:
        """All rows, without gradient, on the device of the global batch."""
        raise NotImplementedError


def note_join(tensor: RowParts, shape: tuple[int | None, ...]) -> None:
    """Notes the line of user code that needs all rows of a tensor, and logs it once."""
    line, layer = user_line(), tensor.layer()
    if layer is not None:
        _joins.setdefault(layer, {})[line] = shape
    if line in _joining_lines:
        return
    _joining_lines.add(line)
    _logger.info(
        "All rows of a tensor of shape %s are joined on one device of each worker, as "
        "the code called at %s needs them. This is exact; what is sent and stored "
        "grows with the number of workers. Losses (`keras.losses.Loss`), Keras's "
        "metrics and layers compute on the replicas that have the rows.",
        shape,
        line,
    )


def joins_of(layers: Iterable[Any]) -> dict[str, tuple[int | None, ...]]:
    """The lines that needed all rows of outputs of layers, and the last shape of each.

    Args:
        layers: the `keras.layers.Layer`s.
    """
    found: dict[str, tuple[int | None, ...]] = {}
    for layer in layers:
        found.update(_joins.get(layer, {}))
    return found


def parts_of(tensor: Any, row_split: RowSplit) -> list[Any] | None:
    """The parts of a tensor that is split like this; None for any other tensor.

    Args:
        tensor: a tensor, or None.
        row_split: the entries of axis 0 on each replica.
    """
    if not isinstance(tensor, RowParts):
        return None
    return tensor.parts if tensor.row_split.is_like(row_split) else None


def has_row_parts(values: Any) -> bool:
    """Whether a structure has row parts among its leaves."""
    return any(isinstance(leaf, RowParts) for leaf in leaves_of(values))
