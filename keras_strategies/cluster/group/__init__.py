"""Control plane of connected workers: rendezvous, agreement, heartbeats.

The engines (XLA, Gloo, NCCL, TensorFlow's collectives) move tensors, but do not report
which worker is missing or silent and at which step it was. So workers first connect to
the lead (`keras_strategies/lead/`), the same on every backend, a process that worker 0
starts at its address. They exchange addresses, from which the engine is started,
compare versions and settings, and send heartbeats. No tensor of a step is sent this
way.

`membership.py` follows the generations of an elastic group.
"""

from keras_strategies.cluster.group.worker_group import (
    FAILURE_GRACE,
    WorkerGroup,
    current_group,
)

__all__ = ["FAILURE_GRACE", "WorkerGroup", "current_group"]
