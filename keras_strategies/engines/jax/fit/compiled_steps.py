"""Compiled steps, and the functions around them that Keras's loops call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies.communication.worker_steps import WorkerSteps
from keras_strategies.engines.jax.batch_placement import JaxBatchPlacer
from keras_strategies.engines.jax.grouped_convolutions import convolutions_by_rows
from keras_strategies.engines.jax.padded_rows import (
    GatherRows,
    is_padded,
    outputs_on_host,
    pad_outputs,
    without_padding,
)
from keras_strategies.engines.jax.recorded_results import call_recorded
from keras_strategies.engines.jax.workers.awaited_program import AwaitedProgram
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.keras_compat.backends.keras_on_jax import record_jax_state
from keras_strategies.keras_compat.models.layers import clear_losses
from keras_strategies.timeline import recording

# `step(state, batch)` returns `(outputs, state)`.
Step = Callable[[Any, Any], tuple[Any, Any]]


def keras_step(model: Any, kind: str, rows: jax.NamedSharding | None = None) -> Step:
    """The step of Keras or of the user, as a pure function of true rows.

    Args:
        model: the model.
        kind: str, "train", "test" or "predict".
        rows: the sharding of rows; None on one device.
    """

    def predict_step(state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, non_trainable = model.predict_step(state, batch)
        return outputs, (state[0], non_trainable)

    original = predict_step if kind == "predict" else getattr(model, f"{kind}_step")

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        # Layers of Keras 3.15 store the ids of losses of earlier traces, and drop a new
        # loss with one of these ids.
        clear_losses(model)
        traced = any(isinstance(a, jax.core.Tracer) for a in jax.tree.leaves(batch))
        with convolutions_by_rows(rows if traced else None):
            return original(state, without_padding(batch))

    return step


def with_sharded_outputs(
    step: Step, sharding: jax.NamedSharding, spans_workers: bool
) -> Step:
    """A compiled step that leaves the rows of its outputs on their devices.

    Of one process, outputs of batches that divide are JAX arrays as XLA shards them.

    Args:
        step: the step.
        sharding: the sharding of rows.
        spans_workers: whether the devices are those of several workers.
    """

    def sharded(state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, new = step(state, batch)
        leaves = jax.tree.leaves(batch, is_leaf=is_padded)
        if spans_workers or any(map(is_padded, leaves)):
            outputs = pad_outputs(outputs, sharding)
        return outputs, new

    return sharded


def compiles(model: Any) -> bool:
    """Whether the model's steps are compiled."""
    return bool(model.jit_compile) and not model.run_eagerly


#: Groups of the state that a program changes and may overwrite, because only its loop
#: references them. Unchanged weights are not donated: after a fit with moving averages
#: the optimizer has the same arrays.
DONATED = {"train": (0, 1, 2, 3), "test": (2,), "predict": ()}


class CompiledStep:
    """A compiled step; its new state is recorded as soon as it exists.

    Args:
        model: the model.
        kind: str, "train", "test" or "predict".
        step: the step to compile.
        state_sharding: returns the shardings of a donated group of arrays, equal to
            those that the next step is compiled for; None leaves them to JAX.
        outputs: the sharding of the outputs; None leaves it to JAX.
        workers: the communicator between elastic workers, whose steps can be repeated:
            they do not overwrite their state. None otherwise.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        step: Step,
        state_sharding: Callable[[Sequence[jax.Array]], Any] | None = None,
        outputs: jax.sharding.Sharding | None = None,
        workers: JaxCommunicator | None = None,
    ):
        self._model = model
        self._kind = kind
        self._step = step
        self._state_sharding = state_sharding
        self._outputs = outputs
        self._workers = workers
        # By the lengths of the groups of the state, which change with `trainable`.
        self._programs: dict[tuple[int, ...], Callable[..., Any]] = {}

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The outputs, and the state after the step."""

        def record(results: tuple[Any, Any]) -> None:
            record_jax_state(self._model, self._kind, results[1])

        key = tuple(map(len, state))
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self.jitted(state)
        found: tuple[Any, Any] = call_recorded(program, (*state, batch), record)
        return found

    def jitted(self, state: Any) -> Any:
        """The program for groups of arrays of these lengths."""
        changed = DONATED[self._kind]
        shardings = [
            self._state_sharding(group)
            if self._state_sharding is not None and i in changed
            else None
            for i, group in enumerate(state)
        ]
        program = jax.jit(
            lambda *args: self._step(args[:-1], args[-1]),
            donate_argnums=changed if self._workers is None else (),
            out_shardings=(self._outputs, tuple(shardings)),
        )
        if self._workers is None:
            return program
        return AwaitedProgram(self._workers, program)


