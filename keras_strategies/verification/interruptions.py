"""Interruptions of `fit`: by Ctrl-C, by the loss of all processes, or of a worker."""

from __future__ import annotations

import functools
import os
import signal
import tempfile
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies.training.resume.resume_callback import Resume
from keras_strategies.verification.trainings import (
    Killed,
    Observed,
    Position,
    Script,
    Training,
)


def resumed(script: Script, make: Callable[[], Training]) -> list[Observed]:
    """Steps of a training that is interrupted, and continued with another model.

    Args:
        script: the script, with `resume_after` or `kill_after`.
        make: returns a training from the initial weights.
    """
    records: dict[Position, Observed] = {}
    after = script.interrupted_after
    assert after is not None
    with tempfile.TemporaryDirectory() as directory:
        if script.kill_after is None:
            resume, interrupt = Resume(directory), _press_ctrl_c
        else:
            resume = Resume(directory, every_steps=1, every_seconds=None)
            interrupt = functools.partial(_drop_memory, resume)
        more = [resume, _Interruption(after, interrupt)]
        make().train(script.steps, more, records)
        return make().train(script.steps, [Resume(directory)], records)


def worker_kill(steps: int, workers: Any) -> keras.callbacks.Callback:
    """Returns a callback that kills the process of the last elastic worker.

    Args:
        steps: int, the step after which it is killed.
        workers: the connected workers.
    """

    def kill() -> None:
        group = workers.group
        if group.count > 1 and group.index == group.count - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return _Interruption(steps, kill)


def _press_ctrl_c() -> None:
    """After which `fit` ends with a snapshot."""
    signal.raise_signal(signal.SIGINT)


def _drop_memory(resume: Resume) -> None:
    """As a kill does; snapshots that were taken are written."""
    resume.wait()
    raise Killed


class _Interruption(keras.callbacks.Callback):
    """Interrupts `fit` at the end of a step."""

    def __init__(self, steps: int, interrupt: Callable[[], None]):
        super().__init__()
        self._left, self._interrupt = steps, interrupt

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if not self._left:
            self._interrupt()
