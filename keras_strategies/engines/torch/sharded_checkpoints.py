"""Sharded checkpoints, by `torch.distributed.checkpoint`."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.drivers import CheckpointDriver
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.state.checkpointed_variables import (
    check_directory,
    check_same_variables,
    checkpointed_variables,
    described,
    key_of,
    no_checkpoint,
)

#: Of a checkpoint's folder: what the variables are.
_VARIABLES = "variables.json"
#: The end of the name of a folder that is being written.
_PART = ".part"


class TorchCheckpoints(CheckpointDriver):
    """Checkpoints of one strategy.

    Each process writes and reads its own shards. A checkpoint is a folder with a number
    for a name, which it gets when it is complete.

    Args:
        placement: the devices of the variables, and the workers.
    """

    def __init__(self, placement: Placement):
        self._workers = placement.workers
        #: Whether processes have different shards.
        self._is_sharded = placement.mesh is not None

    def save_sharded(self, model: Any, directory: Path, keep: int) -> int:
        dcp = _distributed_checkpoint()
        what = f"save_sharded to {str(directory)!r}"
        is_chief = self._is_chief()
        if is_chief:
            directory.mkdir(parents=True, exist_ok=True)
            for rest in directory.glob(f"*{_PART}"):
                shutil.rmtree(rest)
        number = self._of_chief(what, max(_finished(directory), default=0) + 1)
        part = directory / f"{number}{_PART}"
        groups = checkpointed_variables(model)
        if is_chief or self._is_sharded:
            self._quietly(
                dcp.save,
                {
                    f"{group}/{key_of(i)}": raw_value(variable).detach()
                    for group, variables in groups.items()
                    for i, variable in enumerate(variables)
                },
                storage_writer=dcp.FileSystemWriter(part),
            )
        if is_chief:
            (part / _VARIABLES).write_text(json.dumps(described(groups)))
            part.rename(directory / str(number))
            for old in sorted(_finished(directory))[:-keep]:
                shutil.rmtree(directory / str(old))
        # No process goes on before the checkpoint is complete.
        self._of_chief(f"the end of {what}", number)
        return number

    def load_sharded(self, model: Any, directory: Path) -> int:
        dcp = _distributed_checkpoint()
        check_directory(directory)
        what = f"load_sharded from {str(directory)!r}"
        number = self._of_chief(what, max(_finished(directory), default=0))
        if number == 0:
            raise no_checkpoint(directory)
        folder = directory / str(number)
        groups = checkpointed_variables(model)
        saved = json.loads((folder / _VARIABLES).read_text())
        check_same_variables(groups, saved, directory)
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
        return number

    def _quietly(self, call: Any, state: dict[str, Any], **storage: Any) -> None:
        """Calls a function of Torch, which warns where one process calls it alone."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            call(state, no_dist=not self._is_sharded, **storage)

    def _is_chief(self) -> bool:
        return self._workers is None or self._workers.is_chief

    def _of_chief(self, what: str, number: int) -> int:
        """The chief's number, on all workers."""
        if self._workers is None:
            return number
        return int(self._workers.group.gather_values(what, number)[0])


def _distributed_checkpoint() -> Any:
    # It takes a second to import.
    import torch.distributed.checkpoint

    return torch.distributed.checkpoint


def _finished(directory: Path) -> list[int]:
    """The numbers of the complete checkpoints in a folder."""
    if not directory.is_dir():
        return []
    return [int(path.name) for path in directory.iterdir() if path.name.isdigit()]
