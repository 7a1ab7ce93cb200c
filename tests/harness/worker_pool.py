"""Worker processes that call functions under a strategy, for many tests in turn."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing.connection as connections
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from harness import devices as devices_of_tests
from harness.forker import Forker

START_SECONDS = 120.0
CALL_SECONDS = 180.0
# A worker that is lost has to be noticed in less than a test's time.
SILENCE_SECONDS = 60.0


class WorkerPool:
    """Workers of one cluster, which make the same calls one after the other.

    Args:
        forker: what starts them.
        workers: int, how many processes.
        devices: int, devices of each.
        kind: str, what they are: `"cpu"`, or a kind of `harness.devices`.
        implementation: str, the `CommunicationImplementation` of their values.
    """

    def __init__(
        self,
        forker: Forker,
        workers: int,
        devices: int = 1,
        kind: str = "cpu",
        implementation: str = "AUTO",
    ):
        self.workers, self.devices = workers, devices
        self._key = os.urandom(16)
        self._folder = tempfile.TemporaryDirectory()
        with connections.Listener(("127.0.0.1", 0), authkey=self._key) as listener:
            host, port = listener.address
            self._processes = forker.start_workers(
                [Path(self._folder.name) / f"worker{i}.log" for i in range(workers)],
                __file__,
                *(host, str(port), self._key.hex(), implementation),
                **{devices_of_tests.VARIABLE: f"{kind}:{devices}"},
            )
            listener._listener._socket.settimeout(START_SECONDS)  # type: ignore[attr-defined]
            try:
                # All of them, before any is waited for: they wait for one another.
                lines = [self._accept(listener) for _ in range(workers)]
                found = [(self._started(line), line) for line in lines]
            except BaseException:
                self.close()
                raise
        self._lines = [line for _, line in sorted(found, key=lambda pair: pair[0])]

    def _accept(self, listener: connections.Listener) -> Any:
        try:
            return listener.accept()
        except OSError as error:
            raise AssertionError(f"A worker did not start:\n{self.log()}") from error

    def _started(self, line: Any) -> int:
        """The number of the worker at the other end, when it has met the others."""
        try:
            if line.poll(START_SECONDS):
                return int(line.recv())
        except EOFError:
            pass
        raise AssertionError(f"A worker did not start:\n{self.log()}")

    def cluster(self, devices: int) -> Cluster:
        """These workers with a strategy on the first devices of each."""
        assert devices <= self.devices
        return Cluster(self, devices)

    def call(
        self, devices: int, function: Callable[..., Any], args: tuple[Any, ...]
    ) -> list[Any]:
        """For each worker the traceback, empty without one, and what it returned."""
        call = cloudpickle.dumps((devices, function, args))
        until = time.monotonic() + CALL_SECONDS
        for line in self._lines:
            line.send_bytes(call)
        found = []
        for index, line in enumerate(self._lines):
            if not line.poll(max(0.0, until - time.monotonic())):
                raise AssertionError(
                    f"Worker {index} has not answered in {CALL_SECONDS:g} s."
                    f"\n{self.log()}"
                )
            try:
                found.append(cloudpickle.loads(line.recv_bytes()))
            except EOFError as error:
                raise AssertionError(f"Worker {index} died:\n{self.log()}") from error
        return found

    def log(self) -> str:
        """The end of what each worker has printed."""
        return "\n".join(process.text()[-3000:] for process in self._processes)

    def close(self) -> None:
        for line in getattr(self, "_lines", []):
            line.close()
        for process in self._processes:
            with contextlib.suppress(AssertionError):
                process.wait(15)
            process.kill()
        self._folder.cleanup()


@dataclass(frozen=True)
class Cluster:
    """Workers with one strategy.

    Args:
        pool: their processes.
        devices: int, how many devices of each worker the strategy has.
    """

    pool: WorkerPool
    devices: int

    @property
    def replicas(self) -> int:
        return self.pool.workers * self.devices

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls `function(strategy, *args)` on every worker.

        Returns:
            What the workers returned, in their order.

        Raises:
            AssertionError: with the traceback of each worker that raised.
        """
        problems, values = [], []
        for index, (error, value) in enumerate(self.outcomes(function, *args)):
            values.append(value)
            if error:
                problems.append(f"worker {index}:\n{error}")
        if problems:
            raise AssertionError("\n".join(problems))
        return values

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """For each worker the traceback, empty without one, and what it returned."""
        return self.pool.call(self.devices, function, args)


def _serve(host: str, port: str, key: str, implementation: str) -> None:
    import keras

    import keras_strategies as ks

    @functools.cache
    def strategy_on(count: int) -> Any:
        options = ks.CommunicationOptions(
            timeout_seconds=SILENCE_SECONDS, implementation=implementation
        )
        return ks.MultiWorkerMirroredStrategy(
            communication_options=options,
            devices=[f"{devices_of_tests.KIND}:{i}" for i in range(count)],
        )

    keras.config.disable_traceback_filtering()
    line = connections.Client((host, int(port)), authkey=bytes.fromhex(key))
    devices_of_tests.install()
    strategy_on(devices_of_tests.COUNT)
    line.send(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    while True:
        try:
            count, function, args = cloudpickle.loads(line.recv_bytes())
        except EOFError:
            return
        keras.utils.set_random_seed(20240229)
        try:
            outcome = ("", function(strategy_on(count), *args))
        except Exception:
            outcome = (traceback.format_exc(), None)
        line.send_bytes(cloudpickle.dumps(outcome))


if __name__ == "__main__":
    _serve(*sys.argv[1:])
