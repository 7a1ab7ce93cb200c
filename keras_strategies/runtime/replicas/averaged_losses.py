"""Losses that are means over the rows of one replica, in loops with `run`.

Gradients are summed over replicas, so those of such losses are too large by the number
of replicas. A loss is followed by identity, from what averages it to the gradients that
an optimizer receives: where code divides it, or averages its gradients, it is another
tensor, and nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.runtime import context
from keras_strategies.runtime.state import run_state
from keras_strategies.user_warnings import user_line, warn_user

_MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")
_WARNED = "_has_warned_of_averaged_loss"


def note_loss(loss: Any, weights: Any, value: Any) -> Any:
    """Notes the value of a `keras.losses.Loss`, if it is a mean over a replica's rows.

    Not with sample weights: these may contain the division by the global batch.
    """
    if weights is None and getattr(loss, "reduction", None) in _MEANS:
        state = run_state.enclosing()
        if state is not None:
            state.averages.note(value)
    return value


def noting_averages(fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    """A function for `value_and_grad` that notes whether its loss is such a mean."""

    def noted(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        state = run_state.enclosing()
        if state is not None:
            loss = result[0] if has_aux else result
            state.averages.differentiated = state.averages.has(loss)
        return result

    return noted


def note_gradients(gradients: Sequence[Any], fn: Callable[..., Any]) -> None:
    """Notes gradients of the loss that `noting_averages` has seen last.

    Args:
        gradients: a tensor or None for each variable.
        fn: the function that has returned the loss.
    """
    state = run_state.enclosing()
    if state is not None and state.averages.differentiated:
        state.averages.differentiated = False
        # TensorFlow converts code, which leaves the names of functions.
        line = f"{user_line()}, of `{getattr(fn, '__name__', fn)}`,"
        for gradient in gradients:
            if gradient is not None:
                state.averages.note_gradient(gradient, line)


def check_gradients(gradients: Sequence[Any]) -> None:
    """Warns where an optimizer sums gradients of a mean over a replica's rows."""
    state = run_state.enclosing()
    if state is None:
        return
    for gradient in gradients:
        line = state.averages.line_of(gradient)
        if line is not None:
            warn_of_averaged_loss(line)
            return


def warn_of_averaged_loss(line: str) -> None:
    """Warns, once for a strategy.

    Args:
        line: where gradients of the loss are computed, and of which function.
    """
    replica = context.current_replica()
    if (
        replica is None
        or replica.num_replicas_in_sync < 2
        or not replica.shows_warnings
        or getattr(replica.strategy, _WARNED, False)
    ):
        return
    setattr(replica.strategy, _WARNED, True)
    count = replica.num_replicas_in_sync
    warn_user(
        f"The loss that is differentiated at {line} is a mean over the rows of one "
        f"replica. Gradients are summed over {count} replicas, so they are {count} "
        "times as large as on one device. Create the loss with `reduction=None` (in "
        'Torch, `reduction="none"`) and pass its values to `ks.compute_average_loss`, '
        "which divides by the rows of the global batch."
    )
