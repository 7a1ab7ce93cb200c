"""Control plane of connected workers: rendezvous, agreement, heartbeats.

The engines (XLA, Gloo, NCCL, TensorFlow's collectives) move tensors, but do not report
which worker is missing or silent and at which step it was. So workers first connect to
a small hub in the chief's process, the same on every backend, with messages of
`multiprocessing.connection`. They exchange addresses, from which the engine is started,
compare versions and settings, and send heartbeats. No tensor of a step is sent this
way.

`membership.py` forms a new group when workers are lost or added.
"""

from keras_strategies.cluster.group.worker_group import (
    FAILURE_GRACE,
    LostWorker,
    WorkerGroup,
    current_group,
)

__all__ = ["FAILURE_GRACE", "LostWorker", "WorkerGroup", "current_group"]
