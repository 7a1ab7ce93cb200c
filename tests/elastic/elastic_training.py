"""Trainings of elastic workers that are lost and join, and what they end with.

    python elastic_training.py SETTINGS INDEX

`SETTINGS` is a JSON file. Index -1 trains on one device, without a strategy.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import importlib
import itertools
import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness.batches_ahead import prepare_ahead
from harness.forker import Forked, Forker
from harness.processes import TIMEOUT, lead_process, wait_until

BATCH_SIZE = 25
#: The last batch has 11 rows.
ROWS = 86
STEPS_PER_EPOCH = -(-ROWS // BATCH_SIZE)
#: Seconds that are enough for other workers to validate and end the epoch.
LAG = 3.0


#: Functions that JAX's runtime calls, one after the other, when it starts: for the
#: connection to the service, the devices of all workers, and the connections between
#: them. In each, other workers wait for the chief in the code of XLA.
ENGINE_STARTS = (
    "keras_strategies.engines.jax.compat.start_client",
    "jax.local_devices",
    "jax.make_array_from_single_device_arrays",
)


@dataclass(frozen=True)
class Kill:
    """A worker that kills itself.

    Args:
        index: int, its number.
        step: int, counted from 1 over all epochs.
        place: str, "begin" or "end" of the step, "layer" in the middle of it,
            "validation", or "epoch end"; "lead" kills the lead at the beginning;
            "exchange" is that before the exchange of the number `step`, counted from
            the start, when the others wait in it.
    """

    index: int
    step: int
    place: str = "layer"


@dataclass
class Settings:
    """What all processes of a training need; `folder` is for their files."""

    folder: str
    workers: int = 3
    epochs: int = 6
    #: Workers that kill themselves; those that are started later do not.
    kills: list[Any] = field(default_factory=list)
    #: Steps at which workers wait until a new one is about to join.
    waits: dict[str, int] = field(default_factory=dict)
    min_workers: int = 1
    #: The input: "arrays", "generator", "rows", a `ks.RowDataset`, or "loader", a
    #: shuffled `DataLoader` that augments.
    source: str = "arrays"
    #: Seconds to wait for `min_workers`.
    fails: float = TIMEOUT
    #: Steps between two snapshots of `Resume`; 0 without.
    every_steps: int = 0
    #: `steps_per_execution` of the workers.
    per_execution: int = 1
    #: The calls of `fit`; the last one is that of the kills.
    fits: int = 1
    #: Pairs of a worker and a step, whose result the worker has when it notices that
    #: another worker is lost; so it does not finish the step.
    unfinished: list[tuple[int, int]] = field(default_factory=list)
    #: A worker that waits for a loss, for `LAG` seconds, before it validates for the
    #: second time.
    lags: int | None = None
    #: Whether a layer computes from all rows, and is not split.
    mixes_rows: bool = False
    #: Whether the loss is of sorted rows, and is not split.
    sorts_rows: bool = False
    #: Seconds for which worker 1 traces its step after the first loss; the chief kills
    #: itself meanwhile.
    compiles: float = 0.0
    #: A function of `ENGINE_STARTS`, in which the chief kills itself when JAX's runtime
    #: starts for two workers; the other one waits for it then.
    starting: str = ""
    #: Seconds without heartbeats after which a worker is lost.
    timeout: float = TIMEOUT
    #: Whether batches are prepared ahead, as on accelerators.
    ahead: bool = False
    #: A model of `DRAWING`; empty for a small one.
    model: str = ""
    addresses: list[str] = field(default_factory=list)

    @classmethod
    def of_process(cls) -> tuple[Settings, int, bool, Path]:
        """Those of this process, its index, whether it is new, and their folder."""
        faulthandler.dump_traceback_later(TIMEOUT - 10)
        made = cls(**json.loads(Path(sys.argv[1]).read_text()))
        return made, int(sys.argv[2]), sys.argv[3] == "1", Path(made.folder)

    def strategy(self, index: int) -> Any:
        """That of a worker; that of one device has the random numbers of workers."""
        import keras_strategies as ks

        if index < 0:
            return ks.OneDeviceStrategy("cpu:0")
        return ks.MultiWorkerMirroredStrategy(
            communication_options=ks.CommunicationOptions(timeout_seconds=self.timeout),
            elastic=ks.Elastic(self.min_workers, timeout_seconds=self.fails),
        )


class ElasticCluster:
    """The processes of one training.

    Args:
        forker: starts them.
        settings: `Settings`.
        script: str, the path of the script of each process.
    """

    def __init__(self, forker: Forker, settings: Settings, script: str = __file__):
        from keras_strategies.cluster.resolvers.local_processes import free_addresses

        self.folder = Path(settings.folder)
        self.folder.mkdir(exist_ok=True)
        settings.addresses = free_addresses(settings.workers)
        settings.kills = [vars(kill) for kill in settings.kills]
        self._forker, self._script = forker, script
        self._settings = settings
        self._path = self.folder / "settings.json"
        self._path.write_text(json.dumps(vars(settings)))
        self.all: list[Forked] = []
        self.processes: dict[int, Forked] = {}

    def start(self, index: int, *, is_new: bool = False) -> None:
        number = len(self.all)
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": self._settings.addresses}, "task": task}
        environment = {"OMP_NUM_THREADS": "1"}
        if index >= 0:
            environment["TF_CONFIG"] = json.dumps(config)
        log = self.folder / f"{number}-{index}.log"
        arguments = str(self._path), str(index), str(int(is_new))
        process = self._forker.start(log, self._script, *arguments, **environment)
        self.all.append(process)
        self.processes[index] = process

    def start_new(self, *indices: int) -> None:
        for index in indices:
            self.start(index, is_new=True)

    def await_kills(self, *indices: int) -> None:
        """Waits until each of these workers has killed itself, in this order."""
        for index in indices:
            [code] = self._codes(self.processes.pop(index))
            assert code in (-signal.SIGKILL, 128 + signal.SIGKILL), self.text()

    def await_errors(self, *indices: int) -> str:
        """Waits until these workers have ended by an error; returns what all print."""
        for index in indices:
            assert self._codes(self.processes.pop(index)) == [1], self.text()
        return self.text()

    def _codes(self, *processes: Forked) -> list[int]:
        until = time.monotonic() + TIMEOUT
        while not all(each.ended() for each in processes):
            assert time.monotonic() < until, self.text()
            time.sleep(0.02)
        return [process.wait(TIMEOUT)[0] for process in processes]

    def await_end_of_lead(self) -> None:
        """Waits until another training can begin at the address of worker 0."""
        host, _, port = self._settings.addresses[0].rpartition(":")

        def is_free() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex((host, int(port))) != 0

        wait_until(is_free, "the lead has ended")

    def results(self) -> dict[int, Any]:
        """What the workers have at the end of training."""
        assert not any(self._codes(*self.processes.values())), self.text()
        return {index: read_results(self.folder, index) for index in self.processes}

    def like_one_device(self) -> tuple[dict[int, Any], Any]:
        """The results of workers with the weights of one device, and its own."""
        from harness.training import ADAM_TOLERANCE

        found = self.results()
        expected = found.pop(-1)
        for each in found.values():
            for mine, other in zip(each["weights"], expected["weights"], strict=True):
                np.testing.assert_allclose(mine, other, ADAM_TOLERANCE, ADAM_TOLERANCE)
        return found, expected

    def text(self) -> str:
        return "\n".join(f"{each.log.name}: {each.text()}" for each in self.all)

    def close(self) -> None:
        for process in self.all:
            process.kill()


def read_results(folder: Path, index: int) -> dict[str, Any]:
    found = json.loads((folder / f"results{index}.json").read_text())
    with np.load(folder / f"results{index}.npz") as file:
        found["weights"] = [file[f"arr_{i}"] for i in range(len(file.files))]
    return dict(found)


def data() -> tuple[Any, Any, Any]:
    """The rows of all trainings: inputs, targets and weights."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    y = (x[:, :1] + 0.3 * x[:, 1:2] > 0).astype("float32")
    return x, y, rng.uniform(0.5, 1.5, ROWS).astype("float32")