def with_outputs(step: Step, sharding: jax.sharding.Sharding) -> Step:
    """A step with a sharding of its output arrays."""
    moved = jax.jit(lambda outputs: outputs, out_shardings=sharding)

    def placing_step(state: Any, batch: Any) -> tuple[Any, Any]:
        outputs, state = step(state, batch)
        return moved(outputs), state

    return placing_step


class OpaqueArrays:
    """The arrays of a group of variables, for Keras's loop.

    Keras sets them as an attribute of the model after each step, for which it would
    inspect every array of a list.
    """

    def __init__(self, arrays: Any):
        self.arrays = arrays

    def __iter__(self) -> Iterator[Any]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


class LoopState(tuple[OpaqueArrays, ...]):
    """A state that a step returned, and that Keras passes to the next step."""

    @classmethod
    def of(cls, state: Any) -> LoopState:
        return cls(map(OpaqueArrays, state))


def loop_function(
    model: Any,
    kind: str,
    step: Step,
    prepare: Callable[[Any], Any],
    placer: JaxBatchPlacer,
    steps: WorkerSteps | None,
    gather_rows: GatherRows | None,
) -> Callable[..., Any]:
    """The function that Keras calls for each item of its loop: one step, or several.

    Args:
        model: the model.
        kind: str, "train", "test" or "predict".
        step: the step.
        prepare: converts a state that was read from the variables.
        placer: the transfer of batches to the devices.
        steps: the steps of several workers; None without a cluster.
        gather_rows: gathers rows from other workers; None without a cluster.
    """
    several = model.steps_per_execution

    def read(batches: Iterator[Any]) -> Any:
        if steps is None:
            with recording.DATA:
                return next(batches)
        return steps.next_batch(batches)

    def await_checks() -> None:
        if steps is not None:
            steps.await_checks()

    def one(state: Any, batch: Any) -> tuple[Any, Any]:
        # Keras 3.15 does not place the input of `predict_on_batch`.
        placed = placer.place(batch) if kind == "predict" else batch
        recording.count_rows(batch)
        await_checks()
        outputs, state = step(state, placed)
        return outputs_on_host(outputs, gather_rows), state

    def function(state: Any, batches: Iterator[Any]) -> tuple[Any, Any]:
        if type(state) is LoopState:
            state = tuple(group.arrays for group in state)
        else:
            state = prepare(state)
        every: list[Any] = []
        while len(every) < several:
            record_jax_state(model, kind, state)
            try:
                batch = read(batches)
            except StopIteration:
                if not every:
                    raise
                break
            outputs, state = one(state, batch)
            every.append(outputs)
        outputs = every[-1]
        if kind == "predict" and len(every) > 1:
            outputs = concatenated(every)
        return outputs, LoopState.of(state)

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
    return keras.tree.map_structure(_concatenated, *outputs)


def _concatenated(*parts: Any) -> Any:
    # Steps of different sizes can have run on different devices.
    shardings = {getattr(part, "sharding", None) for part in parts}
    on_one = len(shardings) == 1 and None not in shardings
    return (jax.numpy if on_one else np).concatenate(parts)
