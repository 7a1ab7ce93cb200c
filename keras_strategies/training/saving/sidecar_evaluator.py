"""Sidecar evaluation: each new checkpoint, in a separate process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import keras

from keras_strategies.errors import (
    CheckpointError,
    ClusterTimeoutError,
    InvalidArgumentError,
)

#: Suffixes of checkpoints; sharded files of `save_weights` are found by their index.
_SUFFIXES = (".weights.h5", ".weights.json", ".keras")
#: A file that cannot be read counts as incomplete until it is unchanged for this long.
_SETTLED_SECONDS = 2.0
_POLL_SECONDS = 0.5
_STEP = "optimizer/vars/0"


@dataclass(frozen=True)
class Evaluation:
    """Evaluation of one checkpoint.

    Args:
        path: str, the checkpoint.
        step: int, the optimizer's step in it; None if it has none.
        logs: dict from the metrics' names to their values.
    """

    path: str
    step: int | None
    logs: dict[str, float]


@dataclass(frozen=True)
class _Version:
    """One version of a file, which is rewritten by training."""

    path: str
    changed: int
    inode: int
    size: int


class SidecarEvaluator:
    """Evaluates each new checkpoint while another process trains.

    Runs in a cluster's `evaluator` task, or in any process that can read the folder of
    checkpoints: those of `ModelCheckpoint`, `save` and `save_weights`, in every format
    of Keras, from any strategy and backend. Existing checkpoints are evaluated first,
    in the order in which they were written. A file that training overwrites is
    evaluated in the versions that are found.

    Training never waits for an evaluation, and a slow evaluation misses no checkpoint
    with a separate name.

    Args:
        model: `keras.Model`, compiled and built like the trained model. It may be
            created in the scope of a strategy, which then evaluates.
        data: the evaluation data: a dataset of any kind that `evaluate` supports, or a
            tuple `(x, y)` or `(x, y, sample_weight)`.
        checkpoint_dir: str or path, the folder; it need not exist yet.
        steps: int, batches of each evaluation; None for all.
        max_evaluations: int, the number of evaluations; None to continue until `stop`,
            SIGTERM or the timeout. Launchers send SIGTERM when training has ended; the
            remaining checkpoints are evaluated before the end.
        callbacks: list of `keras.callbacks.Callback` for `evaluate`. `TensorBoard`
            draws metrics over the optimizer's step of each checkpoint.
        batch_size: int, rows of a batch where `data` are arrays; None for Keras's own.
        timeout_seconds: float, seconds without a new checkpoint after which an error is
            raised; None to wait without limit.

    Raises:
        ValueError: for a model that is not compiled and built, or numbers below 1.

    Example:

    >>> resolver = ks.cluster_resolver.TFConfigClusterResolver()
    >>> if resolver.task_type == "evaluator":
    ...     evaluator = ks.SidecarEvaluator(model, (x_test, y_test), "checkpoints")
    ...     evaluator.start()
    """

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        *,
        batch_size: int | None = None,
        timeout_seconds: float | None = None,
    ):
        if not isinstance(model, keras.Model) or not (model.compiled and model.built):
            raise InvalidArgumentError(
                "`model` must be a compiled and built keras.Model, since weights "
                "are loaded into it. Call `compile`, and `build` or the model "
                f"itself on a batch. Received: {model!r}"
            )
        for name, value, least in (
            ("steps", steps, 1),
            ("max_evaluations", max_evaluations, 1),
            ("batch_size", batch_size, 1),
        ):
            if value is not None and (not isinstance(value, int) or value < least):
                raise InvalidArgumentError(
                    f"`{name}` must be a number of {least} or more, or None. "
                    f"Received: {value!r}"
                )
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise InvalidArgumentError(
                "`timeout_seconds` must be a number of seconds above 0, or None. "
                f"Received: {timeout_seconds!r}"
            )
        self._model = model
        self._data = data
        self._folder = Path(checkpoint_dir)
        self._steps = steps
        self._max = max_evaluations
        self._callbacks = list(callbacks or [])
        self._batch_size = batch_size
        self._timeout = timeout_seconds
        self._is_ending = threading.Event()
        self._seen: set[_Version] = set()
        #: list of `Evaluation`, all so far.
        self.evaluations: list[Evaluation] = []

    def start(self) -> list[Evaluation]:
        """Evaluates checkpoints until the end.

        Returns:
            list of `Evaluation`, in the order of the checkpoints.

        Raises:
            RuntimeError: without a new checkpoint in `timeout_seconds`.
            ValueError: if a complete checkpoint cannot be loaded into the model.
        """
        waited_since = time.monotonic()
        with self._ended_by_sigterm():
            while True:
                # Read before the search, so that one search follows the end.
                is_ending = self._is_ending.is_set()
                for version in self._new():
                    if self._evaluate(version):
                        waited_since = time.monotonic()
                    if self._max is not None and len(self.evaluations) >= self._max:
                        return self.evaluations
                if is_ending:
                    return self.evaluations
                waited = time.monotonic() - waited_since
                if self._timeout is not None and waited > self._timeout:
                    raise ClusterTimeoutError(
                        f"No new checkpoint appeared in {self._folder} within "
                        f"{self._timeout:g} seconds, after {len(self.evaluations)} "
                        "evaluations. Training may have ended or failed; "
                        "`timeout_seconds` sets this timeout."
                    )
                self._is_ending.wait(_POLL_SECONDS)

    def stop(self) -> None:
        """Ends `start` after the existing checkpoints; callable from any thread."""
        self._is_ending.set()

    @contextlib.contextmanager
    def _ended_by_sigterm(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Only the main thread receives signals.
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self.stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _new(self) -> list[_Version]:
        """Checkpoints that have not been evaluated, the oldest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._folder):
                # Hidden files are not complete.
                if entry.name.startswith(".") or not entry.name.endswith(_SUFFIXES):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    about = os.stat(entry.path)
                    found.append(
                        _Version(
                            entry.path, about.st_mtime_ns, about.st_ino, about.st_size
                        )
                    )
        new = [version for version in found if version not in self._seen]
        return sorted(new, key=lambda version: (version.changed, version.path))

    def _evaluate(self, version: _Version) -> bool:
        """Evaluates a checkpoint; whether it could be read."""
        try:
            with warnings.catch_warnings():
                # The optimizer is not built: evaluating needs no slots.
                warnings.filterwarnings("ignore", "Skipping variable loading for opt")
                self._model.load_weights(version.path)
            step = _step_of(version.path)
        except (OSError, KeyError, EOFError, zipfile.BadZipFile, ValueError) as error:
            if _is_settled(version):
                raise CheckpointError(
                    f"The checkpoint {version.path} cannot be loaded into the "
                    f"evaluator's model {self._model.name!r}: {error}. Create the "
                    "same model as in training, and store no other files in "
                    f"{self._folder}."
                ) from error
            return False  # It is being written, or has been replaced.
        self._seen.add(version)
        optimizer = self._model.optimizer
        if step is not None and optimizer is not None:
            optimizer.iterations.assign(step)
        logs = self._logs()
        self.evaluations.append(Evaluation(version.path, step, logs))
        numbers = ", ".join(f"{name}: {value:.4f}" for name, value in logs.items())
        at = "" if step is None else f" at step {step}"
        print(f"{Path(version.path).name}{at}: {numbers}", file=sys.stderr, flush=True)
        return True

    def _logs(self) -> dict[str, float]:
        data = self._data
        parts = keras.utils.unpack_x_y_sample_weight(data)
        if not isinstance(data, (tuple, list)):
            parts = (data, None, None)
        x, y, sample_weight = parts
        found = self._model.evaluate(
            x,
            y,
            sample_weight=sample_weight,
            batch_size=self._batch_size,
            steps=self._steps,
            callbacks=self._callbacks,
            verbose=0,
            return_dict=True,
        )
        return {name: float(value) for name, value in found.items()}


def _is_settled(version: _Version) -> bool:
    """Whether a file is still that version, and has not just been written."""
    try:
        about = os.stat(version.path)
    except FileNotFoundError:
        return False
    is_same = (about.st_mtime_ns, about.st_ino) == (version.changed, version.inode)
    return is_same and time.time() - about.st_mtime > _SETTLED_SECONDS


def _step_of(path: str) -> int | None:
    """The optimizer's step in a checkpoint, without reading its variables."""
    with contextlib.ExitStack() as stack:
        if path.endswith(".keras"):
            archive = stack.enter_context(zipfile.ZipFile(path))
            file: Any = stack.enter_context(archive.open("model.weights.h5"))
        elif path.endswith(".h5"):
            file = path
        else:
            return None
        weights = stack.enter_context(h5py.File(file, "r"))
        return int(weights[_STEP][()]) if _STEP in weights else None
