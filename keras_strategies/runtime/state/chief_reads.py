"""Reads by the chief, in which all workers take part, while it saves a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keras_strategies.cluster.group import WorkerGroup


class ChiefReads:
    """Variables in shards over workers, gathered when the chief reads each of them.

    The chief has one value at a time, however many variables it saves, and it decides
    on the order: the other workers wait for the number of the next variable.

    Args:
        group: the workers.
        variables: list of variables, in the same order on all workers.
        gather: gathers the full value of one; a call of all workers.
    """

    def __init__(
        self,
        group: WorkerGroup,
        variables: Sequence[Any],
        gather: Callable[[Any], Any],
    ):
        self._group = group
        self._variables = variables
        self._gather = gather
        self._numbers = {id(variable): i for i, variable in enumerate(variables)}

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Entered on all workers; the chief reads in the block, the others before it.

        Raises:
            WorkerError: if a worker is lost.
        """
        if not self._variables:
            yield
        elif self._group.is_chief:
            try:
                yield
            finally:
                self._agree(None)
        else:
            while (number := self._agree(None)) is not None:
                self._gather(self._variables[number])
            yield

    def read(self, variable: Any) -> Any:
        """The full value of a variable, on the chief; None if it is not in shards."""
        number = self._numbers.get(id(variable))
        if number is None:
            return None
        self._agree(number)
        return self._gather(variable)

    def _agree(self, number: int | None) -> int | None:
        """The number that the chief gives."""
        what = "the next variable that the chief saves"
        chiefs: int | None = self._group.broadcast(what, number)
        return chiefs
