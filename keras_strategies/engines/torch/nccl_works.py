"""NCCL's collectives: creation of their group, and whether they have succeeded.

`wait` of a collective of NCCL orders streams only: it returns at once and raises
nothing. When a worker is lost, the collective is aborted, and what follows it on the
stream reads partial sums. So the host waits for collectives and looks at their status
before it uses their results.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from keras_strategies.cluster.group import WorkerGroup
from keras_strategies.engines.torch.compat import set_timeout
from keras_strategies.errors import ClusterError

# `ProcessGroupNCCL` reads these when it is created.
_ENVIRONMENT = {
    # A failed collective is aborted, and `wait` raises. By default, and under torchrun,
    # Torch's watchdog ends the process, with a text that names no worker.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # The signal for a dump makes Torch's monitor end the processes of all ranks.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # The watchdog sleeps four times as long before it aborts, and the destructor of the
    # group waits for it.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# Seconds between two looks at a collective that is under way.
_INTERVAL = 5e-5


class NcclWorks:
    """Collectives whose results the host has not yet confirmed.

    Attributes:
        are_used: bool, whether results of some were used all the same.
    """

    def __init__(self) -> None:
        self._works: list[Any] = []
        self.are_used = False

    def use(self) -> None:
        """Lets the host go on with results that are confirmed later."""
        self.are_used = self.are_used or bool(self._works)

    def add(self, work: Any) -> None:
        """Adds a collective whose `wait` was called."""
        self._works.append(work)

    def confirm(self, group: WorkerGroup) -> None:
        """Waits until all collectives have succeeded.

        Raises:
            RuntimeError: if one has failed.
            WorkerError: if a worker is lost.
        """
        for work in self._works:
            while not work.is_completed():
                try:
                    group.check()
                except Exception:
                    self._works = []
                    raise
                # An interruption by the user leaves them as they are.
                time.sleep(_INTERVAL)
        works, self._works = self._works, []
        if works:
            # An aborted collective is complete too, with partial results. It is aborted
            # after the loss is known.
            group.check()
        for work in works:
            # Does not wait any more, and raises the error of a failed collective.
            work.wait()
        self.are_used = False


def create_nccl_group(
    store: Any, index: int, count: int, timeout: datetime.timedelta
) -> Any:
    """An NCCL process group that leaves the handling of errors to its caller."""
    options = dist.ProcessGroupNCCL.Options()
    set_timeout(options, timeout)
    with _set_environment():
        return dist.ProcessGroupNCCL(store, index, count, options)


def gpu_uuid(device: torch.device) -> str:
    """The identity of a GPU, among those of all machines; empty for another device."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid)


def check_own_gpus(uuids: Sequence[str]) -> None:
    """Checks that no GPU is that of several workers, which NCCL refuses.

    Args:
        uuids: for each worker the identity of its GPU; empty for another device.

    Raises:
        ClusterError: with the workers that share one.
    """
    for uuid in dict.fromkeys(filter(None, uuids)):
        workers = [index for index, found in enumerate(uuids) if found == uuid]
        if len(workers) > 1:
            raise ClusterError(
                f"Workers {', '.join(map(str, workers))} all compute on the GPU "
                f"{uuid}, and NCCL needs a GPU for each worker. Set a different "
                "CUDA_VISIBLE_DEVICES for each process of a machine, pass `devices` "
                "to the strategy, or start them with a launcher that sets LOCAL_RANK. "
                "To share a GPU all the same, exchange values by Gloo: "
                '`CommunicationOptions(implementation="RING")`.'
            )


@contextlib.contextmanager
def _set_environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
