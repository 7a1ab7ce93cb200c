"""Settings of `compile` in snapshots, and what a script has changed of them."""

from __future__ import annotations

import json
import re
from typing import Any

import keras

from keras_strategies.user_warnings import warn_user

#: Names, and what counts at the begin of a training only.
_IGNORED = ("name", "initial_scale")


def compiled_settings(model: Any) -> dict[str, Any]:
    """The settings of a model's optimizer, its loss and its weights, as JSON values."""
    found = {"loss": _as_json(model.loss)}
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None:
        inner = getattr(optimizer, "inner_optimizer", None)
        for name, value in optimizer.get_config().items():
            if name not in _IGNORED and name != "inner_optimizer":
                # Those of the optimizer inside count.
                found[name] = _as_json(value)
        optimizer = inner
    return found


def changed_settings(own: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """The saved values of settings that differ, by name."""
    return {
        name: saved.get(name)
        for name in dict.fromkeys((*own, *saved))
        if not _is_equal(own.get(name), saved.get(name))
    }


def warn_of_changes(changed: dict[str, Any], own: dict[str, Any]) -> None:
    """Names changed settings in a warning."""
    if not changed:
        return
    texts = [
        f"{name} is {_short(own.get(name))}, in the snapshot {_short(saved)}"
        for name, saved in changed.items()
    ]
    warn_user(
        "`Resume` continues a training with other settings of `compile` than the "
        f"snapshot's: {'; '.join(texts)}. Those of the script count from this step on. "
        "For the numbers of a run without interruption, use the earlier ones; to train "
        "from the beginning, another directory."
    )


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, (int, float)):
        # Another backend may have computed it.
        return abs(one - other) <= 1e-6 * abs(one)
    return bool(one == other)


def _short(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 300 else f"{text[:300]}..."


def _as_json(value: Any) -> Any:
    """A number or a text, which differs where the setting does."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return json.dumps(_described(value), sort_keys=True)


def _described(value: Any) -> Any:
    if isinstance(value, dict):
        # Of serialized objects, a class and its settings.
        names = [n for n in value if n not in ("module", "registered_name", *_IGNORED)]
        return {str(name): _described(value[name]) for name in names}
    if isinstance(value, (list, tuple)):
        return [_described(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, keras.Loss):
        # Some settings are in the text only, such as the delta of `Huber`.
        text = re.sub(r" at 0x[0-9a-f]+", "", repr(value))
        return [type(value).__name__, _described(value.get_config()), text]
    return getattr(value, "__name__", type(value).__name__)
