"""Parts of optimizers: inner ones, variables, clipping and weight decay."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras


def optimizers_of(optimizer: Any) -> list[Any]:
    """The inner optimizers of a `MultiOptimizer` (Keras 3.15).

    Args:
        optimizer: a Keras optimizer.

    Returns:
        list of optimizers, empty for one that updates variables itself.
    """
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        return list(optimizer.optimizers)
    return []


def trained_variables(optimizer: Any) -> Any:
    """The variables that an optimizer was built for.

    Keras 3.15: `BaseOptimizer._trainable_variables`.
    """
    return optimizer._trainable_variables


def step_variable(optimizer: Any) -> Any:
    """The variable that counts an optimizer's steps.

    Keras 3.15: `BaseOptimizer.iterations` is a quotient of it, a tensor, where
    gradients are accumulated.
    """
    return optimizer.variables[0]


def variable_rate(optimizer: Any) -> float | None:
    """The learning rate, where it is a number that callbacks may change.

    Keras 3.15: `BaseOptimizer._learning_rate`; that of a `LossScaleOptimizer` is 0.

    Args:
        optimizer: a Keras optimizer, or None.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = getattr(inner, "_learning_rate", None)
    is_variable = isinstance(rate, keras.Variable)
    return float(keras.ops.convert_to_numpy(rate)) if is_variable else None


def set_rate(optimizer: Any, rate: float) -> None:
    """Assigns the learning rate that `variable_rate` returns."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner._learning_rate.assign(rate)


def is_optimizer(made: Any) -> bool:
    """Whether something is an optimizer of Keras."""
    return isinstance(made, keras.optimizers.Optimizer)


def weight_decay_applies(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer decays a variable (`_use_weight_decay` of Keras 3.15)."""
    return bool(optimizer._use_weight_decay(variable))


def set_weight_decay(optimizer: Any, applies: dict[int, bool]) -> None:
    """Sets whether an optimizer decays variables, by the `id` of each."""

    def is_decayed(variable: Any) -> bool:
        return applies.get(id(variable), True)

    decay = optimizer._apply_weight_decay

    def apply(variables: Any) -> None:
        # Keras 3.15 on Torch raises if no variable is decayed.
        if any(map(is_decayed, variables)):
            decay(variables)

    optimizer._use_weight_decay = is_decayed
    optimizer._apply_weight_decay = apply


@contextlib.contextmanager
def updating_by(
    optimizer: Any, methods: Mapping[str, Callable[..., Any]]
) -> Iterator[None]:
    """Replaces methods of an optimizer for a block of code.

    An inner block changes nothing, and methods of the user's stay.

    Keras 3.15: `update_step(gradient, variable, learning_rate)`, the variable a
    `tf.Variable` on TensorFlow; `_apply_weight_decay(variables)`;
    `_backend_apply_gradients(gradients, variables)`; `_clip_gradients(gradients)`;
    `_backend_update_step(gradients, variables, learning_rate)`.

    Args:
        optimizer: a Keras optimizer.
        methods: dict from the name of a method to a callable of Keras's and its
            arguments.
    """
    replaced = {
        name: functools.partial(replacement, getattr(optimizer, name))
        for name, replacement in methods.items()
        if name not in vars(optimizer)
    }
    for name, own in replaced.items():
        # Neither Keras nor TensorFlow tracks the attribute.
        object.__setattr__(optimizer, name, own)
    try:
        yield
    finally:
        for name in replaced:
            object.__delattr__(optimizer, name)


#: Each entry of a variable and its slots is updated from those at its place.
_OF_ENTRIES = frozenset(
    kind.update_step
    for kind in (
        keras.optimizers.SGD,
        keras.optimizers.RMSprop,
        keras.optimizers.Adam,
        keras.optimizers.Adadelta,
        keras.optimizers.Adagrad,
        keras.optimizers.Adamax,
        keras.optimizers.Nadam,
        keras.optimizers.Ftrl,
        keras.optimizers.Lion,
    )
)


def updates_entries(optimizer: Any) -> bool:
    """Whether an optimizer updates as one of Keras's that update each entry alone."""
    return type(optimizer).update_step in _OF_ENTRIES


def updates_rows(optimizer: Any) -> bool:
    """As `updates_entries`, with those whose slots begin with the variable's rows."""
    averaging = keras.optimizers.ScheduleFreeAdamW.update_step
    return updates_entries(optimizer) or type(optimizer).update_step is averaging


def keeps_without_gradient(optimizer: Any) -> bool:
    """Whether a row and its slots stay as they are where the gradient is zero."""
    step = type(optimizer).update_step
    if step is keras.optimizers.SGD.update_step:
        return not optimizer.momentum
    return step is keras.optimizers.Adagrad.update_step


def optimizers_in(model: Any) -> list[Any]:
    """The optimizers that a model has as attributes, and those inside of them."""
    found = [value for value in vars(model).values() if is_optimizer(value)]
    for optimizer in found:
        inner = getattr(optimizer, "inner_optimizer", None)
        found += [*optimizers_of(optimizer), *([] if inner is None else [inner])]
    return found


def clip_gradients(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Gradients clipped by an optimizer, by their norms (`_clip_gradients`)."""
    return list(optimizer._clip_gradients(gradients))


def disable_clipping(optimizer: Any) -> None:
    """Disables the clipping of gradients by an optimizer."""
    optimizer._clip_gradients = lambda gradients: gradients


def is_overwritten(variable: Any) -> bool:
    """Whether an optimizer overwrites a variable by its gradient.

    Scales and histories of float8 layers are: their "gradient" is a new value, of which
    the largest of several counts, as in Keras's accumulation of gradients. Keras 3.15:
    `Variable.overwrite_with_gradient`.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def overwritten_by_apply(optimizer: Any, variables: Sequence[Any] | None) -> list[int]:
    """The positions in `optimizer.apply(grads, variables)` of such variables."""
    used = trained_variables(optimizer) if variables is None else variables
    return [i for i, variable in enumerate(used) if is_overwritten(variable)]
