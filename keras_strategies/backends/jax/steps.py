"""The functions that Keras's loops call, around one step.

# Why state is noted so often

A compiled step donates its state: it writes the new values over the old ones, and
the arrays that went in are gone. Keras, for its part, takes the values away from
the variables while a loop runs. An exception between the two, bad data, Ctrl-C,
would leave a model without weights. So the state is noted before a step asks for
its batch, and again when the step returns, with no bytecode in between at which
Python could raise a KeyboardInterrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_strategies import keras_compat

# `step(state, batch)` returns `(outputs, state)`.
Step = Callable[[Any, Any], tuple[Any, Any]]


def keras_step(model: Any, kind: str) -> Step:
    """One step as Keras or the user wrote it, a pure function."""
    if kind != "predict":
        return getattr(model, f"{kind}_step")

    def predict_step(state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, non_trainable = model.predict_step(state, batch)
        return outputs, (state[0], non_trainable)

    return predict_step


def compiles(model: Any) -> bool:
    """Whether the model's steps are compiled."""
    return bool(model.jit_compile) and not model.run_eagerly


def noting(model: Any, kind: str, program: Step) -> Step:
    """A compiled step whose new state is noted as soon as it exists.

    `list.extend` and `map` run in C, and so does a compiled program: an interrupt
    is raised before the call or when its result is in the list.
    """

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        results: list[Any] = []
        try:
            results.extend(map(program, (state,), (batch,)))
        finally:
            if results:
                keras_compat.record_jax_state(model, kind, results[0][1])
        return results[0]

    return step


def loop_function(model: Any, kind: str, step: Step) -> Callable[..., Any]:
    """What Keras calls for each item of its loop: one step, or several."""
    several = model.steps_per_execution

    def function(state: Any, batches: Iterator[Any]) -> tuple[Any, Any]:
        keras_compat.record_jax_state(model, kind, state)
        outputs, state = step(state, next(batches))
        if several == 1:
            return outputs, state
        every = [outputs]
        for _ in range(several - 1):
            try:
                batch = next(batches)
            except StopIteration:
                break
            outputs, state = step(state, batch)
            every.append(outputs)
        return (concatenated(every) if kind == "predict" else outputs), state

    return function


def concatenated(outputs: list[Any]) -> Any:
    """The rows of several batches' outputs."""
    return keras.tree.map_structure(
        lambda *parts: jax.numpy.concatenate(parts), *outputs
    )