def _generator(arrays: Any) -> Any:
    while True:
        for start in range(0, ROWS, BATCH_SIZE):
            yield tuple(array[start : start + BATCH_SIZE] for array in arrays)


def sorted_rows_loss(y_true: Any, y_pred: Any) -> Any:
    """A loss of each row that depends on all rows of the batch."""
    from keras import ops

    difference = ops.sort(y_pred, axis=0) - ops.sort(y_true, axis=0)
    return ops.mean(difference**2, axis=-1) + ops.mean((y_true - y_pred) ** 2, axis=-1)


class Reads:
    """Counts the rows of `x` that this process reads in training, in `count`."""

    def __init__(self) -> None:
        self.count = 0

    def array(self, x: Any) -> Any:
        """The array, which counts the rows that are read."""
        reads = self

        class Counted(np.ndarray):
            def __getitem__(self, index: Any) -> Any:
                found = np.asarray(self)[index]
                reads.count += len(found)
                return found

        return x.view(Counted)

    def in_steps(self) -> None:
        """Counts what enters the steps of TensorFlow, whose datasets have tensors."""
        from keras_strategies.engines.tensorflow.data_parallel import step_function

        step_on = step_function.StepFunction._step_on

        def counted(step: Any, batch: Any, spec: Any) -> Any:
            if step._kind == "train":
                self.count += len(step_function.own_part(batch)[0])
            return step_on(step, batch, spec)

        step_function.StepFunction._step_on = counted  # type: ignore[method-assign]

    def loader(self, arrays: Any) -> Any:
        """A `DataLoader` of rows with noise of NumPy and Torch."""
        import keras
        import torch
        from torch.utils.data import DataLoader, Dataset

        reads = self

        class Noisy(Dataset):
            def __len__(self) -> int:
                return len(arrays[0])

            def __getitem__(self, i: int) -> Any:
                reads.count += 1
                noise = 0.1 * np.random.rand() + 0.1 * float(torch.rand(()))
                x, *others = (each[i] for each in arrays)
                return (x + np.float32(noise), *others)

        if keras.backend.backend() != "torch":
            # Keras seeds it on Torch only.
            torch.manual_seed(1)
        return DataLoader(Noisy(), BATCH_SIZE, shuffle=True)

    def dataset(self, arrays: Any) -> Any:
        """A `ks.RowDataset` with another order in each epoch."""
        import keras_strategies as ks

        reads = self

        class Rows(ks.RowDataset):
            def __init__(self) -> None:
                super().__init__()
                self.epoch = 0

            def __len__(self) -> int:
                return STEPS_PER_EPOCH

            def on_epoch_end(self) -> None:
                self.epoch += 1

            def num_rows(self, index: int) -> int:
                return min(BATCH_SIZE, ROWS - index * BATCH_SIZE)

            def get_rows(self, index: int, start: int, stop: int) -> Any:
                reads.count += stop - start
                order = np.random.default_rng(self.epoch).permutation(ROWS)
                own = order[index * BATCH_SIZE :][start:stop]
                return tuple(array[own] for array in arrays)

        return Rows()


