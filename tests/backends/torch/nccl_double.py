"""A process group that behaves as NCCL's when a worker is lost, between CPUs.

A collective of NCCL is asynchronous. `wait` orders what follows behind it and raises
nothing; a failed collective ends when its group is aborted, and leaves a part of the
sum in its tensors. Here Gloo computes, and `wait` blocks until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from keras_strategies.engines.torch import worker_collectives
from keras_strategies.engines.torch.compat import create_gloo_group, gloo_device
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator

#: Added to each element that a failed collective leaves behind.
PARTIAL = 1000.0


class Work:
    """One collective.

    Args:
        begin: begins that of Gloo.
        results: the tensors that it writes.
        aborted: set when the group is aborted.
    """

    def __init__(
        self,
        begin: Callable[[], Any],
        results: list[torch.Tensor],
        aborted: threading.Event,
    ):
        self._aborted, self._ended = aborted, threading.Event()
        self._results = results
        self._error: RuntimeError | None = None
        threading.Thread(target=self._run, args=(begin(),), daemon=True).start()

    def _run(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            if all(tensor.is_floating_point() for tensor in self._results):
                # The kernel of NCCL runs until the abort.
                self._aborted.wait()
                for tensor in self._results:
                    tensor += PARTIAL
            else:
                # Numbers of rows, which Gloo sends.
                self._error = error
        self._ended.set()

    def is_completed(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()
        if self._error is not None:
            raise self._error


class Group:
    """A process group with asynchronous collectives.

    Args:
        gloo: the group that computes.
    """

    def __init__(self, gloo: Any):
        self._gloo = gloo
        self._aborted = threading.Event()

    def _begin(self, name: str, results: list[torch.Tensor], *given: Any) -> Work:
        if self._aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted.")
        collective = getattr(self._gloo, name)
        return Work(lambda: collective(*given), results, self._aborted)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Work:
        return self._begin("allreduce", tensors, tensors, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        return self._begin("broadcast", tensors, tensors, options)

    def _allgather_base(self, joined: torch.Tensor, own: torch.Tensor) -> Work:
        return self._begin("_allgather_base", [joined], joined, own)

    def abort(self) -> None:
        self._aborted.set()
        self._gloo.abort()


def install() -> None:
    """Makes workers of this process use such groups in place of NCCL's."""

    def create(store: Any, index: int, count: int, timeout: Any) -> Group:
        device = gloo_device("127.0.0.1")
        return Group(create_gloo_group(store, index, count, timeout, device))

    worker_collectives.create_nccl_group = create
    # Counts are exchanged on CPUs.
    TorchCommunicator._uses_nccl = lambda self, device, dtype=None: True  # type: ignore
