"""Sharded checkpoints with Orbax: each device writes and reads its own shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from keras_strategies.errors import BackendError, CheckpointError
from keras_strategies.keras_compat.variables.values import raw_value

_STATE, _VARIABLES = "state", "variables"


def save(model: Any, directory: Path, keep: int) -> int:
    """Writes a checkpoint; returns its number.

    Orbax writes into a temporary directory and renames it at the end.
    """
    ocp = _orbax()
    groups = _groups(model)
    state = {
        group: {_key(i): raw_value(variable) for i, variable in enumerate(variables)}
        for group, variables in groups.items()
        if variables
    }
    names = {
        group: [_about(variable) for variable in variables]
        for group, variables in groups.items()
    }
    with _manager(directory, keep) as manager:
        number = (manager.latest_step() or 0) + 1
        manager.save(
            number,
            args=ocp.args.Composite(
                **{
                    _STATE: ocp.args.StandardSave(state),
                    _VARIABLES: ocp.args.JsonSave(names),
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
    if not directory.is_dir():
        raise CheckpointError(
            f"There is no directory {str(directory)!r}. Pass the directory that was "
            "given to `save_sharded`."
        )
    with _manager(directory, None) as manager:
        number = manager.latest_step()
        if number is None:
            raise CheckpointError(
                f"{str(directory)!r} has no finished checkpoint. `save_sharded` "
                "writes them; for `.keras` files use `keras.models.load_model`."
            )
        about = manager.restore(
            number, args=ocp.args.Composite(**{_VARIABLES: ocp.args.JsonRestore()})
        )[_VARIABLES]
        groups = _groups(model)
        _check(groups, about, directory)
        wanted = {
            group: {
                _key(i): jax.ShapeDtypeStruct(
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
            variable.assign(found[group][_key(i)])
    return int(number)


def _groups(model: Any) -> dict[str, list[Any]]:
    optimizer = getattr(model, "optimizer", None)
    return {
        "model": list(model.variables),
        "optimizer": [] if optimizer is None else list(optimizer.variables),
    }


def _check(groups: dict[str, list[Any]], about: Any, directory: Path) -> None:
    for group, variables in groups.items():
        own = [_about(variable) for variable in variables]
        saved = about[group]
        # Shapes only: names are numbered within a process, as in dense and dense_1.
        if [shape for _, shape in own] == [list(shape) for _, shape in saved]:
            continue
        difference = next(
            (
                f"variable {i} is {a[0]!r} of shape {a[1]} here and {b[0]!r} of shape "
                f"{b[1]} in the checkpoint"
                for i, (a, b) in enumerate(zip(own, saved, strict=False))
                if a[1] != list(b[1])
            ),
            f"there are {len(own)} variables here and {len(saved)} in the checkpoint",
        )
        advice = "Build the optimizer" if not own and saved else "Create the same model"
        raise CheckpointError(
            f"The checkpoint in {str(directory)!r} is of another model. In the {group} "
            f"{difference}. {advice} before `load_sharded`."
        )


def _about(variable: Any) -> list[Any]:
    return [variable.path, list(variable.shape)]


def _key(number: int) -> str:
    return f"{number:06d}"


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
