"""Variables with shards on the devices of several workers.

A read gathers the shards of all workers: all of them read, in the same order. In `run`
a read is a `merge_call` of the replicas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow.replicas.replica_reads import replica_device
from keras_strategies.engines.tensorflow.sharding.shard_grid import ShardGrid
from keras_strategies.engines.tensorflow.sharding.variables_in_shards import (
    Creating,
    VariableInShards,
)
from keras_strategies.engines.tensorflow.workers.worker_collectives import (
    TensorFlowCommunicator,
)
from keras_strategies.runtime import context
from keras_strategies.runtime.state.cross_worker_values import AssignedValue


class VariableOverWorkers(VariableInShards):
    """A variable in shards, of which this process has a part.

    Args:
        like: `tf.Variable` with the value, which is not referenced.
        grid: the shards, with the devices of all workers.
        devices: dict from the number of a device of this process in the mesh to
            TensorFlow's name.
        creating: a context in which variables are created on a device.
        array: the value of a variable without one.
        path: str, the path of the Keras variable.
        workers: the workers, each of whose devices is a replica.
    """

    def __init__(
        self,
        like: tf.Variable,
        grid: ShardGrid,
        devices: Mapping[int, str],
        creating: Creating,
        array: np.ndarray | None,
        path: str,
        workers: TensorFlowCommunicator,
    ):
        #: What was assigned; None of a program, or once workers have compared it.
        self.assigned_value: AssignedValue | None = None
        #: Gathers the value, on the chief while it saves a model; else None.
        self.read_by_chief: Callable[[], Any] | None = None
        self.path = path
        self._workers = workers
        counts = workers.replica_counts
        # Each shard is sent by the first worker that has it.
        owners = [next(iter(split)) for split in map(_by_worker(counts), grid.holders)]
        self._sent = [
            [number for number, owner in enumerate(owners) if owner == worker]
            for worker in range(len(counts.by_worker))
        ]
        own = grid.within(counts.first, counts.count)
        super().__init__(like, own, devices, creating, array)

    def value_assigned(self, value: Any) -> None:
        self.assigned_value = None
        if value is not None and tf.executing_eagerly():
            self.assigned_value = AssignedValue(np.asarray(value))

    def value_on(self, device: str) -> None:
        """None: replicas have it from the device that takes part in collectives."""

    def gathered(self, device: str) -> Any:
        replica = context.current_replica()
        if replica is not None and replica_device() is not None:
            # In `run`: the replicas of a worker gather it once.
            value = replica.merge_call(lambda strategy: self.gather(self.home))
            with tf.device(device):
                return tf.identity(value)
        if self.read_by_chief is not None:
            return self.read_by_chief()
        return self.gather(device)

    def gather(self, device: str) -> Any:
        """The value; a call of all workers."""
        if tf.executing_eagerly():
            # The barrier names an absent worker; the collective would wait for it.
            self._workers.group.barrier(
                f"the read of {self.path!r}, which is sharded over the workers and is "
                "read by all of them at once"
            )
        shape = [
            length // count
            for length, count in zip(self.shape, self.grid.parts, strict=True)
        ]
        sent = self._sent[self._workers.group.index]
        with tf.device(self.home):
            rows = [tf.reshape(self.shards[number], [1, -1]) for number in sent]
            own = (
                tf.concat(rows, 0)
                if rows
                else tf.zeros([0, math.prod(shape)], self.dtype)
            )
            every = self._workers.gather_rows(own, [len(each) for each in self._sent])
            order = [number for each in self._sent for number in each]
            found = dict(zip(order, tf.unstack(every, len(order)), strict=True))
            parts = [tf.reshape(found[number], shape) for number in sorted(found)]
            value = self.grid.join(parts, tf.concat)
        with tf.device(device):
            return tf.identity(value)


def _by_worker(counts: Any) -> Any:
    """A function that lists the workers of some devices."""
    ends = np.cumsum(counts.by_worker)

    def workers(devices: Any) -> list[int]:
        return [int(np.searchsorted(ends, device, "right")) for device in devices]

    return workers
