"""Compiled steps, and the functions around them that Keras's loops call.

# Recording the state

A compiled step donates its state: new values overwrite the old arrays. Keras empties
the variables while a loop runs. An exception between the two, bad data or Ctrl-C, would
leave a model without weights. So the state is recorded before a step reads its batch,
and again when it returns, with no bytecode in between at which Python could raise a
KeyboardInterrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras

from keras_strategies.engines.jax.fit.hlo_collectives import sent_bytes
from keras_strategies.keras_compat.backends.keras_on_jax import record_jax_state
from keras_strategies.keras_compat.models.layers import clear_losses
from keras_strategies.runtime.worker_steps import WorkerSteps

# `step(state, batch)` returns `(outputs, state)`.
Step = Callable[[Any, Any], tuple[Any, Any]]


def keras_step(model: Any, kind: str) -> Step:
    """The step of Keras or of the user, as a pure function."""

    def predict_step(state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, non_trainable = model.predict_step(state, batch)
        return outputs, (state[0], non_trainable)

    original = predict_step if kind == "predict" else getattr(model, f"{kind}_step")

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        # Layers of Keras 3.15 hold the `id`s of losses of earlier traces, and drop a
        # new loss with one of these ids.
        clear_losses(model)
        return original(state, batch)

    return step


def compiles(model: Any) -> bool:
    """Whether the model's steps are compiled."""
    return bool(model.jit_compile) and not model.run_eagerly


# Groups of the state that a program may overwrite: those that only its loop references.
# Unchanged weights are not donated: after a fit with moving averages the optimizer
# has the same arrays.
_DONATED = {"train": (0, 1, 2, 3), "test": (2,), "predict": ()}


def compiled(
    model: Any,
    kind: str,
    step: Step,
    state_sharding: Callable[[Sequence[jax.Array]], Any] | None = None,
    outputs: jax.sharding.Sharding | None = None,
    alternative: Step | None = None,
) -> Step:
    """A compiled step, whose new state is recorded as soon as it exists.

    Args:
        model: the model.
        kind: str, "train", "test" or "predict".
        step: the step to compile.
        state_sharding: returns the shardings of a donated group of arrays, equal to
            those that the next step is compiled for; None leaves them to JAX.
        outputs: the sharding of the outputs; None leaves it to JAX.
        alternative: an equivalent step with other collectives. The first batch
            determines which of the two sends fewer bytes, and is used.
    """
    donated = _DONATED[kind]
    programs: dict[tuple[int, ...], Callable[..., Any]] = {}
    chosen = [step] if alternative is None else []

    def program_for(state: Any, batch: Any) -> Callable[..., Any]:
        if not chosen:
            assert alternative is not None
            found = [jitted(state, each) for each in (step, alternative)]
            sent = [_sent(each.lower(*state, batch)) for each in found]
            best = sent.index(min(sent))
            chosen.append((step, alternative)[best])
            return found[best]
        return jitted(state, chosen[0])

    def jitted(state: Any, step: Step) -> Any:
        shardings = [
            state_sharding(group)
            if state_sharding is not None and i in donated
            else None
            for i, group in enumerate(state)
        ]
        return jax.jit(
            lambda *args: step(args[:-1], args[-1]),
            donate_argnums=donated,
            out_shardings=(outputs, tuple(shardings)),
        )

    def recording(state: Any, batch: Any) -> tuple[Any, Any]:
        results: list[Any] = []
        key = tuple(map(len, state))
        program = programs.get(key)
        if program is None:
            program = programs[key] = program_for(state, batch)
        try:
            # `extend` and `map` run in C, and so does a compiled program: an
            # interrupt is raised before the call or when its result is in the list.
            results.extend(map(program, *zip((*state, batch), strict=True)))
        finally:
            if results:
                record_jax_state(model, kind, results[0][1])
        return results[0]

    return recording


# Options of a compilation whose program is read and never run. Its collectives are
# those of the full compilation, at a third of the time. Names are those of XLA in
# JAX 0.10.
_ANALYSIS = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_gpu_autotune_level": 0,
}


def _sent(lowered: Any) -> int:
    """The bytes that a device sends in a run of a program."""
    found = sent_bytes(lowered.compile(_ANALYSIS).as_text() or "")
    return sum(nbytes for _, nbytes in found.values())


def with_outputs(step: Step, sharding: jax.sharding.Sharding) -> Step:
    """A step whose output arrays have a sharding."""
    moved = jax.jit(lambda outputs: outputs, out_shardings=sharding)

    def placing(state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, state = step(state, batch)
        return moved(outputs), state

    return placing


class Returned(tuple[Any, ...]):
    """A state that a step returned, and that Keras passes to the next step."""


def loop_function(
    model: Any,
    kind: str,
    step: Step,
    prepare: Callable[[Any], Any],
    steps: WorkerSteps | None = None,
) -> Callable[..., Any]:
    """The function that Keras calls for each item of its loop: one step, or several.

    `prepare` is called with a state read from the variables; `steps` are begun before
    each batch is read.
    """
    several = model.steps_per_execution

    def read(batches: Iterator[Any]) -> Any:
        return next(batches) if steps is None else steps.next_batch(batches)

    def function(state: Any, batches: Iterator[Any]) -> tuple[Any, Any]:
        if type(state) is not Returned:
            state = prepare(state)
        record_jax_state(model, kind, state)
        outputs, state = step(state, read(batches))
        if several == 1:
            return outputs, Returned(state)
        every = [outputs]
        for _ in range(several - 1):
            try:
                batch = read(batches)
            except StopIteration:
                break
            outputs, state = step(state, batch)
            every.append(outputs)
        return (concatenated(every) if kind == "predict" else outputs), Returned(state)

    return function


def unshared(state: Any) -> tuple[Any, ...]:
    """The state without aliases: repeated arrays are copied.

    A program cannot donate an array twice. In Keras 3.15 variables share arrays after a
    `fit` with `use_ema=True`.
    """
    seen: set[int] = set()

    def own(array: Any) -> Any:
        if id(array) in seen:
            return array.copy()
        seen.add(id(array))
        return array

    return tuple([own(array) for array in group] for group in state)


def concatenated(outputs: list[Any]) -> Any:
    """The rows of several batches' outputs."""
    return keras.tree.map_structure(
        lambda *parts: jax.numpy.concatenate(parts), *outputs
    )
