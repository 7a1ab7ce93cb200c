"""The exception tree.

Every class is also a built-in exception, so that code written for
`tf.distribute`, which catches `ValueError` and `RuntimeError`, keeps working::

    KerasStrategiesError
    ├── InvalidArgumentError (ValueError)      an argument that cannot be right
    │   ├── UnknownDeviceError                 a device that does not exist
    │   ├── DuplicateDeviceError               a device named twice
    │   ├── BatchError                         input that cannot be split by rows
    │   ├── GatherError                        values that cannot be concatenated
    │   ├── LayoutError                        a variable that cannot be sharded so
    │   └── ClusterError                       a cluster that cannot be as described
    ├── InvalidTypeError (TypeError)           an argument of the wrong type
    ├── CheckpointError (ValueError)           a checkpoint missing or of another model
    │   └── DamagedCheckpointError             a file that is truncated or was changed
    ├── InputError (RuntimeError)              input that cannot be read again
    ├── OutOfRangeError (IndexError)           an iterator without another batch
    ├── ContextError (RuntimeError)            a call in the wrong context
    │   ├── MixedStrategyError                 two strategies at once
    │   ├── ModelScopeError                    a model made under another strategy
    │   ├── BackendInUseError                  too late to change the devices
    │   └── BackendError                       what this backend cannot do
    └── ReplicaError (RuntimeError)            replicas that no longer agree
        ├── ReplicaMismatchError               not the same collectives on each
        ├── ReplicaAbortedError                stopped because another one failed
        ├── WorkerError                        a process that ended without a result
        ├── PeerError                          another process could not do it
        ├── ClusterTimeoutError                a process that did not answer in time
        ├── ServerLostError                    a parameter server is gone for good
        ├── SnapshotError                      a snapshot that cannot be written or read
        └── ClosureCancelledError              scheduled work that was not done

The last line of a printed error is the address of its entry in the troubleshooting
page: `See docs/troubleshooting.md#batcherror`.
"""

from __future__ import annotations

import re

TROUBLESHOOTING = "docs/troubleshooting.md"
_ADDRESS = re.compile(rf"\s*\bSee ({re.escape(TROUBLESHOOTING)}#\w+)")


class KerasStrategiesError(Exception):
    """Base class of every exception that this package raises itself."""

    # Out of functions that `tf.function` rewrites it comes as it is, and not as
    # TensorFlow's `StagingError`.
    ag_pass_through = True

    @property
    def text(self) -> str:
        """str, the message without the address of its entry, to quote in another."""
        return _ADDRESS.sub("", super().__str__())

    def __str__(self) -> str:
        # A message that quotes another error ends with the address of that one, which
        # is the cause.
        quoted = _ADDRESS.findall(super().__str__())
        address = quoted[0] if quoted else f"{TROUBLESHOOTING}#{self._entry()}"
        return f"{self.text}\nSee {address}"

    @classmethod
    def _entry(cls) -> str:
        # A subclass that is defined elsewhere has its base's entry.
        return next(c.__name__ for c in cls.__mro__ if c.__module__ == __name__).lower()


class InvalidArgumentError(KerasStrategiesError, ValueError):
    """An argument has a value or a type that cannot be right."""


class InvalidTypeError(KerasStrategiesError, TypeError):
    """An argument is of a type that cannot be right."""


class UnknownDeviceError(InvalidArgumentError):
    """A device was named that this machine does not have."""


class DuplicateDeviceError(InvalidArgumentError):
    """One device was named for two replicas."""


class BatchError(InvalidArgumentError):
    """Input cannot be split over replicas by its rows."""


class GatherError(InvalidArgumentError):
    """Values of the replicas cannot be concatenated or stacked."""


class LayoutError(InvalidArgumentError):
    """A variable cannot be sharded over the devices of a mesh as its layout says."""


class ClusterError(InvalidArgumentError):
    """A cluster's description, or a task's place in it, cannot be right."""


class CheckpointError(KerasStrategiesError, ValueError):
    """A checkpoint is missing, or is of another model."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint's file is truncated, or has other bytes than were written."""


class InputError(KerasStrategiesError, RuntimeError):
    """Input cannot be read, or not once more."""


class OutOfRangeError(KerasStrategiesError, IndexError):
    """An iterator was asked for a batch after the last one.

    On TensorFlow it is also a `tf.errors.OutOfRangeError`.
    """


class ContextError(KerasStrategiesError, RuntimeError):
    """A call was made in a context that does not allow it."""


class MixedStrategyError(ContextError):
    """Two strategies were used inside one another."""


class ModelScopeError(ContextError):
    """A model is used under a strategy whose scope it was not made in."""


class BackendInUseError(ContextError):
    """Devices were to be changed after the backend had fixed them."""


class BackendError(ContextError):
    """The backend, in the version that is installed, cannot do what was asked for."""


class ReplicaError(KerasStrategiesError, RuntimeError):
    """The replicas of one computation no longer agree."""


class ReplicaMismatchError(ReplicaError):
    """Replicas did not make the same collective calls."""


class ReplicaAbortedError(ReplicaError):
    """A replica was stopped because another one failed.

    It never reaches the caller, who sees the error of the replica that failed.
    """


class WorkerError(ReplicaError):
    """A worker process ended, or was ended, without what it was started for."""


class PeerError(ReplicaError):
    """A process of the cluster could not do what it was asked for."""


class ClusterTimeoutError(ReplicaError):
    """A process of the cluster did not answer in time."""


class ServerLostError(ReplicaError):
    """A parameter server died, and what it held cannot be restored."""


class SnapshotError(ReplicaError):
    """A parameter server cannot write or read its snapshots."""


class ClosureCancelledError(ReplicaError):
    """Scheduled work was cancelled because other work had failed."""
