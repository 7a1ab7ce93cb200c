"""Elastic training: workers are lost and return.

    python benchmarks/elasticity.py --events 60 --backends torch,tensorflow,jax

Three workers train under `fit` with Adam, batch normalization, AUC, a global batch that
does not divide and a smaller last one. Every 5 to 15 seconds one of them, the chief
included, is killed, stopped (SIGSTOP) or cut off from the network; it returns a few
seconds later. On JAX the full batches do divide, as others are computed unsplit there.

At the end weights, `History` and the number of steps are compared with those of one
device. The time of an event is that until the end of the next step in the new group.
`restarts.py` measures restarts from a checkpoint, which the table shows beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elastic_training import (
    PATIENCE,
    WORKERS,
    fit,
    make_model,
    step_log,
    steps_of,
    wait_for,
)
from measuring import BACKENDS, RESULTS, Results, names, run_script
from page import write_page
from tables import markdown_table

ROOT = Path(__file__).parents[1]
KINDS = {"kill": "killed", "stop": "stopped (SIGSTOP)", "cut": "cut off"}
#: Seconds until a worker returns.
AWAY = {"kill": (1.0, 3.0), "stop": (3.0, 6.0), "cut": (4.0, 8.0)}
TOLERANCE = 1e-4


def train(folder: Path) -> None:
    """One worker, which writes its weights, `History` and number of steps."""
    settings = json.loads((folder / "settings.json").read_text())
    logging.basicConfig(format="%(asctime)s %(message)s")
    if settings["hosts"]:
        from harness import hosts

        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        hosts.enter(settings["hosts"][index])
    import keras
    import numpy as np

    import keras_strategies as ks

    strategy = ks.MultiWorkerMirroredStrategy(
        communication_options=ks.CommunicationOptions(
            timeout_seconds=settings["timeout"]
        ),
        elastic=ks.Elastic(min_workers=1, timeout_seconds=60),
    )
    with strategy.scope():
        model = make_model()

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            # The decision of the chief is that of all.
            self.model.stop_training = (folder / "stop").exists()

    history = fit(model, 10**6, [step_log(folder, strategy), Stop()])
    np.savez(folder / f"{os.getpid()}.npz", *model.get_weights())
    found = {"history": history, "steps": int(model.optimizer.iterations)}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(found))


class Soak:
    """Elastic workers that are lost at random, and return."""

    def __init__(self, forker: Any, folder: Path, hosts: Any, options: Any):
        from keras_strategies.cluster.resolvers.local_processes import free_addresses

        self._forker = forker
        self._folder = folder
        self._hosts = hosts
        self._rng = random.Random(options.seed)
        self._kinds = options.kinds.split(",")
        self._interval = [float(each) for each in options.interval.split(",")]
        self.addresses = free_addresses(WORKERS)
        paths = []
        if hosts is not None:
            self.addresses = [f"{address}:4711" for address in hosts.addresses]
            paths = [f"/var/run/netns/{name}" for name in hosts.names]
        settings = {"timeout": options.timeout, "hosts": paths}
        (folder / "settings.json").write_text(json.dumps(settings))
        self.processes: dict[int, Any] = {}
        self.everyone: list[Any] = []
        # When a worker returns, by its index.
        self._away: dict[int, tuple[float, str]] = {}
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}

    def start(self, index: int) -> None:
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": self.addresses}, "task": task}
        process = self._forker.start(
            self._folder / f"{len(self.everyone)}-{index}.log",
            __file__,
            *("--train", str(self._folder)),
            TF_CONFIG=json.dumps(config),
            OMP_NUM_THREADS="1",
        )
        self.processes[index] = process
        self.everyone.append(process)

    def steps(self, index: int) -> list[tuple[float, int, int]]:
        return steps_of(self._folder / f"{self.processes[index].pid}.steps")

    def _ready(self) -> list[int]:
        """The workers that take part in training, in the newest generation."""
        last = {
            index: steps[-1][1]
            for index in self.processes
            if index not in self._away and (steps := self.steps(index))
        }
        newest = max(last.values(), default=0)
        return [index for index, number in last.items() if number == newest]

    def _check(self) -> None:
        for index, process in self.processes.items():
            if index not in self._away and process.ended() is not None:
                raise SystemExit(f"worker {index} has ended:\n{process.text()}")

    def run(self, events: int) -> None:
        for index in range(WORKERS):
            self.start(index)
        wait_for(lambda: len(self._ready()) == WORKERS, "all workers train")
        for _ in range(events):
            self._wait(self._rng.uniform(*self._interval))
            wait_for(self._are_two_ready, "two workers train")
            self._event()
        for index in list(self._away):
            self._return(index)
        wait_for(self._are_all_ready, "all workers are back")
        (self._folder / "stop").touch()
        for index, process in self.processes.items():
            code, _ = process.wait(PATIENCE)
            if code:
                raise SystemExit(f"worker {index}:\n{process.text()}")

    def _are_two_ready(self) -> bool:
        self._wait(0)
        return len(self._ready()) > 1

    def _are_all_ready(self) -> bool:
        self._check()
        return len(self._ready()) == WORKERS and all(
            self.steps(index)[-1][2] == WORKERS for index in range(WORKERS)
        )

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            for index, (due, _) in list(self._away.items()):
                if due < now:
                    self._return(index)
            self._check()
            if now >= until:
                return
            time.sleep(0.05)

    def _event(self) -> None:
        ready = self._ready()
        kinds = [kind for kind in self._kinds if kind != "cut"]
        if len(ready) == WORKERS and self._hosts is not None:
            # Of two workers, only that with the first one would continue.
            kinds = self._kinds
        kind, victim = self._rng.choice(kinds), self._rng.choice(ready)
        process = self.processes[victim]
        generation = self.steps(victim)[-1][1]
        begin = time.monotonic()
        if kind == "cut":
            self._hosts.cut(victim)
        else:
            number = signal.SIGKILL if kind == "kill" else signal.SIGSTOP
            os.kill(process.pid, number)
        others = [index for index in ready if index != victim]
        next_step = wait_for(
            lambda: min(
                (
                    seconds
                    for index in others
                    for seconds, number, _ in self.steps(index)[-50:]
                    if number > generation and seconds > begin
                ),
                default=None,
            ),
            f"training continues after worker {victim} was {KINDS[kind]}",
        )
        self.seconds[kind].append(next_step - begin)
        back = time.monotonic() + self._rng.uniform(*AWAY[kind])
        self._away[victim] = back, kind
        print(
            f"worker {victim} {KINDS[kind]}: {next_step - begin:.2f} s",
            file=sys.stderr,
            flush=True,
        )

    def _return(self, index: int) -> None:
        _, kind = self._away.pop(index)
        if kind == "kill":
            self.processes[index].wait(PATIENCE)
            self.start(index)
        elif kind == "stop":
            os.kill(self.processes[index].pid, signal.SIGCONT)
        else:
            self._hosts.plug(index)

    def print_state(self) -> None:
        """Prints the last steps and messages of all workers."""
        now = time.monotonic()
        print(f"now {now}, away {self._away}", file=sys.stderr)
        for index, process in self.processes.items():
            steps, text = self.steps(index)[-2:], process.text()[-4000:]
            print(
                f"worker {index}: {steps}, {process.ended()}\n{text}", file=sys.stderr
            )

    def difference(self) -> tuple[int, float]:
        """Steps, and the largest difference of weights and losses from one device."""
        import numpy as np

        import keras_strategies as ks

        found = [
            json.loads((self._folder / f"{process.pid}.json").read_text())
            for process in self.processes.values()
        ]
        epochs = len(found[0]["history"]["loss"])
        with ks.OneDeviceStrategy("cpu:0").scope():
            model = make_model()
        expected = fit(model, epochs)
        steps = int(model.optimizer.iterations)
        largest = 0.0
        for process, each in zip(self.processes.values(), found, strict=True):
            if each["steps"] != steps or each["history"].keys() != expected.keys():
                raise SystemExit(f"{each['steps']} steps instead of {steps}")
            with np.load(self._folder / f"{process.pid}.npz") as file:
                pairs = list(zip(file.values(), model.get_weights(), strict=True))
            pairs.append((np.array(each["history"]["loss"]), expected["loss"]))
            largest = max(
                largest, *(float(np.abs(a - np.asarray(b)).max()) for a, b in pairs)
            )
            # AUC counts predictions at thresholds, which rounding may cross.
            auc = np.abs(np.subtract(each["history"]["auc"], expected["auc"]))
            if np.mean(auc > TOLERANCE) > 0.01:
                raise SystemExit(f"AUC differs in {np.mean(auc > TOLERANCE):.0%}")
        if largest > TOLERANCE:
            raise SystemExit(f"weights or losses differ by {largest:g}")
        return steps, largest


@contextlib.contextmanager
def hosts_if_possible() -> Iterator[Any]:
    from harness import hosts

    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(hosts.connected_hosts(WORKERS))
        except hosts.NotPermittedError as error:
            print(f"no worker is cut off: {error}", file=sys.stderr)
            yield None


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the events by kind, steps, and the difference to one device."""
    from harness.forker import Forker

    with (
        tempfile.TemporaryDirectory() as folder,
        hosts_if_possible() as hosts,
        Forker() as forker,
    ):
        run = Soak(forker, Path(folder), hosts, options)
        try:
            run.run(options.events)
            steps, largest = run.difference()
        except SystemExit:
            run.print_state()
            raise
        finally:
            for process in run.everyone:
                process.kill()
    return {"seconds": run.seconds, "steps": steps, "difference": largest}


