"""Sharded checkpoints, by `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.drivers import CheckpointDriver
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.state.checkpointed_variables import key_of
from keras_strategies.runtime.state.numbered_checkpoints import (
    load_numbered,
    save_numbered,
)


class TorchCheckpoints(CheckpointDriver):
    """Checkpoints of one strategy; each process writes and reads its own shards.

    Args:
        placement: the devices of the variables, and the workers.
    """

    def __init__(self, placement: Placement):
        self._workers = placement.workers
        #: Whether processes have different shards.
        self._is_sharded = placement.mesh is not None

    def save_sharded(self, model: Any, directory: Path, keep: int) -> int:
        return save_numbered(model, directory, keep, self._workers, self._write)

    def load_sharded(self, model: Any, directory: Path) -> int:
        return load_numbered(model, directory, self._workers, self._read)

    def _write(self, folder: Path, groups: dict[str, list[Any]]) -> None:
        dcp = _distributed_checkpoint()
        if self._workers is None or self._workers.is_chief or self._is_sharded:
            self._quietly(
                dcp.save,
                {
                    f"{group}/{key_of(i)}": raw_value(variable).detach()
                    for group, variables in groups.items()
                    for i, variable in enumerate(variables)
                },
                storage_writer=dcp.FileSystemWriter(folder),
            )

    def _read(self, folder: Path, groups: dict[str, list[Any]]) -> None:
        dcp = _distributed_checkpoint()
        state, others = {}, []
        for group, variables in groups.items():
            for i, variable in enumerate(variables):
                raw = raw_value(variable).detach()
                if not hasattr(raw, "placements"):  # No DTensor.
                    # Assigned below, to mirrored copies too.
                    raw = torch.empty_like(raw)
                    others.append((variable, raw))
                state[f"{group}/{key_of(i)}"] = raw
        self._quietly(
            dcp.load,
            state,
            storage_reader=dcp.FileSystemReader(folder),
        )
        for variable, value in others:
            variable.assign(value)

    def _quietly(self, call: Any, state: dict[str, Any], **storage: Any) -> None:
        """Calls a function of Torch, which warns where one process calls it alone."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            call(state, no_dist=not self._is_sharded, **storage)


def _distributed_checkpoint() -> Any:
    # It takes a second to import.
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint
