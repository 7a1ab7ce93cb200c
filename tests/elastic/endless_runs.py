"""Trainings of elastic workers that run until they are told to end."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from elastic import elastic_until_stopped
from elastic.elastic_until_stopped import fit, make_model
from harness.forker import Forked, Forker
from harness.hosts import Hosts
from harness.processes import TIMEOUT, assert_gone, wait_until

import keras_strategies as ks
from keras_strategies.cluster.resolvers.local_processes import free_addresses

WORKERS = 3


class States:
    """What the workers have written into a folder."""

    def __init__(self, folder: Path, workers: int = WORKERS):
        self.folder = folder
        self.workers = workers

    def of(self, index: int) -> tuple[int, int, int]:
        """Generation, number of workers, and steps of a worker."""
        path = self.folder / f"{index}.state"
        return tuple(json.loads(path.read_text())) if path.exists() else (-1, 0, 0)

    def are_together(self, workers: set[int]) -> bool:
        """Whether these workers, and no others, have taken steps together."""
        found = [self.of(index) for index in sorted(workers)]
        return {each[:2] for each in found} == {(found[0][0], len(workers))}

    def assert_like_one_device(self, tolerance: float = 1e-5) -> float:
        """Fails if weights or histories differ from those of one device.

        Args:
            tolerance: float, of weights; histories have 1e-5.

        Returns:
            float, the largest difference of a weight.
        """
        histories = {
            index: json.loads(file.read_text())
            for index in range(self.workers)
            if (file := self.folder / f"{index}.json").exists()
        }
        epochs = len(next(iter(histories.values()))["loss"])
        largest = 0.0
        with ks.OneDeviceStrategy("cpu:0").scope():
            model = make_model()
        expected = fit(model, epochs)
        for index, history in histories.items():
            assert history.keys() == expected.keys()
            for name, values in expected.items():
                np.testing.assert_allclose(history[name], values, 1e-4, 1e-5)
            with np.load(self.folder / f"{index}.npz") as file:
                pairs = zip(file.values(), model.get_weights(), strict=True)
                for found, other in pairs:
                    np.testing.assert_allclose(found, other, 0, tolerance)
                    largest = max(largest, float(np.abs(found - other).max()))
        return largest


class Run:
    """The processes of a training."""

    def __init__(self, forker: Forker, folder: Path, hosts: Hosts | None):
        self.states = States(folder)
        self._forker, self._hosts = forker, hosts
        self.addresses = free_addresses(WORKERS)
        if hosts is not None:
            self.addresses = [f"{address}:4711" for address in hosts.addresses]
        self._all: list[Forked] = []
        self.workers = [self._start(index) for index in range(WORKERS)]

    def _start(self, index: int) -> Forked:
        folder, number = self.states.folder, len(self._all)
        script = folder / f"script{number}.py"
        enter = self._hosts.enter(index) if self._hosts is not None else ""
        code = Path(elastic_until_stopped.__file__).read_text()
        first = "from __future__ import annotations"
        script.write_text(code.replace(first, f"{first}\n{enter}"))
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": self.addresses}, "task": task}
        log, variables = folder / f"{number}-{index}.log", {"OMP_NUM_THREADS": "1"}
        variables["TF_CONFIG"] = json.dumps(config)
        if self._hosts is not None:
            # A worker that is cut off gives up soon after it is given up.
            variables["SILENCE"] = "10"
        self._all.append(self._forker.start(log, str(script), str(folder), **variables))
        return self._all[-1]

    def start_again(self, index: int) -> None:
        """Starts a worker again, whose process was killed."""
        self.workers[index].wait(TIMEOUT)
        self.workers[index] = self._start(index)

    def wait_until_together(self, workers: set[int]) -> None:
        def together() -> bool:
            for worker in self.workers:
                assert worker.ended() is None, self.text()
            return self.states.are_together(workers)

        try:
            wait_until(together, f"{workers} train together")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from error

    def end(self, may_fail: int | None = None) -> None:
        """Ends the training, at its end.

        Args:
            may_fail: int, a worker that was disturbed in the last second.
        """
        (self.states.folder / "stop").touch()
        for index, worker in enumerate(self.workers):
            code, _ = worker.wait(TIMEOUT)
            assert code == 0 or index == may_fail, self.text()

    def text(self) -> str:
        return "\n".join(f"{each.log.name}: {each.text()}" for each in self._all)

    def close(self) -> None:
        for worker in self._all:
            worker.kill()
        assert_gone([worker.pid for worker in self._all])
