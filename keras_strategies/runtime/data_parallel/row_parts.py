"""Row parts: outputs of a data-parallel call that stay on their replicas.

Such a tensor is one of the global batch, with all of its rows, for any code that looks
at it; its parts are joined when the first operation needs them. A data-parallel call
that gets it as an argument, such as another layer, a loss or a metric, takes the parts,
so that what is large never leaves its replica.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.user_warnings import user_line

if TYPE_CHECKING:
    from keras_strategies.runtime.data_parallel.layer_call import DataParallelCall


_logger = logging.getLogger("keras_strategies.row_parts")
# Lines that have been logged.
_joining_lines: set[str] = set()


class RowParts:
    """A tensor of the global batch in parts; an engine's class is a tensor as well.

    Attributes:
        row_split: the entries of axis 0 on each replica.
        caller: the data-parallel calls of the strategy that has made it.
    """

    row_split: RowSplit
    caller: DataParallelCall

    @property
    def parts(self) -> list[Any] | None:
        """The part of each local replica, without gradient, on the replica's device.

        None once the tensor has been changed in place: only `joined` has that.
        """
        raise NotImplementedError

    def joined(self) -> Any:
        """All rows, without gradient, on the device of the global batch."""
        raise NotImplementedError


def log_join(shape: tuple[int, ...]) -> None:
    """Logs the line of user code that needs all rows of a tensor, once."""
    line = user_line()
    if line in _joining_lines:
        return
    _joining_lines.add(line)
    _logger.info(
        "All rows of an output of shape %s are joined on one device of each worker, as "
        "the code called at %s needs them. This is exact; what is sent and stored "
        "grows with the number of workers. Losses (`keras.losses.Loss`), Keras's "
        "metrics and layers compute on the replicas that have the rows.",
        shape,
        line,
    )


def parts_of(tensor: Any, row_split: RowSplit) -> list[Any] | None:
    """The parts of a tensor that is split like this; None for any other tensor.

    Args:
        tensor: a tensor, or None.
        row_split: the entries of axis 0 on each replica.
    """
    if not isinstance(tensor, RowParts):
        return None
    own = tensor.row_split
    if own.replica_set != row_split.replica_set or own.every != row_split.every:
        return None
    return tensor.parts
