"""Comparison of the copies that replicas and workers have of a variable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keras_strategies.communication.checksums import checksum
from keras_strategies.runtime.state.model_values import copied_value


def differing_copies(
    strategy: Any, variables: Sequence[Any]
) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Variables of which the copies are not equal, bit by bit.

    All workers call it together. Shards of a mesh and variables on
    servers have no copies to compare.

    Yields:
        The variable's path, its first copy, and the first one that differs.
    """
    if strategy.placement.mesh is not None or strategy.drivers.servers is not None:
        return
    own: list[tuple[str, list[np.ndarray]]] = []
    for variable in variables:
        copies = strategy.drivers.fit.copies(variable)
        own.append((variable.path, [copied_value(copy.value) for copy in copies]))
    for path, (one, *others) in own:
        for other in others:
            if checksum(one) != checksum(other):
                yield path, one, other
                break
    if strategy.workers is None:
        return
    sums = [checksum(copies[0]) for _, copies in own]
    group = strategy.workers.group
    every = group.gather_values("checksums of variables", sums)
    for i, (path, (one, *_)) in enumerate(own):
        if any(each[i] != sums[i] for each in every):
            yield path, one, np.full_like(one, np.nan, dtype="float32")