# --- Results ------------------------------------------------------------------


def _times(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.2f} s, {max(seconds):.2f} s"


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table: median and worst time."""
    header = ["", "events", *KINDS.values(), "steps", "difference"]
    rows = []
    for backend in (each for each in BACKENDS if each in results):
        found = results[backend]
        cells = [_times(found["seconds"][kind]) for kind in KINDS]
        events = sum(map(len, found["seconds"].values()))
        cells += [str(found["steps"]), f"{found['difference']:.0e}"]
        rows.append([f"elastic, {backend}", str(events), *cells])
    for name, seconds in results.get("restarts", {}).items():
        rows.append([f"restart, `{name}`", str(len(seconds)), _times(seconds)])
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", type=names, default=list(BACKENDS))
    parser.add_argument("--events", type=int, default=60, help="over all backends")
    parser.add_argument("--interval", default="5,15", help="seconds between events")
    parser.add_argument("--kinds", default="kill,kill,stop,cut,cut")
    parser.add_argument("--timeout", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train or options.measure:
        sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if options.train:
        train(options.train)
    elif options.measure:
        print(json.dumps(soak(options)))
    else:
        _measure_all(options)


def _measure_all(options: argparse.Namespace) -> None:
    known = Results(options.output / "elasticity.json")
    for backend in options.backends:
        events = str(-(-options.events // len(options.backends)))
        arguments = ["--measure", "--events", events, "--interval", options.interval]
        arguments += ["--timeout", str(options.timeout), "--kinds", options.kinds]
        arguments += ["--seed", str(options.seed)]
        known.put(backend, run_script(__file__, *arguments, backend=backend))
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
