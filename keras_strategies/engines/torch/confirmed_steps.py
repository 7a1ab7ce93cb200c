"""Steps whose collectives are confirmed at their end.

The host launches the optimizer's kernels while gradients are still summed. If a
worker is lost then, the sums of an aborted collective are partial, and what was updated
by them is overwritten by NaN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from keras_strategies.communication.communicator import Communicator
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.keras_compat.variables.values import raw_value


@contextlib.contextmanager
def confirmed(
    written: Callable[[], Iterable[Any]], workers: Communicator | None
) -> Iterator[None]:
    """A step whose collectives are confirmed at its end, before its results are read.

    Args:
        written: returns the variables that the step may have updated.
        workers: the workers; None without any.

    Raises:
        WorkerError: if a worker is lost.
    """
    try:
        yield
    except BaseException:
        if isinstance(workers, TorchCommunicator) and workers.has_used_unconfirmed:
            # Not by a lost worker, perhaps: by the user's code, or Ctrl-C.
            with contextlib.suppress(Exception):
                _confirm(written, workers)
        raise
    _confirm(written, workers)


def _confirm(
    written: Callable[[], Iterable[Any]], workers: Communicator | None
) -> None:
    if workers is None:
        return
    try:
        workers.confirm()
    except Exception:
        if isinstance(workers, TorchCommunicator) and workers.has_used_unconfirmed:
            spoil(written())
        raise


def written_by_steps(model: Any) -> list[Any]:
    """The weights and the optimizer's variables of a model."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.trainable_variables, *getattr(optimizer, "variables", ())]


def spoil(variables: Iterable[Any]) -> None:
    """Overwrites variables by NaN."""
    with torch.no_grad():
        for variable in variables:
            value = raw_value(variable)
            if value.is_floating_point():
                value.fill_(float("nan"))
