"""Preemption: checkpoint on a termination signal, resume after restart."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from keras_strategies.cluster import ClusterResolver
from keras_strategies.cluster.group import WorkerGroup, current_group
from keras_strategies.cluster.resolver import as_resolver
from keras_strategies.errors import (
    ClusterError,
    ContextError,
    InvalidArgumentError,
    InvalidTypeError,
)
from keras_strategies.training.resume.snapshot_files import SnapshotDirectory, parsed
from keras_strategies.training.saving.checkpoints import Checkpoint
from keras_strategies.training.saving.stop_requests import StopRequests

#: Exit code after a save, which requests a restart.
RESTART_EXIT_CODE = 42
_POLL_SECONDS = 1.0
_CHECKPOINT = "checkpoint-"


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

    Every step of a custom loop is called by `run`; in `fit`, use `ks.callbacks.Resume`.

    >>> handler = ks.PreemptionCheckpointHandler(None, model, "backup")
    >>> while handler.total_run_calls < 1000:
    ...     handler.run(train_step, next(batches))
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
        self._requests = StopRequests(
            self._group, (signal.SIGTERM,), self._config.grace_period
        )
        self._requests.steps.resume()
        self._calls = self._saved.read()
        self._watching = threading.Event()
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
        self._check()
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
        self._check()
        self._calls += 1

    def _check(self) -> None:
        """Saves and exits if the workers stop before this step."""
        if self._requests.begin_step():
            return
        if self._is_chief:
            self._saved.write(self._calls, self._config.save_fn)
        elif self._config.save_fn is None:
            self._saved.take_part()
        if self._group is not None:
            self._group.barrier("the save of a preempted training")
        self._exit()

    @property
    def _is_chief(self) -> bool:
        return self._group is None or self._group.is_chief

    def _exit(self) -> None:
        self.close()
        if self._config.exit_fn is not None:
            self._config.exit_fn()
            return
        if self._is_chief:
            print(
                f"Training was saved in {self._saved.folder} because this "
                "machine or another worker's is being preempted. Restart to "
                "resume.",
                file=sys.stderr,
            )
        sys.exit(RESTART_EXIT_CODE)

    def watch_preemption_scope(self) -> contextlib.AbstractContextManager[Any]:
        """Context manager of `tf.distribute`: handles signals while it is open."""
        return contextlib.closing(self)

    def close(self) -> None:
        """Restores the signal handlers."""
        self._watching.set()
        self._requests.close()

    def _watch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ContextError(
                "A PreemptionCheckpointHandler was created outside of the main "
                "thread, which receives termination signals. Create it there."
            )
        self._requests.watch()
        watcher = self._config.termination_watcher_fn
        if watcher is not None:
            threading.Thread(
                target=self._poll, args=(watcher,), name="preemption", daemon=True
            ).start()

    def _poll(self, watcher: Callable[[], bool]) -> None:
        while not self._watching.wait(_POLL_SECONDS):
            if watcher():
                self._requests.request()
                return


class _Saved:
    """The state of a custom loop, in a directory of snapshots."""

    def __init__(self, checkpoint: Any, folder: Path):
        if not isinstance(checkpoint, keras.Model) and not (
            hasattr(checkpoint, "write") and hasattr(checkpoint, "read")
        ):
            raise InvalidArgumentError(
                "`checkpoint` must be a keras.Model, or an object with "
                f"`write(path)` and `read(path)`. Received: {checkpoint!r} of type "
                f"{type(checkpoint).__name__}"
            )
        self.of_model = isinstance(checkpoint, keras.Model)
        self._checkpoint = Checkpoint(model=checkpoint) if self.of_model else checkpoint
        self.folder = folder / "preempted"
        self._files = SnapshotDirectory(self.folder)

    def write(self, calls: int, save: Callable[[str], None] | None) -> None:
        """Writes the state; called on the chief."""
        others = sorted(self.folder.glob(f"{_CHECKPOINT}*"), key=os.path.getmtime)
        # A name that cannot be predicted, so that no link can be planted there.
        own = self.folder / f"{_CHECKPOINT}{secrets.token_hex(8)}"
        own.mkdir(parents=True)
        (save or self._checkpoint.write)(str(own / "checkpoint"))
        is_read = save is None or not self.of_model
        self._files.write({"calls": calls, "checkpoint": own.name if is_read else None})
        # The snapshot before this one has the last of them.
        for other in others[:-1]:
            shutil.rmtree(other, ignore_errors=True)

    def take_part(self) -> None:
        """Reads what is sharded over workers, on those besides the chief."""
        if self.of_model:
            self._checkpoint.write(self.folder)

    def read(self) -> int:
        """Restores the state; returns the number of calls."""
        data = self._files.read()
        state = {} if data is None else parsed(data)
        if state.get("checkpoint") is not None:
            self._checkpoint.read(str(self.folder / state["checkpoint"] / "checkpoint"))
        return int(state.get("calls", 0))
