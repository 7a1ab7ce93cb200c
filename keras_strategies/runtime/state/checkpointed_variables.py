"""The variables in a sharded checkpoint, and their description in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keras_strategies.errors import CheckpointError


def checkpointed_variables(model: Any) -> dict[str, list[Any]]:
    """The variables of a model and of its optimizer, under `"model"`, `"optimizer"`."""
    optimizer = getattr(model, "optimizer", None)
    return {
        "model": list(model.variables),
        "optimizer": [] if optimizer is None else list(optimizer.variables),
    }


def described(groups: dict[str, list[Any]]) -> dict[str, list[list[Any]]]:
    """Path and shape of each variable, for JSON."""
    return {group: list(map(_about, variables)) for group, variables in groups.items()}


def key_of(number: int) -> str:
    """The name of the n-th variable of a group in a checkpoint."""
    return f"{number:06d}"


def check_directory(directory: Path) -> None:
    """Raises `CheckpointError` if there is no such directory."""
    if not directory.is_dir():
        raise CheckpointError(
            f"There is no directory {str(directory)!r}. Pass the directory that was "
            "given to `save_sharded`."
        )


def no_checkpoint(directory: Path) -> CheckpointError:
    """The error for a directory without a finished checkpoint."""
    return CheckpointError(
        f"{str(directory)!r} has no finished checkpoint. `save_sharded` writes them; "
        "for `.keras` files use `keras.models.load_model`."
    )


def check_same_variables(
    groups: dict[str, list[Any]], saved: dict[str, Any], directory: Path
) -> None:
    """Compares variables with what `described` gave when they were saved.

    Raises:
        CheckpointError: with the first difference.
    """
    for group, variables in groups.items():
        own, others = list(map(_about, variables)), saved[group]
        # Shapes only: names are numbered within a process, as in dense and dense_1.
        if [shape for _, shape in own] == [list(shape) for _, shape in others]:
            continue
        difference = next(
            (
                f"variable {i} is {a[0]!r} of shape {a[1]} here and {b[0]!r} of shape "
                f"{b[1]} in the checkpoint"
                for i, (a, b) in enumerate(zip(own, others, strict=False))
                if a[1] != list(b[1])
            ),
            f"there are {len(own)} variables here and {len(others)} in the checkpoint",
        )
        is_unbuilt = others and not own
        advice = "Build the optimizer" if is_unbuilt else "Create the same model"
        raise CheckpointError(
            f"The checkpoint in {str(directory)!r} is of another model. In the {group} "
            f"{difference}. {advice} before `load_sharded`."
        )


def _about(variable: Any) -> list[Any]:
    return [variable.path, list(variable.shape)]
