"""Values of a model's variables in memory: copies, comparison, restoration."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np

from keras_strategies.errors import CheckpointError


def model_state(model: Any) -> dict[str, Any]:
    """Copies the values of a model, its optimizer, its metrics and its seeds.

    Returns:
        dict of "optimizer", its class; "variables", their names and shapes; and
        "values", a list of arrays.
    """
    variables = _variables_of(model)
    return {
        "optimizer": _optimizer_name(model),
        "variables": [_described(variable) for variable in variables],
        "values": [copied_value(variable) for variable in variables],
    }


def check_model(model: Any, state: dict[str, Any]) -> None:
    """Compares a model with the one that a snapshot was made of.

    Raises:
        ValueError: with the first difference.
    """
    own = [_described(variable) for variable in _variables_of(model)]
    saved = state["variables"]
    for mine, other in zip(own, saved, strict=False):
        if _identity(mine) != _identity(other):
            raise CheckpointError(
                "The snapshot is of another model. The first difference: the model "
                f"has variable {_text(mine)}, the snapshot {_text(other)} in its "
                f"place. {_ADVICE}"
            )
    if len(own) != len(saved):
        longer, name = (own, "model") if len(own) > len(saved) else (saved, "snapshot")
        first = longer[min(len(own), len(saved))]
        raise CheckpointError(
            f"The snapshot is of another model. The first difference: only the {name} "
            f"has variable {_text(first)}. {_ADVICE}"
        )
    if _optimizer_name(model) != state["optimizer"]:
        raise CheckpointError(
            "The snapshot is of another model. The first difference: the optimizer is "
            f"{_optimizer_name(model)}, in the snapshot {state['optimizer']}. "
            f"{_ADVICE}"
        )


def restore_model(model: Any, state: dict[str, Any]) -> None:
    """Assigns the values of a snapshot to the variables of a model."""
    variables = _variables_of(model)
    for variable, value in zip(variables, state["values"], strict=True):
        variable.assign(value)


def _variables_of(model: Any) -> list[Any]:
    """The variables of a model, its optimizer and its metrics, each once."""
    found = [*model.variables, *model.metrics_variables]
    if getattr(model, "optimizer", None) is not None:
        found += model.optimizer.variables
    return list({id(variable): variable for variable in found}.values())


_ADVICE = "Use another directory, or the model that the snapshot was made of."


def _optimizer_name(model: Any) -> str:
    optimizer = getattr(model, "optimizer", None)
    name = type(optimizer).__name__
    inner = getattr(optimizer, "inner_optimizer", None)
    return name if inner is None else f"{name} of {type(inner).__name__}"


def _described(variable: Any) -> dict[str, Any]:
    return {"path": variable.path, "shape": list(variable.shape)}


def _identity(described: dict[str, Any]) -> tuple[Any, ...]:
    # Names contain numbers that depend on the layers created before.
    name = re.sub(r"_\d+", "", described["path"].rpartition("/")[2])
    return name, described["shape"]


def _text(described: dict[str, Any]) -> str:
    return f"{described['path']!r} of shape {tuple(described['shape'])}"


def copied_value(variable: Any) -> Any:
    """A copy that later steps leave unchanged; bfloat16 as float32."""
    return in_numpy_dtype(np.array(keras.ops.convert_to_numpy(variable), copy=True))


def in_numpy_dtype(array: Any) -> np.ndarray:
    """An array, in float32 if NumPy has not got its dtype, such as bfloat16."""
    array = np.asarray(array)
    # `isbuiltin` is 0 for dtypes of NumPy that come from pickles, too.
    is_of_numpy = array.dtype.type.__module__ == "numpy"
    return array if is_of_numpy else array.astype("float32")
