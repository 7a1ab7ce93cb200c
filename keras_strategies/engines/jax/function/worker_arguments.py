"""Arguments of a call that all workers make together.

A compiled function is one program on all workers, with the replicas of all of them. So
before the call, workers tell one another the shapes of their arguments. Components
that have one shape everywhere become one array, split over the devices; others are
exchanged, and every device gets all of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies.engines.jax.array_placement import is_spread
from keras_strategies.engines.jax.function.call_arguments import (
    Packed,
    as_array,
    is_array,
    number_or_array,
)
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.errors import InvalidArgumentError, WorkerError
from keras_strategies.values import (
    DistributedValues,
    PerReplica,
    flatten,
    map_structure,
)


def pack_with(workers: JaxWorkers, structure: Any, name: str, own: bool) -> Packed:
    """The arguments of all workers' replicas.

    Args:
        workers: the workers, each of which makes the call.
        structure: this worker's arguments.
        name: str, what is called, for messages.
        own: bool, whether arguments are those of a replica, so that on a worker with
            one replica, which has no wrappers, each array is that replica's.
    """
    leaves = [_prepared(leaf, workers, own) for leaf in flatten(structure)]
    facts = [_fact(leaf) for leaf in leaves]
    message = json.dumps(facts).encode()
    with workers.exchange():
        found = workers.group.gather(f"the call of {name}", message)
    if any(each != message for each in found):
        every = [json.loads(each) for each in found]
        _check_alike(every, name)
        leaves = _promoted(leaves, every, workers)
        facts = [_fact(leaf) for leaf in leaves]
        if any(fact[0] == "parts" for fact in facts):
            with workers.exchange():
                every = workers.group.gather_values("the shapes of arguments", facts)
    else:
        every = [facts] * len(found)
    uneven = [
        i for i, fact in enumerate(facts) if fact[0] == "parts" and _differ(every, i)
    ]
    for i, values in zip(
        uneven, _gathered(workers, leaves, every, uneven), strict=True
    ):
        leaves[i] = PerReplica(values)
    rest = iter(leaves)
    whole = map_structure(lambda _: next(rest), structure)
    return Packed(whole, workers.share.total)


def _prepared(leaf: Any, workers: JaxWorkers, own: bool) -> Any:
    """The leaf, as a `DistributedValues` of arrays where it is the replicas'."""
    if isinstance(leaf, DistributedValues):
        values = [number_or_array(value) for value in leaf.values if _is_data(value)]
        if len(values) < len(leaf.values):
            raise InvalidArgumentError(
                "Components that replicas of several workers get are numbers or "
                f"arrays. Received: {leaf!r}"
            )
        return type(leaf)(values)
    if not is_array(leaf):
        return leaf
    array = as_array(leaf)
    if workers.share.count > 1 or is_spread(array):
        return array
    # What datasets and `run` give is bound to the replica's device.
    if own or (isinstance(array, jax.Array) and array.committed):
        return PerReplica([array])
    return array


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_data(value: Any) -> bool:
    return is_array(value) or _is_number(value)


def _fact(leaf: Any) -> list[Any]:
    """What the other workers have to know of an argument."""
    if isinstance(leaf, DistributedValues):
        return ["parts", [[list(v.shape), str(v.dtype)] for v in leaf.values]]
    if isinstance(leaf, (jax.Array, np.ndarray)):
        return ["array", list(leaf.shape), str(leaf.dtype)]
    if _is_number(leaf):
        return ["number", leaf]
    return ["other"]


def _check_alike(every: Sequence[Any], name: str) -> None:
    """Raises if workers make another call, or one with other arrays."""
    for other, facts in enumerate(every):
        kinds = [fact if fact[0] == "array" else fact[0] for fact in facts]
        first = [fact if fact[0] == "array" else fact[0] for fact in every[0]]
        if kinds != first:
            raise WorkerError(
                f"Workers call {name!r} with different arguments: worker 0 with "
                f"{first}, worker {other} with {kinds}. What differs from worker to "
                "worker are the components of distributed values; all else is the "
                "same on all workers."
            )


def _promoted(
    leaves: Sequence[Any], every: Sequence[Any], workers: JaxWorkers
) -> list[Any]:
    """The leaves, with numbers that workers have others of as the replicas' own."""
    found = list(leaves)
    for i, leaf in enumerate(leaves):
        if any(facts[i] != every[0][i] for facts in every) and _is_number(leaf):
            found[i] = PerReplica([number_or_array(leaf)] * workers.share.count)
    return found


def _differ(every: Sequence[Any], i: int) -> bool:
    """Whether replicas' components of an argument have different shapes."""
    kinds = [kind for facts in every for kind in facts[i][1]]
    return any(kind != kinds[0] for kind in kinds)


def _gathered(
    workers: JaxWorkers, leaves: Sequence[Any], every: Sequence[Any], which: list[int]
) -> list[list[Any]]:
    """All replicas' components of some arguments, on all workers."""
    if not which:
        return []
    own = [np.asarray(value) for i in which for value in leaves[i].values]
    data = b"".join(np.ascontiguousarray(value).tobytes() for value in own)
    sizes = [
        sum(_nbytes(kind) for i in which for kind in facts[i][1]) for facts in every
    ]
    carried = np.frombuffer(data, np.uint8)
    whole = np.asarray(workers.gather_rows(carried, sizes)).tobytes()
    start = 0
    found: list[list[Any]] = [[] for _ in which]
    for facts in every:
        for values, i in zip(found, which, strict=True):
            for kind in facts[i][1]:
                shape, dtype = tuple(kind[0]), jax.numpy.dtype(kind[1])
                count = int(np.prod(shape, dtype=np.int64))
                part = np.frombuffer(whole, dtype, count, start)
                values.append(part.reshape(shape))
                start += _nbytes(kind)
    return found


def _nbytes(kind: Any) -> int:
    shape, dtype = kind
    return int(np.prod(shape, dtype=np.int64)) * int(jax.numpy.dtype(dtype).itemsize)
