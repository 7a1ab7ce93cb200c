"""Preemption: checkpoint on a termination signal, resume after restart."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_strategies.cluster import ClusterResolver
from keras_strategies.cluster.group import WorkerGroup, current_group
from keras_strategies.cluster.resolver import as_resolver
from keras_strategies.engines import get_engine
from keras_strategies.errors import (
    ClusterError,
    ContextError,
    InvalidArgumentError,
    InvalidTypeError,
)
from keras_strategies.keras_compat.models.fit_loop import set_initial_epoch, skip_steps
from keras_strategies.keras_compat.models.fit_position import (
    order_callbacks,
    shuffle_from_epoch,
)
from keras_strategies.training.random_sync import random_numbers, set_random_numbers

#: Exit code after a save, which requests a restart.
RESTART_EXIT_CODE = 42
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class TerminationConfig:
    """Options for the detection and handling of a termination.

    Args:
        termination_watcher_fn: callable that returns whether the machine is about to
            be preempted, called once a second; None to rely on the signal alone.
        exit_fn: callable that ends this process after the save; None for
            `sys.exit(42)`.
        grace_period: float, seconds to continue training after the notice.
        save_fn: callable of a path, called on the chief in place of the checkpoint's
            own writing; None for that.

    Raises:
        ValueError: for a negative grace period, or functions that are not callable.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], None] | None = None
    grace_period: float = 0.0
    save_fn: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        for name in ("termination_watcher_fn", "exit_fn", "save_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise InvalidArgumentError(
                    f"`{name}` must be a function. Received: {value!r}"
                )
        if self.grace_period < 0:
            raise InvalidArgumentError(
                "`grace_period` must be a number of seconds, 0 or more. Received: "
                f"{self.grace_period!r}"
            )


def _check_resolver(resolver: Any, group: WorkerGroup | None) -> None:
    """Raises if a resolver does not describe the connected workers."""
    if resolver is None:
        return
    if callable(getattr(resolver, "cluster_spec", None)):
        resolver = as_resolver(resolver, "cluster_resolver")
    if not isinstance(resolver, ClusterResolver):
        raise InvalidTypeError(
            "`cluster_resolver` must be a resolver of ks.cluster_resolver, or None. "
            f"Received: {resolver!r} of type {type(resolver).__name__}"
        )
    connected = 1 if group is None else group.count
    if resolver.num_workers != connected:
        raise ClusterError(
            f"`cluster_resolver` describes {resolver.num_workers} workers, but "
            f"{connected} have connected. Create the strategy with this resolver "
            "first, or pass None."
        )


