"""Comparison of values that workers have assigned to sharded variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.communication.checksums import checksum
from keras_strategies.communication.file_parts import file_part_number
from keras_strategies.errors import WorkerError


class AssignedValue:
    """What workers compare of a value: the part of a file that it is, or a checksum.

    Args:
        value: the array; one that maps a part of a file is read in full only if other
            workers have another part.
    """

    def __init__(self, value: np.ndarray):
        part = file_part_number(value)
        self._mapped = None if part is None else value
        #: int, the same on workers with the same part of a file.
        self.number = checksum(value) if part is None else part

    def checksum(self) -> int:
        """The checksum of the numbers."""
        return self.number if self._mapped is None else checksum(self._mapped)


def check_equal_values(
    group: WorkerGroup, variables: Sequence[Any], values: Sequence[AssignedValue | None]
) -> None:
    """Checks that workers assigned equal values to sharded variables.

    Sharded variables are not broadcast from the chief: no process holds the full
    value. Each worker takes its shards of the value that it was assigned.

    Args:
        group: the workers, which all call it.
        variables: Keras variables.
        values: that assigned to each; None of one from a program, or that was compared
            before, which is equal on all workers.

    Raises:
        WorkerError: names a variable with different values.
    """
    own = [None if value is None else value.number for value in values]
    numbers = _gathered(group, own)
    differ = [i for i, found in enumerate(numbers) if len(set(found)) > 1]
    if not differ:
        return
    # Workers on several machines have the files of their machines.
    chosen = [values[i] for i in differ]
    own = [None if value is None else value.checksum() for value in chosen]
    sums = _gathered(group, own)
    for i, found in zip(differ, sums, strict=True):
        for other, theirs in enumerate(found):
            if theirs != found[group.index]:
                raise WorkerError(
                    f"Variable {variables[i].path!r} is sharded over the workers, but "
                    f"workers {group.index} and {other} assigned different values to "
                    "it. Assign and load the same values on every worker, "
                    "such as by `load_weights` or `strategy.load_sharded`."
                )


def _gathered(group: WorkerGroup, own: Sequence[int | None]) -> list[tuple[Any, ...]]:
    """The numbers of all workers for each variable."""
    every = group.gather_values("the values of sharded variables", own)
    return list(zip(*every, strict=True))