def await_newcomer(strategy: Any, folder: Path, step: int) -> None:
    """Waits until a new worker waits at the chief, has joined, or was refused."""
    waiting, workers = folder / f"waiting{step}", strategy.workers

    def is_there() -> bool:
        membership = workers.actions.membership
        members = set(membership.generation.members)
        new = {int(path.name[3:].split("-")[0]) for path in folder.glob("new*")}
        is_refused = any(folder.glob("failed*"))
        rows = membership.client.status()["workers"]
        is_waiting = any(row["waits"] for row in rows)
        return is_waiting or bool(new & members) or is_refused

    if workers.is_chief:
        wait_until(is_there, "a worker joins")
        waiting.touch()
    wait_until(waiting.exists, "a worker joins")


def notice_loss_after_steps(actions: Any, is_meant: Any) -> None:
    """Makes a worker notice the loss of another one with the result of a step.

    Args:
        actions: `ElasticActions`.
        is_meant: callable that returns whether the current step is such a step.
    """
    step = actions.step

    def step_with_loss(model: Any, kind: str, take: Any) -> Any:
        group = actions.membership.group

        def take_and_notice() -> Any:
            result = take()
            if kind == "train" and actions.membership.group is group and is_meant():
                wait_until(lambda: group.loss() is not None, "a worker is lost")
                group.check()
            return result

        return step(model, kind, take_and_notice)

    actions.step = step_with_loss


def compile_slowly(folder: Path, index: int, seconds: float) -> None:
    """Called in a trace after the first loss, on the chief and on worker 1."""
    compiling = folder / "compiling"
    if index == 0:
        wait_until(compiling.exists, "worker 1 compiles")
        os.kill(os.getpid(), signal.SIGKILL)
    compiling.touch()
    time.sleep(seconds)


def die_in_start(membership: Any, name: str) -> None:
    """Makes this worker kill itself in a function, if there are two workers."""
    module_name, _, attribute = name.rpartition(".")
    module = importlib.import_module(module_name)
    original = getattr(module, attribute)

    def start(*args: Any, **kwargs: Any) -> Any:
        if membership.group.count == 2:
            time.sleep(1.0)  # The other one begins to wait.
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(module, attribute, start)


