"""Folders with numbered checkpoints, each of which is renamed when it is complete."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from keras_strategies.communication.communicator import Communicator
from keras_strategies.errors import DamagedCheckpointError
from keras_strategies.runtime.state.checkpointed_variables import (
    check_directory,
    check_same_variables,
    checkpointed_variables,
    described,
    no_checkpoint,
)

#: Of a checkpoint's folder: what the variables are.
_VARIABLES = "variables.json"
#: The end of the name of a folder that is being written.
_PART = ".part"

_Value = TypeVar("_Value", int, str)
#: Writes or reads variables, by group, in a folder.
OfVariables = Callable[[Path, dict[str, list[Any]]], None]


def save_numbered(
    model: Any,
    directory: Path,
    keep: int,
    workers: Communicator | None,
    write: OfVariables,
) -> int:
    """Writes a checkpoint; returns its number.

    A checkpoint is a folder with a number for a name, which it gets at the end.

    Args:
        model: the model.
        directory: the folder of the checkpoints.
        keep: int, how many of them remain.
        workers: the workers, which all call it; None without a cluster.
        write: called on each worker.
    """
    what = f"save_sharded to {str(directory)!r}"
    is_chief = workers is None or workers.is_chief
    if is_chief:
        directory.mkdir(parents=True, exist_ok=True)
        for rest in directory.glob(f"*{_PART}"):
            shutil.rmtree(rest)
    number = _of_chief(workers, what, max(_finished(directory), default=0) + 1)
    # A name that cannot be predicted, so that no link can be planted there.
    name = f"{number}-{secrets.token_hex(8)}{_PART}"
    if is_chief:
        # Before the others know it, of which some writers make the folder.
        (directory / name).mkdir()
    part = directory / _of_chief(workers, what, name)
    groups = checkpointed_variables(model)
    write(part, groups)
    if is_chief:
        (part / _VARIABLES).write_text(json.dumps(described(groups)))
        part.rename(directory / str(number))
        for old in sorted(_finished(directory))[:-keep]:
            shutil.rmtree(directory / str(old))
    # No process goes on before the checkpoint is complete.
    _of_chief(workers, f"the end of {what}", number)
    return number


def load_numbered(
    model: Any, directory: Path, workers: Communicator | None, read: OfVariables
) -> int:
    """Reads the latest checkpoint; returns its number.

    Args:
        model: the model.
        directory: the folder of the checkpoints.
        workers: the workers, which all call it; None without a cluster.
        read: called on each worker.
    """
    check_directory(directory)
    what = f"load_sharded from {str(directory)!r}"
    number = _of_chief(workers, what, max(_finished(directory), default=0))
    if number == 0:
        raise no_checkpoint(directory)
    folder = directory / str(number)
    groups = checkpointed_variables(model)
    saved = _described_in(folder / _VARIABLES)
    check_same_variables(groups, saved, directory)
    read(folder, groups)
    return number


def _described_in(file: Path) -> Any:
    try:
        return json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"Checkpoint {str(file.parent)!r} is damaged: {file.name}: {error}. Remove "
            "its folder to read the checkpoint before it."
        ) from error


def _of_chief(workers: Communicator | None, what: str, value: _Value) -> _Value:
    """The chief's number or string, on all workers."""
    if workers is None:
        return value
    return workers.group.gather_values(what, value)[0]  # type: ignore[no-any-return]


def _finished(directory: Path) -> list[int]:
    """The numbers of the complete checkpoints in a folder."""
    if not directory.is_dir():
        return []
    return [int(path.name) for path in directory.iterdir() if path.name.isdigit()]
