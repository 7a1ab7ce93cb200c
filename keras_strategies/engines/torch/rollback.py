"""Rollback of steps on Torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from keras_strategies.engines.torch.compat import version_of
from keras_strategies.engines.torch.confirmed_steps import written_by_steps
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.keras_compat.models.building import all_variables
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.data_parallel.data_parallel_call import DataParallelCall
from keras_strategies.runtime.drivers import RollbackDriver


class TorchRollback(RollbackDriver):
    """Saves the variables that a step may change before its last collective.

    Weights and slots change after gradients were exchanged and are usually not among
    them. If a step exchanges values again after an update, as in GANs, they are saved
    too: in the first step of a model, and in later ones if a step had such an exchange.

    Args:
        call: the data-parallel call of the strategy; None with one replica.
        workers: the communicator between workers.
    """

    def __init__(self, call: DataParallelCall | None, workers: TorchCommunicator):
        self._call = call
        self._workers = workers
        self._has_exchanged = True
        self._current: _SavedTensors | None = None
        workers.before_exchanges(self._exchanging)
        self._saved: weakref.WeakKeyDictionary[Any, _SavedTensors] = (
            weakref.WeakKeyDictionary()
        )
        self._saved_in_loop = _SavedTensors()

    def take(self, step: Callable[[Any], Any], batches: Any) -> Any:
        """Takes steps on batches, at most one such action ahead of other workers."""
        if not self._has_exchanged:
            # Without a collective, workers would be several actions apart, and those
            # that are behind could not take the state of another one.
            self._workers.group.barrier("a step")
        self._has_exchanged = False
        return step(batches)

    def save_state(self, model: Any, kind: str) -> Callable[[], bool]:
        saved = self._current = self._saved.setdefault(model, _SavedTensors())
        late = set(map(id, written_by_steps(model))) if kind == "train" else set()
        return _with_random_numbers(saved.save(all_variables(model), late))

    def save_variables(self, variables: Sequence[Any]) -> Callable[[], bool]:
        # A single variable, created in the call, is saved in memory of its own.
        saved = self._saved_in_loop if len(variables) > 1 else _SavedTensors()
        self._current = None
        return _with_random_numbers(saved.save(variables, set()))

    def _exchanging(self) -> None:
        self._has_exchanged = True
        if self._current is not None:
            self._current.exchanging()

    def reformed(self, model: Any, has_new: bool) -> None:
        self._has_exchanged = True
        if self._call is not None:
            self._call.workers_changed()


class _SavedTensors:
    """Copies of the variables of one model, in memory that is used again."""

    def __init__(self) -> None:
        self._sources: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        # Weights and slots, and their versions before the step.
        self._late: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._saves_all = True
        self._steps = 0

    def save(self, variables: Sequence[Any], late: set[int]) -> Callable[[], bool]:
        """Copies the variables; returns a function that restores them, if it can.

        Args:
            variables: all that a step may change.
            late: the identities of those that change after the last exchange.
        """
        rest = [raw_value(v) for v in variables if id(v) not in late]
        self._late = [raw_value(v) for v in variables if id(v) in late]
        self._versions = list(map(version_of, self._late))
        if late:
            self._steps += 1
        saves_all = self._saves_all or self._steps <= 1
        self._copy([*rest, *self._late] if saves_all else rest)

        def restore() -> bool:
            is_changed = self._is_changed()
            with torch.no_grad():
                for tensor, copy in zip(self._sources, self._copies, strict=True):
                    tensor.copy_(copy)
            return saves_all or not is_changed

        self._saves_all = False if self._steps <= 1 else self._saves_all
        return restore

    def exchanging(self) -> None:
        """Called before each collective: detects one that follows an update."""
        if not self._saves_all and self._is_changed():
            self._saves_all = True

    def _is_changed(self) -> bool:
        return list(map(version_of, self._late)) != self._versions

    def _copy(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            if list(map(id, tensors)) == list(map(id, self._sources)):
                for copy, tensor in zip(self._copies, tensors, strict=True):
                    copy.copy_(tensor)
            else:
                self._copies = [tensor.detach().clone() for tensor in tensors]
        self._sources = tensors


def _with_random_numbers(restore: Callable[[], bool]) -> Callable[[], bool]:
    random = torch.get_rng_state()

    def undo() -> bool:
        torch.set_rng_state(random)
        return restore()

    return undo
