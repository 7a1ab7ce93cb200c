"""State of Keras objects that are sent to other processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras

from keras_strategies.keras_compat.optimizers.optimizer_classes import optimizer_kind
from keras_strategies.keras_compat.optimizers.optimizer_parts import is_optimizer
from keras_strategies.keras_compat.strategy_attribute import STRATEGY_ATTRIBUTE

# Attributes that are not sent with a model: compiled functions, arrays of a loop, and
# what `adapt` has counted.
_NOT_SENT = (
    "train_function",
    "test_function",
    "predict_function",
    "_eval_epoch_iterator",
    "_jax_state",
    "token_counts",
    "token_document_counts",
)


def is_keras_object(made: Any) -> bool:
    """Whether an object is a layer, model, optimizer, metric or another saveable one.

    Keras 3.15: `KerasSaveable`, and `Operation`, which layers and operations share.
    """
    from keras.src.saving.keras_saveable import KerasSaveable

    return isinstance(made, (KerasSaveable, keras.Operation))


def object_state(made: Any) -> dict[str, Any] | None:
    """The attributes of a Keras object, for its copy in another process.

    Keras 3.15: `KerasSaveable.__reduce__` would save the values of all variables and
    make others; here identities are preserved, and variables are references.

    Returns:
        dict of attributes; None for objects that pickle handles.
    """
    if not is_keras_object(made):
        return None
    state = {
        name: value
        for name, value in vars(made).items()
        if not name.startswith("_self_")
        and name not in (STRATEGY_ATTRIBUTE, "_obj_reference_counts_dict")
    }
    for name in _NOT_SENT:
        if name in state:
            state[name] = None
    if "_torch_params" in state.get("_modules", {}):
        state["_modules"] = dict(state["_modules"])
        del state["_modules"]["_torch_params"]
    return state


def class_of(made: Any) -> Any:
    """The class of a Keras object, as the user wrote or chose it."""
    return optimizer_kind(made) if is_optimizer(made) else made.__class__


def rebuilt(made: Any) -> tuple[Any, ...] | None:
    """The reduction of Keras objects that pickle cannot rebuild; None for the rest.

    Keras 3.15: `DynamicBackend`, which preprocessing layers hold, reads its own
    attributes before it has any.
    """
    from keras.src.utils.backend_utils import DynamicBackend

    if isinstance(made, DynamicBackend):
        return DynamicBackend, (vars(made)["_backend"],)
    return None


def container_state(made: Any) -> tuple[Any, ...] | None:
    """The contents and the tracker of a tracked container; None for other objects.

    Keras 3.15: containers and trackers of `keras.src.utils.tracking` store the `id`
    of what they track.
    """
    from keras.src.utils.tracking import Tracker

    if isinstance(made, Tracker):
        return (None, dict(vars(made)))
    # It may have no tracker any more.
    is_tracked = hasattr(made, "tracker") and isinstance(made, (dict, list, set))
    if not is_tracked or not type(made).__module__.startswith("keras."):
        return None
    return (dict(made) if isinstance(made, dict) else list(made), made.tracker)


def fill_container(made: Any, state: tuple[Any, ...]) -> None:
    """Fills a recreated container."""
    contents, rest = state
    if contents is None:
        vars(made).update(rest)
        made.stored_ids = {name: set() for name in made.config}
        return
    made.tracker = None
    if isinstance(made, dict):
        dict.update(made, contents)
    elif isinstance(made, list):
        list.extend(made, contents)
    else:
        set.update(made, contents)
    made.tracker = rest


def renew_identities(made: Iterable[Any]) -> None:
    """Updates the `id` of their parts in recreated trackers and optimizers.

    Keras 3.15: `Tracker.stored_ids`, `BaseOptimizer._trainable_variables_indices`.
    """
    from keras.src.utils.tracking import Tracker

    for each in made:
        if isinstance(each, Tracker):
            each.stored_ids = {
                name: {id(value) for value in store}
                for name, (_, store) in each.config.items()
            }
        elif is_optimizer(each):
            each._trainable_variables_indices = {
                each._var_key(variable): i
                for i, variable in enumerate(each._trainable_variables)
            }
