"""Sharded checkpoints with Orbax: each device writes and reads its own shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from keras_strategies.errors import BackendError
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.state.checkpointed_variables import (
    check_directory,
    check_same_variables,
    checkpointed_variables,
    described,
    key_of,
    no_checkpoint,
)

_STATE, _VARIABLES = "state", "variables"


def save(model: Any, directory: Path, keep: int) -> int:
    """Writes a checkpoint; returns its number.

    Orbax writes into a temporary directory and renames it at the end.
    """
    ocp = _orbax()
    groups = checkpointed_variables(model)
    state = {
        group: {key_of(i): raw_value(variable) for i, variable in enumerate(variables)}
        for group, variables in groups.items()
        if variables
    }
    with _manager(directory, keep) as manager:
        number = (manager.latest_step() or 0) + 1
        manager.save(
            number,
            args=ocp.args.Composite(
                **{
                    _STATE: ocp.args.StandardSave(state),
                    _VARIABLES: ocp.args.JsonSave(described(groups)),
                }
            ),
        )
        manager.wait_until_finished()
    return int(number)


def load(
    model: Any, directory: Path, sharding_of: Callable[[Any], jax.sharding.Sharding]
) -> int:
    """Reads the latest checkpoint into a model's variables; returns its number.

    Args:
        model: the model, built, and its optimizer too.
        directory: the directory that `save` wrote to.
        sharding_of: returns the sharding of a variable; a device reads its own shards
            only.
    """
    ocp = _orbax()
    check_directory(directory)
    with _manager(directory, None) as manager:
        number = manager.latest_step()
        if number is None:
            raise no_checkpoint(directory)
        about = manager.restore(
            number, args=ocp.args.Composite(**{_VARIABLES: ocp.args.JsonRestore()})
        )[_VARIABLES]
        groups = checkpointed_variables(model)
        check_same_variables(groups, about, directory)
        wanted = {
            group: {
                key_of(i): jax.ShapeDtypeStruct(
                    tuple(variable.shape),
                    raw_value(variable).dtype,
                    sharding=sharding_of(variable),
                )
                for i, variable in enumerate(variables)
            }
            for group, variables in groups.items()
            if variables
        }
        found = manager.restore(
            number,
            args=ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(wanted)}),
        )[_STATE]
    for group, variables in groups.items():
        for i, variable in enumerate(variables):
            variable.assign(found[group][key_of(i)])
    return int(number)


@contextlib.contextmanager
def _manager(directory: Path, keep: int | None) -> Iterator[Any]:
    ocp = _orbax()
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, create=keep is not None, enable_async_checkpointing=False
    )
    with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
        yield manager


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise BackendError(
            "Sharded checkpoints are written by Orbax, which is not installed. "
            'Install it with `pip install "keras-strategies[checkpoint]"`, or use '
            "`model.save`, which gathers every variable in one file."
        ) from error
    return orbax.checkpoint
