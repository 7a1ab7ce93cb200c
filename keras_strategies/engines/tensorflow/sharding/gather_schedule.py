"""When a program gathers shards: shortly before each use, once more for gradients.

TensorFlow runs an operation as soon as its inputs are there, so a program would gather
all variables at its start, and gradients would hold them until they have been computed.
Here a gather waits for the first use of the second last one, and operations of the
backward pass get a gather of their own. As in ZeRO-3 (Rajbhandari et al., 2020), a
device then has the gathered values of a few layers at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.gradients import without_recording
from keras_strategies.engines.tensorflow.compat.graphs import (
    add_control_input,
    replace_input,
)
from keras_strategies.engines.tensorflow.data_parallel.graph_copies import GraphCopy
from keras_strategies.engines.tensorflow.sharding.variables_in_shards import (
    VariableInShards,
)

#: Operations whose results gradients may use in place of a gathered value. They are
#: computed again too.
_FORMS = frozenset(
    ["Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "Transpose"]
)
#: Operations of a gather.
_OF_GATHER = frozenset(["ConcatV2", "Identity"])
#: The number of gathers that may be under way before the first one is used.
_AHEAD = 2


@dataclass(frozen=True)
class _Gather:
    """A gathered variable on a replica.

    Args:
        replica_id: int, the number of the local replica.
        variable: the variable.
        device: the replica's, as TensorFlow names it.
        value: tensor of the graph.
        version: the variable's, when it was read.
    """

    replica_id: int
    variable: VariableInShards
    device: str
    value: Any
    version: int


@dataclass(frozen=True)
class _Use:
    """The reads of a gather, and the first operation that needs it."""

    reads: list[Any]
    first: Any


class GatherSchedule:
    """The gathers of one layer call in a program."""

    def __init__(self) -> None:
        self._gathers: list[_Gather] = []

    def add(
        self, replica_id: int, variable: VariableInShards, device: str, value: Any
    ) -> None:
        """Adds a gather of a replica's forward pass."""
        gather = _Gather(replica_id, variable, device, value, variable.version)
        self._gathers.append(gather)

    def order(self) -> None:
        """Delays the gathers of the forward pass, after it has been traced."""
        if not self._gathers:
            return
        numbers = _numbers(self._gathers[0].value.graph)
        for own in self._by_replica().values():
            uses = []
            for gather in own:
                found = _uses(gather.value, _forms(gather.value))
                if found:
                    first = min(found, key=lambda op: numbers[op.name])
                    uses.append(_Use(_reads(gather.value), first))
            _delay(uses, numbers, None)

    def gather_again(self, start: int, begins: Mapping[int, Any]) -> None:
        """Gives the backward pass gathers of its own, after it has been traced.

        Args:
            start: int, the number of its first operation in the graph.
            begins: by replica, an operation that it begins after.
        """
        if not self._gathers:
            return
        numbers = _numbers(self._gathers[0].value.graph)
        for replica_id, own in self._by_replica().items():
            uses = []
            for gather in own:
                # A variable that has been assigned since has another value now.
                if gather.version == gather.variable.version:
                    use = _with_own_gather(gather, numbers, start)
                    uses += [] if use is None else [use]
            _delay(uses, numbers, begins.get(replica_id))

    def _by_replica(self) -> dict[int, list[_Gather]]:
        found: dict[int, list[_Gather]] = {}
        for gather in self._gathers:
            found.setdefault(gather.replica_id, []).append(gather)
        return found


def _with_own_gather(
    gather: _Gather, numbers: Mapping[str, int], start: int
) -> _Use | None:
    """Replaces a gathered value in the backward pass; None if it is not used there."""
    forms = [op for op in _forms(gather.value) if numbers[op.name] < start]
    values = [gather.value, *(op.outputs[0] for op in forms)]
    uses = {
        id(value): [op for op in value.consumers() if numbers.get(op.name, -1) >= start]
        for value in values
    }
    every = [op for found in uses.values() for op in found]
    if not every:
        return None
    with without_recording(), gather.value.graph.as_default():
        again = gather.variable.value_on(gather.device)
        copy = GraphCopy(gather.device)
        copy.set(gather.value, again)
        with tf.device(gather.device):
            copy.add(forms)
    for value in values:
        for op in uses[id(value)]:
            for i, given in enumerate(op.inputs):
                if given is value:
                    replace_input(op, i, copy.of(value))
    first = min(every, key=lambda op: numbers[op.name])
    return _Use(_reads(again), first)


def _delay(uses: Sequence[_Use], numbers: Mapping[str, int], begin: Any) -> None:
    """Makes gathers wait for uses of earlier ones.

    Operations are numbered in an order in which they can run. A gather waits for an
    operation with a lower number than those that use it, so nothing waits for itself.
    """
    stages: dict[int, list[_Use]] = {}
    for use in uses:
        stages.setdefault(numbers[use.first.name], []).append(use)
    firsts = [stages[number][0].first for number in sorted(stages)]
    for i, number in enumerate(sorted(stages)):
        before = firsts[i - _AHEAD] if i >= _AHEAD else begin
        if before is not None:
            for use in stages[number]:
                for read in use.reads:
                    add_control_input(read, before)


def _forms(value: Any) -> list[Any]:
    """Operations that only bring a value into another form, in their order."""
    found: list[Any] = []
    for op in value.consumers():
        if op.type in _FORMS and op.inputs[0] is value and _is_alone(op):
            found += [op, *_forms(op.outputs[0])]
    return found


def _is_alone(op: Any) -> bool:
    """Whether the other inputs of an operation are constants."""
    return all(each.op.type == "Const" for each in list(op.inputs)[1:])


def _uses(value: Any, forms: Sequence[Any]) -> list[Any]:
    """The operations that use a value in any form."""
    names = {op.name for op in forms}
    values = [value, *(op.outputs[0] for op in forms)]
    return [op for each in values for op in each.consumers() if op.name not in names]


def _reads(value: Any) -> list[Any]:
    """The reads of the shards of a gathered value."""
    found, waiting = [], [value.op]
    while waiting:
        op = waiting.pop()
        if op.type == "ReadVariableOp":
            found.append(op)
        elif op.type in _OF_GATHER:
            waiting += [each.op for each in op.inputs]
    return found


def _numbers(graph: Any) -> dict[str, int]:
    operations: Iterable[Any] = graph.get_operations()
    return {op.name: number for number, op in enumerate(operations)}
