"""Callback that resumes `fit` after the loss of all processes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn

import keras
import numpy as np

from keras_strategies.communication.communicator import Communicator, is_fixed
from keras_strategies.engines import get_engine
from keras_strategies.errors import ContextError, InvalidArgumentError
from keras_strategies.keras_compat.models import fit_position
from keras_strategies.keras_compat.models.fit_loop import set_initial_epoch
from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    set_rate,
    variable_rate,
)
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.runtime.state.model_values import (
    check_model,
    model_state,
    restore_model,
)
from keras_strategies.runtime.worker_batch import own_rows_of
from keras_strategies.timeline import recording
from keras_strategies.training.elastic.chief_callbacks import ChiefCallback
from keras_strategies.training.resume.callback_states import (
    appended_logs,
    callback_states,
    restore_callbacks,
)
from keras_strategies.training.resume.compiled_settings import (
    changed_settings,
    compiled_settings,
    warn_of_changes,
)
from keras_strategies.training.resume.input_position import (
    InputPosition,
    Point,
)
from keras_strategies.training.resume.snapshot_clock import SnapshotClock
from keras_strategies.training.resume.snapshot_files import SnapshotDirectory, parsed
from keras_strategies.training.resume.snapshot_writer import SnapshotWriter
from keras_strategies.training.saving.archives import check_stored
from keras_strategies.training.saving.stop_requests import StopRequests

#: Directories of the trainings that have ended in this process.
finished_directories: set[Path] = set()


class Resume(fit_position.OrderedCallback):
    """Resumes `fit` at its last snapshot after all of its processes were lost.

    The callback saves snapshots in the background. When the same script is started
    again, `fit` continues: finished epochs and steps are skipped, and training ends
    with the weights, the `History` and the logs of a run without interruption. The
    number of workers or replicas, the strategy and the backend may change in between.

    A snapshot contains the variables of the model, its optimizer, metrics and seed
    generators, the random numbers of the process, the position in the input, and the
    states of the other callbacks. Values are copied in memory between two steps; a
    thread writes them to a file, which replaces the oldest of two when it is complete.
    With several workers the chief writes and reads, and the others receive what it has
    read.

    Ctrl-C and SIGTERM end training after the step that is under way, on all workers
    after the same one, with a snapshot. A second Ctrl-C ends it at once.

    Data are compared with those of the snapshot. Settings of `compile` that the script
    has changed, such as the learning rate, are named in a warning, and count.

    Arrays that `fit` shuffles come in an order that is drawn from the seed of
    `keras.utils.set_random_seed` and is the same on every backend. Other input is
    repositioned by reading: datasets and loaders should shuffle with a seed.

    Args:
        directory: path of the folder of the snapshots, one for each `fit`; made if it
            does not exist.
        every_steps: int, steps between two snapshots; None for the time alone.
        every_seconds: float, seconds between two snapshots, or 100 times the pause
            that a snapshot makes, if that is longer; None for the steps alone.
        stream: str, for Python generators, which cannot be repositioned: `"skip"`
            drops as many batches after a restart as were trained on, `"continue"`
            trains on the batches that follow, `"raise"` raises an error in `fit`.

    Raises:
        ValueError: for arguments out of range. In `fit`, for a snapshot of another
            model or of other data, if both snapshots are damaged, or for a generator
            with `stream="raise"`.
        OSError: in `fit`, if the directory cannot be written to.

    Example:

    >>> resume = ks.callbacks.Resume("runs/1")
    >>> model.fit(x, y, epochs=20, callbacks=[stopping, resume])

    The state of a custom callback is saved if it has two methods:

    >>> class Counter(keras.callbacks.Callback):
    ...     def get_state(self):
    ...         return {"count": self.count}
    ...     def set_state(self, state):
    ...         self.count = state["count"]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        every_steps: int | None = None,
        every_seconds: float | None = 60,
        stream: Literal["raise", "skip", "continue"] = "raise",
    ):
        super().__init__()
        _check_arguments(every_steps, every_seconds, stream)
        self._files = SnapshotDirectory(directory)
        self._writer = SnapshotWriter(self._files)
        self._every_steps = every_steps
        self._every_seconds = math.inf if every_seconds is None else every_seconds
        self._stream = stream
        self._pauses: list[float] = []
        self._others: list[Any] = []
        self._epochs: Any = None
        self._opened: Any = None
        self._workers: Communicator | None = None
        self._beginning = contextlib.ExitStack()
        fit_position.order_callbacks()

    @property
    def pauses(self) -> tuple[float, ...]:
        """tuple of float, the seconds that each snapshot has stopped training."""
        return tuple(self._pauses)

    def wait(self) -> None:
        """Waits until the last snapshot is written."""
        self._writer.wait()

    # The order of callbacks

    def companion(self) -> keras.callbacks.Callback:
        return _First(self)

    def joined(self, others: list[Any], epochs: Any) -> None:
        self._others = [
            each.callback if isinstance(each, ChiefCallback) else each
            for each in others
        ]
        self._epochs = epochs

    def open(self) -> InputPosition:
        """Begins to follow the position in the input.

        Elastic workers call it before they join others.
        """
        strategy = self._strategy = strategy_of(self.model)
        workers = self._workers = None if strategy is None else strategy.workers
        self._check_use()
        # Shards on several workers are read by all of them together.
        self._shares = workers is not None and strategy.placement.mesh is not None
        self._clock = SnapshotClock(
            self._every_steps,
            self._every_seconds,
            workers.group if workers is not None and self._shares else None,
        )
        if self._is_chief:
            self._files.check_writable()
        self._writer = SnapshotWriter(self._files)
        self._position = InputPosition(
            self._epochs, self._stream, self._between_steps, own=own_rows_of(strategy)
        )
        self._settings = compiled_settings(self.model)
        self._changed: dict[str, Any] = {}
        self._requests = self._watch()
        self._stops = False
        self._last_point = Point()
        self._opened = self._epochs
        self._pauses = []
        # A snapshot in memory, and what is called when it is written.
        self._captured: tuple[dict[str, Any], Callable[[], None]] | None = None
        self._state: dict[str, Any] | None = None
        self._epoch = -1
        return self._position

    def _watch(self) -> StopRequests:
        """Begins to handle Ctrl-C and SIGTERM."""
        workers = self._workers
        # Elastic workers go on without one that ends; its chief saves by itself.
        group = workers.group if workers is not None and is_fixed(workers) else None
        numbers = (signal.SIGINT, signal.SIGTERM)
        requests = StopRequests(group, numbers, is_current=self._is_in_fit)
        if group is not None:
            requests.steps.resume()
            group.barrier("the begin of training with `Resume`")
        requests.watch()
        return requests

    def _is_in_fit(self, frame: Any) -> bool:
        """Whether a frame is below `fit` of the model."""
        while frame is not None:
            if (
                frame.f_code.co_name == "fit"
                and frame.f_locals.get("self") is self.model
            ):
                return True
            frame = frame.f_back
        return False

    @property
    def _is_chief(self) -> bool:
        return self._workers is None or self._workers.is_chief

    @property
    def _is_active(self) -> bool:
        return self._is_chief or self._shares

    @property
    def _is_new(self) -> bool:
        return self._workers is not None and self._workers.actions.is_new

    def begin(self) -> None:
        """Reads the snapshot, before all other callbacks begin."""
        if self._opened is None or self._opened is not self._epochs:
            self.open()
        if not self._is_new:
            self._state = self._read()
        if self._state is not None:
            fit_position.build_for_input(self.model, self._epochs)
            check_model(self.model, self._state["model"])
            self._point = Point(**self._state["point"])
            self._position.check(self._point)
            saved = self._state.get("settings", self._settings)
            self._changed = changed_settings(self._settings, saved)
            if self._is_chief:
                warn_of_changes(self._changed, self._settings)
            if self._is_chief:
                self._beginning.enter_context(
                    appended_logs(self._others, self._state["callbacks"])
                )
        if not self._is_new:
            self._say(self._beginning_text())

    def _beginning_text(self) -> str:
        folder, epochs = repr(str(self._files.directory)), self.params["epochs"]
        if self._state is None:
            return f"no snapshot in {folder}, training begins"
        point = self._point
        if self._state["stopped"] or point.epoch >= epochs:
            return (
                f"training in {folder} is finished, after {point.epoch} of {epochs} "
                "epochs: nothing to do"
            )
        return f"continuing at {self._text(point)}, from {folder}"

    def _text(self, point: Point) -> str:
        """The next step, as Keras counts epochs."""
        steps = point.num_batches or self._position.num_batches
        last = "" if steps is None else f" of {steps}"
        epochs = self.params["epochs"]
        return f"epoch {point.epoch + 1} of {epochs}, step {point.done + 1}{last}"

    def _say(self, text: str) -> None:
        if self._is_chief:
            print(f"Resume: {text}.", file=sys.stderr, flush=True)

    def _check_use(self) -> None:
        _check_others(self._others)
        if self._stream == "continue" and not is_fixed(self._workers):
            raise InvalidArgumentError(
                "`Resume(stream='continue')` was given with elastic workers, which "
                "read the same batches; a new one begins the generator again. Use "
                "stream='skip', or omit `elastic`."
            )
        if self._epochs is None:
            raise ContextError(
                "`Resume` was not in the list that `fit` was given. Pass "
                "`callbacks=[..., resume]`, not a `CallbackList`."
            )
        if self._key in finished_directories:
            raise InvalidArgumentError(
                f"A `fit` with snapshots in {str(self._files.directory)!r} has ended "
                "in this process. Give each `fit` a directory of its own, or remove "
                "it to train again."
            )

    # After all other callbacks

    def on_train_begin(self, logs: Any = None) -> None:
        self._beginning.close()
        first = 0
        if self._state is not None:
            self._restore()
            self._position.resume(self._point)
            first = self._point.epoch
            if self._state["stopped"]:
                first = max(first, self.params["epochs"])
        set_initial_epoch(self.model, first)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        set_initial_epoch(self.model, 0)
        if self._state is not None and self._point.done:
            # Metrics were reset, and callbacks were called, as before the snapshot.
            self._restore()
        self._state = None
        self._epoch = epoch

    def _between_steps(self, done: int) -> None:
        """Copies the values if a snapshot is due, in the middle of an epoch."""
        # Another step followed the copy, so it was not at the end of the epoch.
        self._submit()
        self._writer.report()
        if self._stops:
            # The step was taken to know that the epoch had another one.
            self._stop(self._last_point)
        is_last = done == self._position.num_batches
        self._stops = not self._requests.begin_step()
        if self._stops and not is_last:
            self._last_point = self._position.at(self._epoch, done)
            if self._is_active:
                self._capture(self._last_point)
            if self._position.is_length_known:
                self._submit()
                self._stop(self._last_point)
            return
        if not self._is_active:
            return
        self._clock.tick()
        if self._clock.is_due and not is_last and not self._waits:
            self._capture(self._position.at(self._epoch, done))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._position.end_epoch()
        stops = self._stops or not self._requests.begin_step()
        is_due = self._captured is not None or self._clock.is_due
        point = self._position.at(epoch + 1, 0)
        if self._is_active and (stops or (is_due and not self._waits)):
            self._capture(point)
            self._submit()
        self._captured = None
        if stops:
            self._stop(point)

    def on_train_end(self, logs: Any = None) -> None:
        set_initial_epoch(self.model, 0)
        finished_directories.add(self._key)
        if self._state is None and self._is_active:
            self._capture(self._position.at(self._epoch + 1, 0))
            self._submit()
            self._writer.wait()
        if self._requests.received is not None:
            self._requests.end()
        self._requests.close()

    def _stop(self, point: Point) -> NoReturn:
        """Ends the process when the last snapshot is written."""
        self._writer.wait()
        if self._workers is not None and is_fixed(self._workers):
            self._workers.group.barrier("the last snapshot")
        set_initial_epoch(self.model, 0)
        if not self._writer.is_failing:
            self._say(
                f"saved in {str(self._files.directory)!r} before the end of this "
                f"process; started again, it continues at {self._text(point)}"
            )
        self._requests.end()

    @property
    def _key(self) -> Path:
        return self._files.directory.absolute()

    @property
    def _waits(self) -> bool:
        """Whether the previous snapshot is still being written."""
        return self._writer.is_busy and not self._shares

    # Snapshots

    def _read(self) -> dict[str, Any] | None:
        if self._workers is None:
            data = self._shared_snapshot()
        else:
            found = self._workers.actions.call(
                "the snapshot to resume from",
                lambda: np.frombuffer(self._shared_snapshot(), np.uint8),
            )
            data = found.tobytes()
        return parsed(data) if data else None

    def _shared_snapshot(self) -> bytes:
        """The chief's snapshot, on all workers; empty without one."""
        data = self._files.read(_check_state) if self._is_chief else None
        if self._workers is not None:
            return self._workers.broadcast_bytes("the snapshot to resume from", data)
        return data or b""

    def save(self, epoch: int, done: int) -> Path | None:
        """Writes a snapshot between two steps, on any worker.

        Args:
            epoch: int, the epoch.
            done: int, its finished steps; possibly 0 before the next step begins.

        Returns:
            The directory; None at the end of an epoch, which is not repeated, and if
            there is a snapshot that is not older: others may train without this worker.

        Raises:
            OSError: if it cannot be written.
        """
        point = self._position.in_epoch(epoch)
        if done > point.done:
            point = self._position.at(epoch, done)
        if self._position.num_batches in (None, point.done):
            return None
        self._writer.wait()
        last = self._files.read(_check_state)
        if last is not None:
            found = Point(**parsed(last)["point"])
            if (found.epoch, found.done) >= (point.epoch, point.done):
                return None
        self._files.write(self._contents(point))
        self._saving()()
        return self._files.directory

    def _saving(self) -> Callable[[], None]:
        """To be called when a snapshot of the present state is written."""
        if self._workers is None:
            return lambda: None
        return self._workers.actions.saving(str(self._files.directory))

    def _restore(self) -> None:
        assert self._state is not None
        # A learning rate that the script has changed counts, and what callbacks have
        # made of it.
        is_changed = "learning_rate" in self._changed
        rate = variable_rate(self.model.optimizer) if is_changed else None
        restore_model(self.model, self._state["model"])
        if rate is not None:
            set_rate(self.model.optimizer, rate)
        restore_callbacks(self._others, self._state["callbacks"], self._is_chief)

    def _capture(self, point: Point) -> None:
        """Copies everything in memory; workers besides the chief read shards only."""
        begun = time.monotonic()
        if self._strategy is not None and self._strategy.drivers.servers is not None:
            self._strategy.drivers.servers.finish_steps()
        with recording.SAVE:
            contents = self._contents(point)
        if self._is_chief:
            self._captured = contents, self._saving()
        self._pauses.append(time.monotonic() - begun)
        self._clock.taken(self._pauses[-1])

    def _contents(self, point: Point) -> dict[str, Any]:
        get_engine().sync_variables(self.model)
        return {
            "backend": keras.backend.backend(),
            "model": model_state(self.model),
            "callbacks": callback_states(self._others),
            "point": dataclasses.asdict(point),
            "stopped": bool(self.model.stop_training),
            "settings": self._settings,
        }

    def _submit(self) -> None:
        captured, self._captured = self._captured, None
        if captured is not None:
            self._writer.write(*captured)


