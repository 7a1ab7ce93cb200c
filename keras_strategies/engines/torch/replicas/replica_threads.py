"""Threads of replicas, shared by all strategies of the process, until it ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import torch

from keras_strategies.devices import Device
from keras_strategies.engines.torch.devices import DeviceName, torch_device
from keras_strategies.engines.torch.replicas.thread_state import CallerState
from keras_strategies.keras_compat.thread_state import thread_state, with_thread_state

if TYPE_CHECKING:
    from keras_strategies.engines.torch.replicas.thread_collectives import (
        ThreadCollectives,
    )


# Idle threads, of which a computation takes one for each replica. Each has its own
# kernel threads and workspaces, tens of megabytes: with threads for each strategy,
# memory would grow in a notebook, where every run of a cell creates one. Operations on
# lists are atomic.
_idle: list[ThreadPoolExecutor] = []
_numbers = itertools.count()
# None of them runs in a forked process.
os.register_at_fork(after_in_child=_idle.clear)


@contextlib.contextmanager
def _taken(count: int) -> Iterator[list[ThreadPoolExecutor]]:
    """Threads for one computation, in the same order each time."""
    found = [_one() for _ in range(count)]
    try:
        yield found
    finally:
        _idle.extend(reversed(found))


def _one() -> ThreadPoolExecutor:
    try:
        return _idle.pop()
    except IndexError:
        return ThreadPoolExecutor(1, f"replica-{next(_numbers)}")


class _Kernels(threading.local):
    # The number of kernel threads set for this thread.
    count = 0


_kernels = _Kernels()


class ReplicaThreads:
    """A thread for each replica while a computation lasts.

    The only replica of a process runs on the thread of the caller.

    Args:
        devices: the device of each replica. CPU replicas share the cores that
            torch may use, so that their kernels do not compete.
    """

    def __init__(self, devices: Sequence[Device]):
        self._devices = tuple(devices)
        self._torch_devices = [torch_device(device) for device in devices]
        self._names = list(map(DeviceName, self._torch_devices))
        cpus = sum(device.kind == "cpu" for device in devices)
        self._kernels = max(1, torch.get_num_threads() // cpus) if cpus else 0

    def run(
        self,
        tasks: Sequence[Callable[[], Any]],
        collectives: ThreadCollectives,
    ) -> list[Any]:
        """Runs one task on each thread and returns the results in order.

        The first exception stops the other replicas at their next collective, and is
        raised when all have ended. An interrupt of this thread is handled likewise.
        """
        state = thread_state()
        if len(self._devices) == 1:
            # The caller would only wait for a separate thread, and there are no turns.
            try:
                with with_thread_state({**state, "torch_device": self._names[0]}):
                    return [task() for task in tasks]
            except BaseException as error:
                collectives.fail(error)
                raise

        def replica(task: Callable[[], Any], replica_id: int) -> Any:
            own = {**state, "torch_device": self._names[replica_id]}
            try:
                collectives.start(replica_id)
                with with_thread_state(own):
                    return task()
            except BaseException as error:
                collectives.fail(error)
                raise
            finally:
                collectives.finish(replica_id)

        caller = CallerState(self._torch_devices)
        kernels = self._kernels
        if kernels and collectives.is_sequential:
            kernels = torch.get_num_threads()

        def on_thread(task: Callable[[], Any], replica_id: int) -> Any:
            if kernels and _kernels.count != kernels:
                torch.set_num_threads(kernels)
                _kernels.count = kernels
            device = self._torch_devices[replica_id]
            return caller.run(device, lambda: replica(task, replica_id))

        with _taken(len(tasks)) as threads:
            futures: list[Future[Any]] = [
                thread.submit(on_thread, task, i)
                for i, (thread, task) in enumerate(zip(threads, tasks, strict=True))
            ]
            try:
                wait(futures)
            except BaseException as error:
                collectives.fail(error)
                wait(futures)
                raise
        if collectives.error is not None:
            raise collectives.error
        return [future.result() for future in futures]