def die_in_exchange(number: int) -> None:
    """Makes this worker kill itself instead of an exchange of values with others."""
    from keras_strategies.cluster.group.worker_group import WorkerGroup

    exchange, numbers = WorkerGroup.begin_gather, itertools.count(1)

    def exchange_or_die(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == number:
            time.sleep(0.5)  # The others begin to wait.
            os.kill(os.getpid(), signal.SIGKILL)
        return exchange(*args, **kwargs)

    WorkerGroup.begin_gather = exchange_or_die  # type: ignore[method-assign]


def kills_of(settings: Settings, index: int, is_eager: bool) -> list[Kill]:
    """The kills of one worker, as far as its steps are eager."""
    kills = [Kill(**each) for each in settings.kills if each["index"] == index]
    if is_eager:
        return kills
    # A layer of a compiled step is not called in it.
    return [
        dataclasses.replace(kill, place="begin") if kill.place == "layer" else kill
        for kill in kills
    ]


def main() -> None:
    try:
        train()
    except Exception:
        folder = Path(json.loads(Path(sys.argv[1]).read_text())["folder"])
        (folder / f"failed{sys.argv[2]}").touch()
        raise


def train() -> None:
    import keras
    from harness.drawing_models import DRAWING

    import keras_strategies as ks

    settings, index, is_new, folder = Settings.of_process()
    is_eager = keras.backend.backend() == "torch"
    mine = [] if is_new else kills_of(settings, index, is_eager)
    for kill in mine:
        if kill.place == "exchange":
            die_in_exchange(kill.step)
    strategy = settings.strategy(index)
    if settings.ahead and index >= 0:
        prepare_ahead(strategy)
    step = 0

    def die(place: str) -> None:
        if place == "begin" and Kill(index, step, "lead") in mine:
            os.kill(lead_process(settings.addresses[0]), signal.SIGKILL)
        if any(kill.step == step and kill.place == place for kill in mine):
            os.kill(os.getpid(), signal.SIGKILL)

    if index >= 0 and not is_new:
        elastic_actions = strategy.workers.actions
        notice_loss_after_steps(
            elastic_actions, lambda: [index, step] in settings.unfinished
        )
        if settings.starting and index == 0:
            die_in_start(elastic_actions.membership, settings.starting)

    class Gate(keras.layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            if is_eager:
                die("layer" if training else "validation")
            elif settings.compiles and index >= 0 and strategy.workers.group.count == 2:
                compile_slowly(folder, index, settings.compiles)
            return x + keras.ops.mean(x, 0) if settings.mixes_rows else x

    if not settings.mixes_rows:
        # Its code is not Keras's.
        ks.row_wise(Gate)

    keras.utils.set_random_seed(11)
    with strategy.scope():
        hidden = [keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization()]
        if settings.model:
            hidden = DRAWING[settings.model]()
        last = [keras.layers.Dropout(0.3), keras.layers.Dense(1, "sigmoid")]
        model = keras.Sequential([keras.Input((4,)), *hidden, Gate(), *last])
        auc = keras.metrics.AUC(num_thresholds=20, name="auc")
        model.compile(
            keras.optimizers.Adam(0.03),
            sorted_rows_loss if settings.sorts_rows else "binary_crossentropy",
            weighted_metrics=[auc],
            steps_per_execution=settings.per_execution if index >= 0 else 1,
        )
    trained = 0

    class Steps(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            reads.count = 0  # Without the rows by which data are compared.

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            nonlocal step
            step = epoch * STEPS_PER_EPOCH

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            nonlocal step
            step = step // STEPS_PER_EPOCH * STEPS_PER_EPOCH + batch + 1
            die("begin")
            if str(step) in settings.waits and index >= 0 and not is_new:
                await_newcomer(strategy, folder, step)

        def on_test_begin(self, logs: Any = None) -> None:
            if index == settings.lags and step == 2 * STEPS_PER_EPOCH:
                group = strategy.workers.group
                until = time.monotonic() + LAG
                while group.loss() is None and time.monotonic() < until:
                    time.sleep(0.02)

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not is_eager:
                die("validation")

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal trained
            trained += 1
            die("end")

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            die("epoch end")

    x, y, weights = rows = data()
    reads = Reads()
    arguments: dict[str, Any] = {"x": reads.array(x), "y": y, "sample_weight": weights}
    arguments["batch_size"] = BATCH_SIZE
    if settings.source == "generator":
        arguments = {"x": _generator(rows), "steps_per_epoch": STEPS_PER_EPOCH}
    elif settings.source == "loader":
        arguments = {"x": reads.loader(rows)}
    elif settings.source == "rows":
        arguments = {"x": reads.dataset(rows)}
    elif keras.backend.backend() == "tensorflow" and index >= 0:
        reads.in_steps()
    if is_new:
        (folder / f"new{index}-{os.getpid()}").touch()
    for _ in range(settings.fits - 1):
        model.fit(x, y, batch_size=BATCH_SIZE, verbose=0)
    callbacks = [
        Steps(),
        keras.callbacks.CSVLogger(folder / ("one.csv" if index < 0 else "log.csv")),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.05),
    ]
    if settings.every_steps:
        directory = folder / ("one" if index < 0 else "snapshots")
        callbacks.append(ks.callbacks.Resume(directory, settings.every_steps, None))
    history = model.fit(
        **arguments,
        epochs=settings.epochs,
        verbose=2 if index >= 0 else 0,
        validation_data=(x[:41], y[:41]),
        validation_batch_size=BATCH_SIZE,
        callbacks=callbacks,
    )
    np.savez(folder / f"results{index}.npz", *model.get_weights())
    found = {"history": history.history, "trained": trained, "read": reads.count}
    (folder / f"results{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