def _check_state(state: Any) -> None:
    """Raises unless the contents of a snapshot are as `Resume` writes them."""
    model, point = state["model"], Point(**state["point"])
    for described, value in zip(model["variables"], model["values"], strict=True):
        check_stored(value, described)
    for each in state["callbacks"]:
        each["key"], each["state"]
    numbers = (point.epoch, point.done, point.passes, point.before, point.seed)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"its position is {str(numbers)[:200]}")
    state["backend"], state["stopped"], model["optimizer"]
    point.random["beginning"], point.random["now"]


class _First(keras.callbacks.Callback):
    """The part of `Resume` that runs before all other callbacks."""

    def __init__(self, resume: Resume):
        super().__init__()
        self._resume = resume

    def on_train_begin(self, logs: Any = None) -> None:
        self._resume.begin()


def _check_arguments(every_steps: Any, every_seconds: Any, stream: Any) -> None:
    is_int = isinstance(every_steps, int) and not isinstance(every_steps, bool)
    if every_steps is not None and (not is_int or every_steps < 1):
        raise InvalidArgumentError(
            "`every_steps` must be a number of steps, 1 or more, or None. Received: "
            f"{every_steps!r}"
        )
    is_number = isinstance(every_seconds, (int, float))
    if every_seconds is not None and (not is_number or not every_seconds >= 0):
        raise InvalidArgumentError(
            "`every_seconds` must be a number of seconds, 0 or more, or None. "
            f"Received: {every_seconds!r}"
        )
    if every_steps is None and every_seconds is None:
        raise InvalidArgumentError(
            "`every_steps` and `every_seconds` are both None, so there would be no "
            "snapshots. Set one of them."
        )
    if stream not in ("raise", "skip", "continue"):
        raise InvalidArgumentError(
            f"`stream` must be 'raise', 'skip' or 'continue'. Received: {stream!r}"
        )


def _check_others(callbacks: list[Any]) -> None:
    kinds = (keras.callbacks.BackupAndRestore, Resume)
    for callback in callbacks:
        if isinstance(callback, kinds):
            raise InvalidArgumentError(
                f"`fit` was given `Resume` and {type(callback).__name__}, which both "
                "set the position to resume from. Pass one of them."
            )
