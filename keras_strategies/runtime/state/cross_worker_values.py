"""Comparison of values that workers have assigned to sharded variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.errors import WorkerError


def check_equal_values(
    group: WorkerGroup, variables: Sequence[Any], checksums: Sequence[int | None]
) -> None:
    """Checks that workers assigned equal values to sharded variables.

    Sharded variables are not broadcast from the chief: no process holds the full
    value. Each worker takes its shards of the value that it was assigned.

    Args:
        group: the workers, which all call it.
        variables: Keras variables.
        checksums: that of the value assigned to each; None of one from a program,
            which is equal on all workers.

    Raises:
        WorkerError: names a variable with different values.
    """
    own = list(checksums)
    found = group.gather_values("the values of sharded variables", own)
    for other, sums in enumerate(found):
        for variable, mine, theirs in zip(variables, own, sums, strict=True):
            if mine != theirs:
                raise WorkerError(
                    f"Variable {variable.path!r} is sharded over the workers, but "
                    f"workers {group.index} and {other} assigned different values to "
                    "it. Assign and load the same values on every worker, "
                    "such as by `load_weights` or `strategy.load_sharded`."
                )
