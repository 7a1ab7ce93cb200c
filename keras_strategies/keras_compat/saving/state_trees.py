"""State trees, as `keras.callbacks.OrbaxCheckpoint` saves them, onto variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from keras_strategies.errors import CheckpointError
from keras_strategies.keras_compat.models.building import build_optimizer

_NUMBER = re.compile(r"(.*?)(?:_(\d+))?$")


def tree_of_model(model: Any, tree: Any) -> dict[str, dict[str, Any]]:
    """A state tree with the paths of a model's variables; raises if one has no match.

    Keras 3.15 and 3.16: `Model.set_state_tree` assigns to variables with a path in
    the tree and ignores the others. Paths change from model to model: Keras
    numbers layers that have no names, and a `Sequential` that is made from its config
    has no name of its own in them. So `load_model` and `load_weights` of an Orbax
    checkpoint may leave a model as it was initialized.
    """
    build_optimizer(model)
    return _renamed(model, tree)


def _renamed(model: Any, tree: Any) -> dict[str, dict[str, Any]]:
    """The tree, flat, with the paths of the model's variables."""
    flat = {key: _flat(values) for key, values in tree.items()}
    found: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    for key in ("trainable_variables", "non_trainable_variables"):
        if key in flat:
            pairs = _pairs(list(flat[key]), getattr(model, key), flat[key])
            names |= pairs
            found[key] = {pairs[path]: value for path, value in flat[key].items()}
    if "optimizer_variables" in flat and model.optimizer is not None:
        # A slot has the path of its variable in its name.
        slots = flat["optimizer_variables"]
        joined = {
            old.replace("/", "_"): new.replace("/", "_") for old, new in names.items()
        }
        renamed = {_slot(path, joined): value for path, value in slots.items()}
        own = {_last(v.path): v.path for v in model.optimizer.variables}
        if not _is_unbuilt(slots, joined, own):
            _check(set(own), set(renamed), "optimizer")
        found["optimizer_variables"] = {own[k]: v for k, v in renamed.items()}
    if "metrics_variables" in flat:
        # Metrics are reset in each epoch, and some are made in the first one.
        found["metrics_variables"] = flat["metrics_variables"]
    return found


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{key}/")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _last(path: str) -> str:
    return path.rsplit("/", 1)[-1]


def _is_unbuilt(
    slots: dict[str, Any], joined: dict[str, str], own: dict[str, str]
) -> bool:
    """Whether an optimizer was saved before it was built, with its settings only.

    Then Keras assigns these and leaves the slots as they are. The first part of a path
    is the optimizer's name, a number aside.
    """
    names = {_order(path)[0][0] for path in slots}
    return (
        names == {_order(path)[0][0] for path in own.values()}
        and {_last(path) for path in slots} <= set(own)
        and not any(
            _last(path).startswith(f"{old}_") for path in slots for old in joined
        )
    )


def _slot(path: str, joined: dict[str, str]) -> str:
    name = _last(path)
    fitting = [old for old in joined if name.startswith(f"{old}_")]
    if not fitting:
        return name
    old = max(fitting, key=len)
    return joined[old] + name.removeprefix(old)


def _order(path: str) -> list[tuple[str, int]]:
    """Sorts `dense_2` before `dense_10`, and `dense` before both."""
    parts = (_NUMBER.fullmatch(part) for part in path.split("/"))
    return [(part[1], int(part[2] or 0)) for part in parts if part is not None]


def _pairs(
    paths: Sequence[str], variables: Sequence[Any], values: dict[str, Any]
) -> dict[str, str]:
    """The path of a variable for each path of the tree."""
    own = {variable.path: variable for variable in variables}
    if set(own) == set(paths):
        return {path: path for path in paths}
    kinds = [_without_root(list(names)) for names in (paths, own)]
    if len(own) == len(paths):
        pairs = [
            [full for _, full in sorted((_order(short), full) for short, full in kind)]
            for kind in kinds
        ]
        matched = dict(zip(*pairs, strict=True))
        if all(
            _last(old) == _last(new)
            and tuple(getattr(values[old], "shape", ())) == tuple(own[new].shape)
            for old, new in matched.items()
        ):
            return matched
    _check(set(own), set(paths), "model")
    raise AssertionError("unreachable: equal paths were returned above")


def _without_root(paths: list[str]) -> list[tuple[str, str]]:
    """Pairs of a path without a common model name at its start, and the full path."""
    roots = [path.split("/", 1)[0] for path in paths if path.count("/") > 1]
    root = f"{roots[0]}/" if roots and len(set(roots)) == 1 else ""
    return [(path.removeprefix(root), path) for path in paths]


def _check(own: set[str], given: set[str], what: str) -> None:
    if own == given:
        return
    raise CheckpointError(
        f"The checkpoint's variables are not those of the {what}. Only in the "
        f"checkpoint: {sorted(given - own)[:5]}; only in the {what}: "
        f"{sorted(own - given)[:5]}. An OrbaxCheckpoint finds variables by their "
        "paths: give layers names, or load a file of `model.save`."
    )
