"""The exception tree.

Every class is also a built-in exception, so that code written for
`tf.distribute`, which catches `ValueError` and `RuntimeError`, keeps working::

    KerasStrategiesError
    ├── InvalidArgumentError (ValueError)      an invalid argument
    │   ├── UnknownDeviceError                 a device that does not exist
    │   ├── DuplicateDeviceError               a device named twice
    │   ├── BatchError                         input that cannot be split by rows
    │   ├── GatherError                        values that cannot be concatenated
    │   ├── LayoutError                        a layout that does not fit a variable
    │   └── ClusterError                       an invalid cluster description
    ├── InvalidTypeError (TypeError)           an argument of the wrong type
    ├── CheckpointError (ValueError)           checkpoint missing or of another model
    │   └── DamagedCheckpointError             a file that is truncated or was changed
    ├── InputError (RuntimeError)              input that cannot be read again
    ├── OutOfRangeError (IndexError)           an iterator without another batch
    ├── ContextError (RuntimeError)            a call in the wrong context
    │   ├── MixedStrategyError                 two strategies at once
    │   ├── ModelScopeError                    a model created under another strategy
    │   ├── BackendInUseError                  too late to change the devices
    │   └── BackendError                       unsupported by this backend
    └── ReplicaError (RuntimeError)            replicas out of sync
        ├── ReplicaMismatchError               not the same collectives on each
        ├── ReplicaAbortedError                stopped because another one failed
        ├── WorkerError                        a worker process lost
        ├── WorkersChanged                     workers of a custom loop lost or joined
        ├── PeerError                          a request failed in another process
        ├── ClusterTimeoutError                no answer from a process in time
        ├── ServerLostError                    a parameter server and its variables lost
        ├── SnapshotError                      a snapshot that cannot be written or read
        └── ClosureCancelledError              cancelled scheduled work

The last line of a printed error is the command that prints its causes and what to do,
from the troubleshooting page: "See `keras-strategies explain BatchError`".
"""

from __future__ import annotations

import re

EXPLAIN = "keras-strategies explain"
_COMMAND = re.compile(rf"\s*\bSee `({EXPLAIN} \w+)`")


class KerasStrategiesError(Exception):
    """Base class of every exception that this package raises itself."""

    # Raised in a function that AutoGraph converts, it is not wrapped in TensorFlow's
    # `StagingError`.
    ag_pass_through = True

    @property
    def text(self) -> str:
        """str, the message without its last line, to quote in another."""
        return _COMMAND.sub("", super().__str__())

    def __str__(self) -> str:
        # A message that quotes another error ends with the command of that one, which
        # is the cause.
        quoted = _COMMAND.findall(super().__str__())
        command = quoted[0] if quoted else f"{EXPLAIN} {self._entry()}"
        return f"{self.text}\nSee `{command}`"

    @classmethod
    def _entry(cls) -> str:
        # A subclass that is defined elsewhere has its base's entry.
        return next(c.__name__ for c in cls.__mro__ if c.__module__ == __name__)


class InvalidArgumentError(KerasStrategiesError, ValueError):
    """An argument has an invalid value or type."""


class InvalidTypeError(KerasStrategiesError, TypeError):
    """An argument has an invalid type."""


class UnknownDeviceError(InvalidArgumentError):
    """A device was named that this machine does not have."""


class DuplicateDeviceError(InvalidArgumentError):
    """A device was named for two replicas."""


class BatchError(InvalidArgumentError):
    """Input cannot be split over replicas by its rows."""


class GatherError(InvalidArgumentError):
    """Values of the replicas cannot be concatenated or stacked."""


class LayoutError(InvalidArgumentError):
    """A variable cannot be sharded over the devices of a mesh as its layout says."""


class ClusterError(InvalidArgumentError):
    """A cluster description, or the task of this process in it, is invalid."""


class CheckpointError(KerasStrategiesError, ValueError):
    """A checkpoint is missing or was saved from another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file is truncated or modified."""


class InputError(KerasStrategiesError, RuntimeError):
    """Input cannot be read, or not a second time."""


class OutOfRangeError(KerasStrategiesError, IndexError):
    """An iterator has no more batches.

    On TensorFlow it is also a `tf.errors.OutOfRangeError`.
    """


class ContextError(KerasStrategiesError, RuntimeError):
    """A call was made in a context that does not allow it."""


class MixedStrategyError(ContextError):
    """Two strategies were used inside one another."""


class ModelScopeError(ContextError):
    """A model is used under a strategy, but was not created in its scope."""


class BackendInUseError(ContextError):
    """Devices cannot change after the backend has initialized them."""


class BackendError(ContextError):
    """The installed backend does not support the request."""


class ReplicaError(KerasStrategiesError, RuntimeError):
    """The replicas of a computation are out of sync."""


class ReplicaMismatchError(ReplicaError):
    """Replicas did not make the same collective calls."""


class ReplicaAbortedError(ReplicaError):
    """A replica was stopped because another one failed.

    Internal: the caller gets the error of the replica that failed.
    """


class WorkerError(ReplicaError):
    """A worker process ended without a result."""


class WorkersChanged(ReplicaError):
    """Elastic workers were lost or have joined during a custom loop.

    `strategy.run`, a `ks.function` around it, and every other call in which workers
    exchange values raise it on all workers, after they have formed their next group.
    Variables, including those of optimizers, metrics and seed generators, have their
    values after the last finished step; an interrupted step must be repeated. On a
    worker that joins, its first step raises the error.

    Args:
        text: str, the message.
        step: int, the number of finished steps.
        lost: tuple of int, the numbers of the workers that were lost.
        joined: tuple of int, the numbers of the workers that have joined.
        workers: int, the number of workers in the new group.

    Example:

    >>> step, batches = 0, batches_from(0)
    >>> while step < steps:
    ...     try:
    ...         train_step(next(batches))
    ...         step += 1
    ...     except ks.WorkersChanged as change:
    ...         step, batches = change.step, batches_from(change.step)
    """

    def __init__(
        self,
        text: str,
        *,
        step: int = 0,
        lost: tuple[int, ...] = (),
        joined: tuple[int, ...] = (),
        workers: int = 1,
    ):
        super().__init__(text)
        self.step, self.lost, self.joined = step, lost, joined
        self.workers = workers


class PeerError(ReplicaError):
    """A process of the cluster failed to serve a request."""


class ClusterTimeoutError(ReplicaError):
    """A process of the cluster did not answer in time."""


class ServerLostError(ReplicaError):
    """A parameter server died, and its variables cannot be restored."""


class SnapshotError(ReplicaError):
    """A parameter server cannot write or read its snapshots."""


class ClosureCancelledError(ReplicaError):
    """Scheduled work was cancelled because other work failed."""
