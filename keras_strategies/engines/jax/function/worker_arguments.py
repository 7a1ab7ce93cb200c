"""Arguments of a call on all workers.

A compiled function is one program over the replicas of all workers, so workers exchange
the shapes of their arguments before the call. Components with the same shape on all
replicas, or with other numbers of rows only, become one array, sharded over the
devices; other components are gathered and replicated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies.engines.jax.array_placement import spans_processes
from keras_strategies.engines.jax.function.call_arguments import (
    CallArguments,
    UnevenValues,
    as_array,
    is_array,
    number_or_array,
)
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.errors import InvalidArgumentError, WorkerError
from keras_strategies.values import (
    DistributedValues,
    PerReplica,
    flatten,
    map_structure,
)


def gather_arguments(
    workers: JaxCommunicator, structure: Any, name: str, own: bool
) -> CallArguments:
    """The arguments of the replicas of all workers; a collective call.

    Args:
        workers: the workers.
        structure: this worker's arguments.
        name: str, the name of the function, for messages.
        own: bool, whether arrays are components of this worker's only replica, which
            are not wrapped in `PerReplica`.
    """
    leaves = [_prepared(leaf, workers, own) for leaf in flatten(structure)]
    descriptions = [_description(leaf) for leaf in leaves]
    message = json.dumps(descriptions)
    with workers.exchange():
        found = workers.group.gather_values(f"the call of {name}", message)
    if any(each != message for each in found):
        every = [json.loads(each) for each in found]
        _check_arguments(every, name)
        leaves = _promoted(leaves, every, workers)
        descriptions = [_description(leaf) for leaf in leaves]
        if any(description[0] == "parts" for description in descriptions):
            with workers.exchange():
                every = workers.group.gather_values(
                    "the shapes of arguments", descriptions
                )
    else:
        every = [descriptions] * len(found)
    uneven = [
        i
        for i, description in enumerate(descriptions)
        if description[0] == "parts" and _differ(every, i)
    ]
    for i in list(uneven):
        kinds = [kind for own in every for kind in own[i][1]]
        if len({(dtype, len(shape), *shape[1:]) for shape, dtype in kinds}) == 1:
            rows = [shape[0] for shape, _ in kinds]
            leaves[i] = UnevenValues(leaves[i].values, rows)
            uneven.remove(i)
    for i, values in zip(
        uneven, _gathered(workers, leaves, every, uneven), strict=True
    ):
        leaves[i] = PerReplica(values)
    rest = iter(leaves)
    gathered = map_structure(lambda _: next(rest), structure)
    return CallArguments(gathered, workers.replica_counts.total)


def _prepared(leaf: Any, workers: JaxCommunicator, own: bool) -> Any:
    """A leaf, with the components of replicas as a `DistributedValues` of arrays."""
    if isinstance(leaf, DistributedValues):
        values = [number_or_array(value) for value in leaf.values if _is_data(value)]
        if len(values) < len(leaf.values):
            raise InvalidArgumentError(
                "With several workers, components of distributed values must be "
                f"numbers or arrays. Received: {leaf!r}"
            )
        return type(leaf)(values)
    if not is_array(leaf):
        return leaf
    array = as_array(leaf)
    if workers.replica_counts.count > 1 or spans_processes(array):
        return array
    # Arrays of datasets and of `run` are committed to the replica's device.
    if own or (isinstance(array, jax.Array) and array.committed):
        return PerReplica([array])
    return array


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_data(value: Any) -> bool:
    return is_array(value) or _is_number(value)


def _description(leaf: Any) -> list[Any]:
    """The description of an argument that workers exchange."""
    if isinstance(leaf, DistributedValues):
        return ["parts", [[list(v.shape), str(v.dtype)] for v in leaf.values]]
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return ["array", list(leaf.shape), str(leaf.dtype)]
    if _is_number(leaf):
        return ["number", leaf]
    # All workers trace the same program, so forms have to be equal.
    return ["other"]


def _check_arguments(every: Sequence[Any], name: str) -> None:
    """Raises if the workers' arguments differ in kinds, shapes or dtypes of arrays."""
    first, *others = (
        [each if each[0] == "array" else each[0] for each in descriptions]
        for descriptions in every
    )
    for other, kinds in enumerate(others, 1):
        if kinds != first:
            raise WorkerError(
                f"Workers call {name!r} with different arguments: worker 0 with "
                f"{first}, worker {other} with {kinds}. Only components of "
                "distributed values may differ between workers; pass everything else "
                "equally on all workers."
            )


def _promoted(
    leaves: Sequence[Any], every: Sequence[Any], workers: JaxCommunicator
) -> list[Any]:
    """The leaves, with numbers that differ between workers as components."""
    found = list(leaves)
    for i, leaf in enumerate(leaves):
        if any(descriptions[i] != every[0][i] for descriptions in every) and _is_number(
            leaf
        ):
            found[i] = PerReplica(
                [number_or_array(leaf)] * workers.replica_counts.count
            )
    return found


def _differ(every: Sequence[Any], i: int) -> bool:
    """Whether components of an argument differ in shape or dtype."""
    kinds = [kind for descriptions in every for kind in descriptions[i][1]]
    return any(kind != kinds[0] for kind in kinds)


def _gathered(
    workers: JaxCommunicator,
    leaves: Sequence[Any],
    every: Sequence[Any],
    which: list[int],
) -> list[list[Any]]:
    """The components of some arguments from all replicas, on all workers."""
    if not which:
        return []
    own = [np.asarray(value) for i in which for value in leaves[i].values]
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in own)
    sizes = [
        sum(_nbytes(kind) for i in which for kind in descriptions[i][1])
        for descriptions in every
    ]
    carried = np.frombuffer(data, np.uint8)
    received = np.asarray(workers.gather_rows(carried, sizes)).tobytes()
    start = 0
    found: list[list[Any]] = [[] for _ in which]
    for descriptions in every:
        for values, i in zip(found, which, strict=True):
            for kind in descriptions[i][1]:
                shape, dtype = tuple(kind[0]), jax.numpy.dtype(kind[1])
                count = int(np.prod(shape, dtype=np.int64))
                part = np.frombuffer(received, dtype, count, start)
                values.append(part.reshape(shape))
                start += _nbytes(kind)
    return found


def _nbytes(kind: Any) -> int:
    shape, dtype = kind
    return int(np.prod(shape, dtype=np.int64)) * int(jax.numpy.dtype(dtype).itemsize)
