"""Elastic training whose workers are lost and return, and restarts from a checkpoint.

    python benchmarks/elasticity.py --events 60 --backends torch,tensorflow,jax
    python benchmarks/elasticity.py --part restarts --restarts 3

Three workers train under `fit` with Adam, batch normalization, AUC, a global batch that
does not divide and a smaller last one. Every 5 to 15 seconds one of them, the chief
included, is killed, stopped (SIGSTOP) or cut off from the network; it returns a few
seconds later. On JAX the full batches do divide, as others are computed unsplit there.

At the end weights, `History` and the number of steps are compared with those of one
device. The time of an event is that until the end of the next step in the new group.

Beside it, kills of a worker with `keras-strategies launch --max-restarts` and
`BackupAndRestore`, and with `torch.distributed.run` and the same model by hand: both
restart all workers from a checkpoint of each epoch.
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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import BACKENDS, RESULTS, Results
from page import write_page

HERE = Path(__file__).parent

WORKERS = 3
ROWS = 86
#: Seconds between steps.
PACE = 0.05
KINDS = {"kill": "killed", "stop": "stopped (SIGSTOP)", "cut": "cut off"}
#: Seconds until a worker returns.
AWAY = {"kill": (1.0, 3.0), "stop": (3.0, 6.0), "cut": (4.0, 8.0)}
#: Torch 2.13: `--standalone` would give restarted workers the addresses of lost ones.
NEW_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
#: Seconds for processes to start and for training to end.
PATIENCE = 120.0
TOLERANCE = 1e-4


def batch_size(backend: str) -> int:
    """Rows of a global batch; the last one has fewer."""
    return 24 if backend == "jax" else 25


# --- One process --------------------------------------------------------------


def data() -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    y = (x[:, :1] + 0.3 * x[:, 1:2] + rng.normal(size=(ROWS, 1)) / 2 > 0).astype("f4")
    return x, y


def make_model() -> Any:
    import keras

    keras.utils.set_random_seed(11)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(6, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, "sigmoid"),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 300, 0.5)
    auc = keras.metrics.AUC(num_thresholds=20, name="auc")
    model.compile(keras.optimizers.Adam(rate), "binary_crossentropy", metrics=[auc])
    return model


def reporter(folder: Path, strategy: Any) -> Any:
    """A callback that writes a line for each finished step, and ends training."""
    import keras

    class Reporter(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            self.log = (folder / f"{os.getpid()}.steps").open("a")

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            time.sleep(PACE)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            elastic = strategy.workers.elastic
            number = 0
            if elastic is not None:
                number = elastic.membership.generation.number
            count = strategy.workers.group.count
            self.log.write(f"{time.monotonic()} {number} {count}\n")
            self.log.flush()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            # The decision of the chief is that of all.
            self.model.stop_training = (folder / "stop").exists()

    return Reporter()


def train(folder: Path, mode: str) -> None:
    """One worker of a training, "elastic" or "restart"."""
    settings = json.loads((folder / "settings.json").read_text())
    logging.basicConfig(format="%(asctime)s %(message)s")
    if settings["hosts"]:
        from harness import hosts

        index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
        hosts.enter(settings["hosts"][index])
    import keras
    import numpy as np

    import keras_strategies as ks
    from keras_strategies.types import Elastic

    options: dict[str, Any] = {
        "communication_options": ks.CommunicationOptions(
            timeout_seconds=settings["timeout"] if mode == "elastic" else 60
        )
    }
    if mode == "elastic":
        options["elastic"] = Elastic(min_workers=1, timeout_seconds=60)
    strategy = ks.MultiWorkerMirroredStrategy(**options)
    with strategy.scope():
        model = make_model()
    callbacks = [reporter(folder, strategy)]
    if mode == "restart":
        callbacks.append(keras.callbacks.BackupAndRestore(folder / "backup"))
    history = fit(model, 10**6, callbacks)
    np.savez(folder / f"{os.getpid()}.npz", *model.get_weights())
    found = {"history": history, "steps": int(model.optimizer.iterations)}
    write(folder / f"{os.getpid()}.json", json.dumps(found))


def fit(model: Any, epochs: int, callbacks: Any = ()) -> dict[str, list[float]]:
    import keras

    x, y = data()
    options = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    rows = batch_size(keras.backend.backend())
    history = model.fit(x, y, batch_size=rows, epochs=epochs, **options)
    return dict(history.history)


def write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


def train_by_hand(folder: Path) -> None:
    """One worker of `torch.distributed.run`: DDP, and a checkpoint of each epoch."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    x, y = map(torch.from_numpy, data())
    torch.manual_seed(11)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 6),
        torch.nn.Tanh(),
        torch.nn.BatchNorm1d(6),
        torch.nn.Linear(6, 1),
    )
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    path, epoch = folder / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        epoch = state["epoch"]
    loss_of = torch.nn.BCEWithLogitsLoss()
    with (folder / f"{os.getpid()}.steps").open("a") as log:
        while not (folder / "stop").exists():
            for rows in torch.arange(ROWS).split(batch_size("torch")):
                time.sleep(PACE)
                own = rows[rank::WORKERS]
                optimizer.zero_grad()
                loss_of(parallel(x[own]), y[own]).backward()
                optimizer.step()
                log.write(f"{time.monotonic()} 0 {WORKERS}\n")
                log.flush()
            epoch += 1
            if rank == 0:
                state = {"model": model.state_dict(), "epoch": epoch}
                torch.save({**state, "optimizer": optimizer.state_dict()}, f"{path}.p")
                os.replace(f"{path}.p", path)