class PreemptionCheckpointHandler:
    """Saves a checkpoint before a preemption, and resumes after the restart.

    A termination signal (SIGTERM) to one worker makes all workers finish the same
    step, save, and exit with code 42. When the script is started again, the handler
    restores the checkpoint, and training takes exactly the remaining steps.

    Args:
        cluster_resolver: the `ClusterResolver` of the strategy, which is compared with
            the connected workers; None to skip the comparison.
        checkpoint_or_checkpoint_manager: the object to save: a compiled and built
            `keras.Model`, saved with its optimizer; or an object with `write(path)` and
            `read(path)`, such as a `tf.train.Checkpoint` (or a `CheckpointManager`;
            its checkpoint and directory are used).
        checkpoint_dir: str or path, a folder that all workers can read; created if it
            does not exist.
        termination_config: `TerminationConfig`; None for the defaults.

    Raises:
        TypeError: if `cluster_resolver` is something else.
        ValueError: if the checkpoint cannot be saved, no folder is given, or the
            resolver has another number of workers than have connected.
        RuntimeError: outside of the main thread, which receives signals.

    Example:

    In a custom loop, every step is called by `run`:

    >>> handler = ks.PreemptionCheckpointHandler(None, model, "backup")
    >>> while handler.total_run_calls < 1000:
    ...     handler.run(train_step, next(batches))

    In `fit`, the handler's callback comes last:

    >>> model.fit(x, y, epochs=5, callbacks=[handler.callback()])
    """

    def __init__(
        self,
        cluster_resolver: Any,
        checkpoint_or_checkpoint_manager: Any,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ):
        _check_resolver(cluster_resolver, current_group())
        checkpoint = checkpoint_or_checkpoint_manager
        folder = checkpoint_dir or getattr(checkpoint, "directory", None)
        if folder is None:
            raise InvalidArgumentError(
                "`checkpoint_dir` must be the folder for the checkpoint of a "
                "preempted training. Received: None."
            )
        self._saved = _Saved(
            getattr(checkpoint, "checkpoint", checkpoint), Path(folder)
        )
        self._config = termination_config or TerminationConfig()
        self._group = current_group()
        self._steps: WorkerGroup | LocalSteps = self._group or LocalSteps()
        self._steps.resume()
        found = self._saved.read()
        #: dict, the facts saved when training stopped; empty in a first run.
        self.restored: dict[str, Any] = found or {}
        self._calls = int(self.restored.get("calls", 0))
        self._watching = threading.Event()
        self._previous: Any = None
        self._watch()

    @property
    def total_run_calls(self) -> int:
        """int, the number of calls of `run`, including those before a restart."""
        return self._calls

    def run(
        self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs a step, or saves and exits if the workers stop before it.

        Args:
            distributed_train_function: callable, the step; all workers call `run`
                equally often.
            *args: its positional arguments.
            **kwargs: its keyword arguments.

        Returns:
            What the function returns.
        """
        self.check({})
        result = distributed_train_function(*args, **kwargs)
        self._calls += 1
        return result

    def save_checkpoint_if_preempted(self) -> None:
        """Saves and exits if the workers stop here; for loops without `run`.

        Every worker calls it once before each step. `total_run_calls` counts these
        calls, those before a restart included.

        Example:

        >>> while handler.total_run_calls < 1000:
        ...     handler.save_checkpoint_if_preempted()
        ...     train_step(next(batches))
        """
        self.check({})
        self._calls += 1

    def check(self, facts: dict[str, Any]) -> None:
        """Saves and exits if the workers stop before this step.

        Args:
            facts: dict of JSON values, which `restored` has after the restart.
        """
        if self._steps.begin_step():
            return
        chief = self._group is None or self._group.is_chief
        if chief:
            self._saved.write({"calls": self._calls, **facts}, self._config.save_fn)
        if self._group is not None:
            self._group.barrier("the save of a preempted training")
        self.close()
        if self._config.exit_fn is not None:
            self._config.exit_fn()
        else:
            if chief:
                print(
                    f"Training was saved in {self._saved.folder} because this "
                    "machine or another worker's is being preempted. Restart to "
                    "resume.",
                    file=sys.stderr,
                )
            sys.exit(RESTART_EXIT_CODE)

    def callback(self) -> keras.callbacks.Callback:
        """The callback for `fit`; pass it as the last one.

        After a restart `fit` continues in the epoch and at the step where it stopped:
        batches that were trained on are read again and skipped. Shuffled arrays are
        read in the same order as without the restart, except on TensorFlow, where the
        order starts over; shuffle with a seed there, or not at all.
        """
        if not isinstance(self._saved.checkpoint, keras.Model):
            raise InvalidArgumentError(
                "`callback` needs a handler of a keras.Model, but this one saves "
                f"{self._saved.checkpoint!r}. Use `run` in a custom loop."
            )
        order_callbacks()
        return PreemptionCallback(self)

    def finished(self) -> None:
        """Ends training: removes the checkpoint."""
        if self._group is None or self._group.is_chief:
            self._saved.remove()
        self.restored = {}

    def watch_preemption_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager of `tf.distribute`: handles signals while it is open."""
        return contextlib.closing(self)

    def close(self) -> None:
        """Restores the signal handlers."""
        self._watching.set()
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _watch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ContextError(
                "A PreemptionCheckpointHandler was created outside of the main "
                "thread, which receives termination signals. Create it there."
            )
        self._previous = signal.signal(signal.SIGTERM, lambda *_: self._notice())
        watcher = self._config.termination_watcher_fn
        if watcher is not None:
            threading.Thread(
                target=self._poll, args=(watcher,), name="preemption", daemon=True
            ).start()

    def _poll(self, watcher: Callable[[], bool]) -> None:
        while not self._watching.wait(_POLL_SECONDS):
            if watcher():
                self._notice()
                return

    def _notice(self) -> None:
        if self._config.grace_period:
            timer = threading.Timer(self._config.grace_period, self._steps.request_stop)
            timer.daemon = True
            timer.start()
        else:
            self._steps.request_stop()


class LocalSteps:
    """The steps of a process that trains alone (see `WorkerGroup`)."""

    def __init__(self) -> None:
        self._is_stopping = False

    def resume(self) -> None:
        self._is_stopping = False

    def request_stop(self) -> None:
        self._is_stopping = True

    def begin_step(self) -> bool:
        return not self._is_stopping


class _Saved:
    """Atomic checkpoint in the folder."""

    def __init__(self, checkpoint: Any, folder: Path):
        if not isinstance(checkpoint, keras.Model) and not (
            hasattr(checkpoint, "write") and hasattr(checkpoint, "read")
        ):
            raise InvalidArgumentError(
                "`checkpoint` must be a keras.Model, or an object with "
                f"`write(path)` and `read(path)`. Received: {checkpoint!r} of type "
                f"{type(checkpoint).__name__}"
            )
        self.checkpoint = checkpoint
        self.folder = folder / "preempted"

    def write(self, facts: dict[str, Any], save: Callable[[str], None] | None) -> None:
        part = self.folder.with_name(f"preempted.part{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        if save is not None:
            save(str(part / "checkpoint"))
        elif isinstance(self.checkpoint, keras.Model):
            get_engine().sync_variables(self.checkpoint)
            self.checkpoint.save_weights(part / "model.weights.h5")
            metrics = [
                keras.ops.convert_to_numpy(variable)
                for variable in self.checkpoint.metrics_variables
            ]
            np.savez(part / "metrics.npz", *metrics)
        else:
            self.checkpoint.write(str(part / "checkpoint"))
        facts = {**facts, "random": random_numbers(get_engine())}
        (part / "facts.json").write_text(json.dumps(facts))
        old = self.folder.with_name("preempted.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
        part.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def read(self) -> dict[str, Any] | None:
        for folder in (self.folder, self.folder.with_name("preempted.old")):
            file = folder / "facts.json"
            if not file.exists():
                continue
            found: dict[str, Any] = json.loads(file.read_text())
            if isinstance(self.checkpoint, keras.Model):
                if (folder / "model.weights.h5").exists():
                    self.checkpoint.load_weights(folder / "model.weights.h5")
                    with np.load(folder / "metrics.npz") as file_of_metrics:
                        names = sorted(file_of_metrics, key=lambda n: int(n[4:]))
                        found["metrics"] = [file_of_metrics[name] for name in names]
            else:
                self.checkpoint.read(str(folder / "checkpoint"))
            return found
        return None

    def remove(self) -> None:
        for folder in (self.folder, self.folder.with_name("preempted.old")):
            shutil.rmtree(folder, ignore_errors=True)


class PreemptionCallback(keras.callbacks.Callback):
    """Stops `fit` between two steps, and resumes there after a restart."""

    def __init__(self, handler: PreemptionCheckpointHandler):
        super().__init__()
        self._handler = handler
        self._epoch = 0
        self._done = 0
        self._logs: dict[str, float] = {}
        self._random: Any = None

    @property
    def _restored(self) -> dict[str, Any]:
        return self._handler.restored

    def on_train_begin(self, logs: Any = None) -> None:
        if "epoch" not in self._restored:
            return
        set_initial_epoch(self.model, self._restored["epoch"])
        shuffle_from_epoch(self._restored["epoch"])
        if self._restored["done"]:
            skip_steps(
                self.model,
                self._restored["done"],
                self._restored["logs"],
                self._restored["metrics"],
                self._resumed,
            )

    def _resumed(self) -> None:
        """Called after the steps before the restart have been skipped."""
        set_random_numbers(get_engine(), self._restored["random"])
        self._handler.restored = {}

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch, self._done = epoch, 0
        if self._restored.get("epoch") == epoch:
            set_random_numbers(get_engine(), self._restored["epoch_random"])
        self._random = random_numbers(get_engine())

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._done < self._restored.get("done", 0):
            return  # The step is skipped.
        self._handler.check(
            {
                "epoch": self._epoch,
                "done": self._done,
                "logs": self._logs,
                "epoch_random": self._random,
            }
        )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._done += 1
        self._logs = {name: float(value) for name, value in (logs or {}).items()}

    def on_train_end(self, logs: Any = None) -> None:
        self._handler.finished()
