"""The epoch that `fit` begins with."""

from __future__ import annotations

from typing import Any


def resumed_epoch(model: Any) -> int:
    """The epoch that `fit` resumes at; 0 if no backup has been restored.

    Keras 3.15: `BackupAndRestore` sets `_initial_epoch`.
    """
    return int(getattr(model, "_initial_epoch", 0) or 0)


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Sets the epoch that `fit` resumes at."""
    model._initial_epoch = epoch