# --- Elastic workers ----------------------------------------------------------


def steps_of(path: Path) -> list[tuple[float, int, int]]:
    """Time, generation and number of workers of each finished step of a process."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [line.split() for line in lines]
    return [(float(r[0]), int(r[1]), int(r[2])) for r in rows if len(r) == 3]


def wait_for(holds: Callable[[], Any], what: str) -> Any:
    until = time.monotonic() + PATIENCE
    while not (found := holds()):
        if time.monotonic() > until:
            raise SystemExit(f"waited {PATIENCE:g} s until {what}")
        time.sleep(0.01)
    return found


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
        write(
            folder / "settings.json",
            json.dumps({"timeout": options.timeout, "hosts": paths}),
        )
        self.processes: dict[int, Any] = {}
        self.everyone: list[Any] = []
        # When a worker returns, by its index.
        self._away: dict[int, tuple[float, str]] = {}
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.chiefs = 0
        #: Times of events, for a picture: seconds, kind, worker.
        self.events: list[tuple[float, str, int]] = []

    def start(self, index: int) -> None:
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": self.addresses}, "task": task}
        arguments = "--train", str(self._folder), "--mode", "elastic"
        process = self._forker.start(
            self._folder / f"{len(self.everyone)}-{index}.log",
            __file__,
            *arguments,
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
        while len(self.events) < events:
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
        self.events.append((begin, kind, victim))
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


# --- Restarts from a checkpoint -----------------------------------------------


def restarts(name: str, command: list[str], kills: int, seed: int) -> list[float]:
    """Seconds from kills of a worker to the next step after the restart."""
    rng = random.Random(seed)
    found: list[float] = []
    with tempfile.TemporaryDirectory() as path:
        folder, output = Path(path), Path(path, "output")
        write(folder / "settings.json", json.dumps({"timeout": 1, "hosts": []}))
        with (
            output.open("w") as file,
            subprocess.Popen(
                [*command, path],
                env={**os.environ, **NEW_STORES, "OMP_NUM_THREADS": "1"},
                stdout=file,
                stderr=file,
            ) as process,
        ):
            try:
                for _ in range(kills):
                    found.append(_restart(name, folder, rng))
                    print(f"{name}: {found[-1]:.2f} s", file=sys.stderr, flush=True)
            except SystemExit:
                print(output.read_text()[-4000:], file=sys.stderr)
                raise
            finally:
                process.terminate()
    return found


def _restart(name: str, folder: Path, rng: random.Random) -> float:
    """Kills a worker; seconds until the next step."""
    known: set[Path] = set()

    def training() -> list[Path]:
        """The logs of new workers, when all of them train."""
        logs = [path for path in folder.glob("*.steps") if path not in known]
        return logs if sum(bool(steps_of(path)) for path in logs) == WORKERS else []

    workers = wait_for(training, f"the workers of {name} train")
    time.sleep(rng.uniform(1, 3))
    known |= set(folder.glob("*.steps"))
    begin = time.monotonic()
    os.kill(int(rng.choice(sorted(workers)).stem), signal.SIGKILL)
    again = wait_for(training, f"{name} trains again")
    for path in known:
        path.unlink()
    return min(steps_of(path)[0][0] for path in again) - begin


def restart_commands(kills: int) -> dict[str, list[str]]:
    """What starts workers again from a checkpoint."""
    launch = ["-m", "keras_strategies", "launch", "--grace-seconds", "1", "--workers"]
    launch += [str(WORKERS), "--max-restarts", str(kills), __file__]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    torchrun += [str(WORKERS), "--max-restarts", str(kills), "--monitor-interval=0.1"]
    python = sys.executable
    return {
        "keras-strategies launch --max-restarts": [
            *(python, *launch, "--mode", "restart", "--train")
        ],
        "torch.distributed.run": [python, *torchrun, __file__, "--by-hand"],
    }


# --- Results ------------------------------------------------------------------


def _times(seconds: list[float]) -> str:
    if not seconds:
        return "-"
    return f"{statistics.median(seconds):.2f} s, {max(seconds):.2f} s"


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table: median and worst time."""
    kinds = list(KINDS.values())
    lines = [
        f"| | events | {' | '.join(kinds)} | steps | difference |",
        "|---|---|" + "---|" * (len(kinds) + 2),
    ]
    for backend in (each for each in BACKENDS if each in results):
        found = results[backend]
        cells = [_times(found["seconds"][kind]) for kind in KINDS]
        events = sum(map(len, found["seconds"].values()))
        lines.append(
            f"| elastic, {backend} | {events} | {' | '.join(cells)} | "
            f"{found['steps']} | {found['difference']:.0e} |"
        )
    for name, seconds in results.get("restarts", {}).items():
        lines.append(
            f"| restart, `{name}` | {len(seconds)} | {_times(seconds)} | | | | |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--events", type=int, default=60, help="over all backends")
    parser.add_argument("--interval", default="5,15", help="seconds between events")
    parser.add_argument("--kinds", default="kill,kill,stop,cut,cut")
    parser.add_argument("--part", choices=("all", "soak", "restarts"), default="all")
    parser.add_argument("--restarts", type=int, default=3, help="kills of each way")
    parser.add_argument("--timeout", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    for name in ("--measure", "--train", "--mode", "--by-hand"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
    if options.train:
        train(Path(options.train), options.mode)
    elif options.by_hand:
        train_by_hand(Path(options.by_hand))
    elif options.measure:
        print(json.dumps(soak(options)))
    else:
        _measure_all(options)


def _measure_all(options: argparse.Namespace) -> None:
    known = Results(options.output / "elasticity.json")
    if options.part != "restarts":
        _measure_soak(options, known)
    if options.part != "soak":
        _measure_restarts(options, known)
    print(table(known.values))
    # It has a folder with the name of another benchmark.
    sys.path.remove(str(HERE.parent / "tests"))
    write_page(options.output)


def _measure_soak(options: argparse.Namespace, known: Results) -> None:
    backends = [each for each in options.backends.split(",") if each]
    for backend in backends:
        events = str(-(-options.events // len(backends)))
        command = [sys.executable, __file__, "--measure", backend, "--events", events]
        command += ["--interval", options.interval, "--seed", str(options.seed)]
        command += ["--timeout", str(options.timeout), "--kinds", options.kinds]
        process = subprocess.run(
            command,
            env={**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        known.put(backend, json.loads(process.stdout.splitlines()[-1]))


def _measure_restarts(options: argparse.Namespace, known: Results) -> None:
    os.environ["KERAS_BACKEND"] = "torch"
    found: dict[str, list[float]] = {}
    for name, command in restart_commands(options.restarts).items():
        found[name] = restarts(name, command, options.restarts, options.seed)
        # What is known is not lost if the other does not end in time.
        known.put("restarts", {**known.values.get("restarts", {}), **found})


if __name__ == "__main__":
    main()
