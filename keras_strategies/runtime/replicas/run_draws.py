"""Draws of the local replicas in one `Strategy.run`, with the rows of all workers."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keras_strategies.runtime.data_parallel.draw_lengths import (
    DrawLengths,
    EarlierDraws,
    compare_workers,
)
from keras_strategies.runtime.data_parallel.row_draws import DrawsByLength, OwnRows

if TYPE_CHECKING:
    from keras_strategies.communication.communicator import Communicator


class RunDraws:
    """Draws of the local replicas in one run.

    Args:
        rows: returns the rows of the replicas of all workers; an empty list without
            any.
        earlier: the draws of the function in earlier runs.
        workers: the communicator between workers; None without any.
        multiple_in_program: see `DrawsByLength`, of the number of a local replica, and
            the number and the length of a draw; None outside of programs.
    """

    def __init__(
        self,
        rows: Callable[[], list[Any]],
        earlier: EarlierDraws,
        workers: Communicator | None = None,
        multiple_in_program: Callable[[int, int, int], Any] | None = None,
    ):
        self.rows = rows
        self.lengths = DrawLengths(earlier)
        self._workers = workers
        self._multiple = multiple_in_program

    def of_replica(
        self, replica_id: int, local: int, is_partitioned: bool
    ) -> DrawsByLength:
        """The draws of a replica.

        Args:
            replica_id: int, among all replicas.
            local: int, among those of this worker.
            is_partitioned: bool, see `RowDraws`.
        """

        def rows() -> OwnRows | None:
            every = self.rows()
            return OwnRows.of(every, replica_id) if every else None

        multiple = self._multiple and functools.partial(self._multiple, local)
        return DrawsByLength(rows, self.lengths, is_partitioned, multiple)

    def compare(self) -> None:
        """Compares draws between workers, before values that follow from them are used.

        Workers call it equally often. Where replicas have as many rows, there is
        nothing to compare.

        Raises:
            ContextError: if only some replicas take a draw for their rows.
        """
        if self._workers is None or len(set(self.rows())) < 2:
            return
        own = self.lengths.take()
        every = self._workers.gather_values("the random numbers in `run`", own)
        compare_workers(itertools.chain(*every))
