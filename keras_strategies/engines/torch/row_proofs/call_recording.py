"""One recording of a layer call with a number of rows, and of its backward passes."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch

from keras_strategies.engines.torch.compat import (
    fake_tensor_mode,
    gradients_in_modes,
    saved_tensors_hooks_of_thread,
    silent_fake_tensors,
)
from keras_strategies.engines.torch.data_parallel.assigned_values import assigned_value
from keras_strategies.engines.torch.replicas.recorded_draws import (
    DrawRecorder,
    RecordedDraw,
)
from keras_strategies.engines.torch.row_proofs.call_recorder import CallRecorder
from keras_strategies.engines.torch.row_proofs.known_layer import (
    recorded_known_call,
    run_without_values,
)
from keras_strategies.engines.torch.row_proofs.recorded_replica import (
    recorded_replica,
)
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import get_mask, set_mask
from keras_strategies.keras_compat.variables.generator_seeds import is_seed_state
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime import context
from keras_strategies.runtime.engine import StrategyCore
from keras_strategies.runtime.row_proofs.known_calls import (
    KnownCalls,
    KnownCallsOfTrace,
    KnownResults,
    known_arguments,
)
from keras_strategies.runtime.row_proofs.layer_calls import LayerCall, argument_leaves
from keras_strategies.runtime.state.replica_state import (
    AddedState,
    ReplicaState,
    has_rows,
)


class CallFailed(Exception):
    """The call raised an error on fake tensors."""


class NoDerivative(CallFailed):
    """A backward pass reaches an operation without one, as on one device."""


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call of a layer in the call.

    Args:
        call: the call.
        begin, end: int, the numbers of operations before it and after it.
        with_rows: for each leaf of its arguments, whether it has the rows.
        leaves: the versions of the leaves; None for those that are no tensors.
        masks: the versions of their masks.
        results: the versions of its outputs and of the losses that it adds.
    """

    call: LayerCall
    begin: int
    end: int
    with_rows: list[bool]
    leaves: list[int | None]
    masks: list[int | None]
    results: list[int]


class CallRecording:
    """A layer call on fake tensors of the CPU, whatever the device of the replicas.

    Placements follow from what operations compute, which is the same on every device.

    Args:
        strategy: the strategy.
        call: the call, with tensors of the global batch.
        with_rows: for each leaf, whether it has the rows.
        rows: int, the number of rows of this recording.
        replicas: int, how many replicas have rows.
        branches: the truth values that Python reads, see `CallRecorder`.
        known_calls: the calls of layers that are known by type; None to record their
            operations.
        has_log: bool, whether the functions of torch that it uses are noted.
    """

    def __init__(
        self,
        strategy: StrategyCore,
        call: LayerCall,
        with_rows: Sequence[bool],
        rows: int,
        replicas: int,
        branches: Sequence[bool],
        known_calls: KnownCalls | None,
        has_log: bool = False,
    ):
        self.recorder = CallRecorder(fake_tensor_mode(), branches, has_log)
        self.rows = rows
        self._call = call
        self._known_calls = known_calls
        self._in_order: KnownCallsOfTrace | None = None
        self._strategy = strategy
        # Arguments that stand for the weights of known layers.
        self._weights: list[torch.Tensor] = []
        self._replica = recorded_replica(
            strategy, self.recorder, rows, call.rows, replicas
        )
        self._draws = DrawRecorder(self.recorder)
        #: The arguments that get gradients, and whether they have rows.
        self.arguments: list[tuple[torch.Tensor, bool]] = []
        #: Arguments and variables with their versions, and whether they have rows.
        self.inputs: list[tuple[torch.Tensor, int, bool]] = []
        self._leaves = [
            self._argument(i, leaf, has_rows)
            for i, (leaf, has_rows) in enumerate(
                zip(call.leaves, with_rows, strict=True)
            )
        ]
        self._state = (
            AddedState()
            if call.only_adds
            else ReplicaState(self._copy, assigned=_assigned_value)
        )
        self.outputs: list[Any] = []
        self.masks: list[Any] = []
        self.losses: list[Any] = []
        #: The calls of layers in it, without those that are one operation.
        self.inner: list[RecordedCall] = []
        self._scope: Any = None

    def _argument(self, index: int, leaf: Any, has_rows: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        has_gradient = index not in self._call.constants
        found = self._input(("argument", index), leaf, has_rows, has_gradient)
        if found.requires_grad:
            self.arguments.append((found, has_rows))
        mask = get_mask(leaf)
        if mask is not None:
            set_mask(found, self._input(("mask", index), mask, has_rows))
        return found

    def _input(
        self,
        origin: Any,
        tensor: torch.Tensor,
        has_rows: bool,
        has_gradient: bool = True,
    ) -> torch.Tensor:
        shape = list(tensor.shape)
        if has_rows:
            shape[0] = self.rows
        is_float = tensor.is_floating_point() or tensor.is_complex()
        needs = is_float and has_gradient
        found = self.recorder.add_input(origin, shape, tensor.dtype, needs)
        self.inputs.append((found, self.recorder.version(found), has_rows))
        return found

    def _copy(self, variable: Any) -> torch.Tensor | None:
        """The value of a variable: seeds have one, so that generators accept it."""
        raw = raw_value(variable)
        if raw is None:
            return None
        if is_seed_state(variable) or self._call.adds:
            return self.recorder.add_zeros(raw.shape, raw.dtype)
        origin = "variable", id(variable)
        found = self.recorder.add_input(origin, raw.shape, raw.dtype, raw.requires_grad)
        self.inputs.append((found, self.recorder.version(found), False))
        return found

    @property
    def draws(self) -> list[RecordedDraw]:
        """The draws of random numbers, in their order."""
        return self._draws.draws

    @property
    def changes_inputs(self) -> bool:
        """Whether an argument or the value of a variable was changed in place."""
        version = self.recorder.version
        return any(version(tensor) != before for tensor, before, _ in self.inputs)

    @property
    def variables(self) -> list[torch.Tensor]:
        """The copies of trained variables that the call has read."""
        read = [value for _, value in self._state.reads.values()]
        return [*(value for value in read if value.requires_grad), *self._weights]

    @property
    def updates(self) -> dict[int, tuple[Any, Any]]:
        """Variables that the call assigns and their values, by `id(variable)`."""
        return self._state.updates

    def close(self) -> list[weakref.ref[torch.Tensor]]:
        """Drops all tensors of the recording, and returns weak references to them."""
        made = self.recorder.close()
        self._leaves.clear()
        self._weights.clear()
        for found in (self.arguments, self.inputs, self.outputs, self.masks):
            found.clear()
        self.losses.clear()
        self.inner.clear()
        self._draws.draws.clear()
        self._scope = None
        del self._state, self._replica
        return made

    def forward(self) -> None:
        """Records the call.

        Raises:
            CallFailed: if it raises.
        """
        args, kwargs = self._call.arguments(self._leaves)
        scope = self._scope = self._state.scope()
        self._hooks = saved_tensors_hooks_of_thread()
        if self._known_calls is not None:
            self._in_order = self._known_calls.in_order()
        with (
            self._recording(),
            # As in a training step, also where gradients are off.
            torch.inference_mode(False),
            torch.enable_grad(),
            scope,
            context.on_replica(self._replica),
            layer_calls_through(self._inner_call),
            self._in_layer(self._call.layer),
            self._draws,
        ):
            outputs = self._call.call(*args, **kwargs)
        self.outputs = keras.tree.flatten(outputs)
        self.masks = [get_mask(leaf) for leaf in self.outputs]
        self.losses = list(scope.losses)

    def backward(
        self,
        group: int,
        tensors: Sequence[torch.Tensor],
        of_variables_only: bool = False,
    ) -> tuple[list[int], list[torch.Tensor | None]]:
        """Records a backward pass.

        Args:
            group: int, the number of the backward pass.
            tensors: outputs and losses.
            of_variables_only: bool, whether arguments have no gradients.

        Returns:
            The versions of the gradients of these, and the gradients of `arguments` and
            `variables`.

        Raises:
            NoDerivative: if an operation has no derivative.
            CallFailed: if it raises anything else.
        """
        arguments = [tensor for tensor, _ in self.arguments]
        left_out = [None] * len(arguments) if of_variables_only else []
        sources = self.variables if of_variables_only else arguments + self.variables
        given = [
            self.recorder.add_input(("gradient", group, i), t.shape, t.dtype)
            for i, t in enumerate(tensors)
        ]
        versions = [self.recorder.version(tensor) for tensor in given]
        if not sources or not tensors:
            return versions, [*left_out, *[None] * len(sources)]
        self.recorder.place = None
        assigned = [id(value) for _, value in self.updates.values()]
        with (
            self._recording(),
            # For layers that are rematerialized.
            self._state.scope(),
            context.on_replica(self._replica),
            layer_calls_through(self._inner_call),
            DrawRecorder() as again,
        ):
            found = gradients_in_modes(tensors, sources, given)
        if again.draws:
            self.recorder.reject("it draws random numbers in its backward pass")
        if [id(value) for _, value in self.updates.values()] != assigned:
            self.recorder.reject("it assigns a variable")
        return versions, [*left_out, *found]

    @contextlib.contextmanager
    def _recording(self) -> Iterator[None]:
        try:
            with (
                self._seed_restored(),
                silent_fake_tensors(),
                keras.device("cpu"),
                self.recorder,
            ):
                yield
        except (MemoryError, torch.OutOfMemoryError):
            raise  # Not a property of the layer, which may be split next time.
        except Exception as error:
            # Errors of the layer's own code; the unsplit call raises them again.
            name, text = type(error).__name__, error_text(error)
            if text.startswith("derivative for") and "not implemented" in text:
                raise NoDerivative(text) from error
            self.recorder.reject(f"with {self.rows} rows it raises {name}: {text}")
            raise CallFailed(self.recorder.problem) from error

    @contextlib.contextmanager
    def _seed_restored(self) -> Iterator[None]:
        """Restores Torch's default generator if the call has set it.

        Draws of fake tensors do not advance it; what has, is another thread.
        """
        state, seed = torch.get_rng_state(), torch.initial_seed()
        try:
            yield
        finally:
            if torch.initial_seed() != seed:
                torch.set_rng_state(state)

    def _inner_call(self, layer: Any, call: Any, args: Any, kwargs: Any) -> Any:
        with self._in_layer(layer):
            # Operations that are computed again in the backward pass are recorded.
            is_again = saved_tensors_hooks_of_thread() != self._hooks
            if is_again:
                return call(*args, **kwargs)
            if self._in_order is None:
                return self._recorded_call(layer, call, args, kwargs)
            arguments = known_arguments(layer, args, kwargs, self.rows)

            def run() -> KnownResults | None:
                count = len(self.draws)
                found = run_without_values(
                    self._strategy, self.recorder, layer, call, args, kwargs, self.rows
                )
                if found is None:
                    del self.draws[count:]  # Its operations draw them again.
                return found

            known = self._in_order.results(layer, arguments, run)
            if known is None or arguments is None:
                return self._recorded_call(layer, call, args, kwargs)
            outputs, weights = recorded_known_call(
                self.recorder, self._state, arguments, known, self.rows
            )
            if weights is not None:
                self._weights.append(weights)
            return outputs

    def _recorded_call(self, layer: Any, call: Any, args: Any, kwargs: Any) -> Any:
        """Records the operations of a call of a layer."""
        begin, added = len(self.recorder.steps), len(self._scope.losses)
        leaves = argument_leaves(args, kwargs)
        with_rows = [has_rows(leaf, self.rows) for leaf in leaves]
        of_leaves = self._versions(leaves)
        of_masks = self._versions(map(get_mask, leaves))
        outputs = call(*args, **kwargs)
        results = [*keras.tree.flatten(outputs), *self._scope.losses[added:]]
        found = RecordedCall(
            LayerCall(layer, call, (args, kwargs), leaves, self._call.rows),
            begin,
            len(self.recorder.steps),
            with_rows,
            of_leaves,
            of_masks,
            [each for each in self._versions(results) if each is not None],
        )
        self.inner.append(found)
        return outputs

    def _versions(self, values: Iterable[Any]) -> list[int | None]:
        return [
            self.recorder.version(each) if isinstance(each, torch.Tensor) else None
            for each in values
        ]

    @contextlib.contextmanager
    def _in_layer(self, layer: Any) -> Iterator[None]:
        recorder = self.recorder
        before = recorder.place
        recorder.places.append(layer)
        recorder.place = len(recorder.places) - 1
        try:
            yield
        finally:
            recorder.place = before


def error_text(error: Exception) -> str:
    """The first line of an error of a call, without what Keras adds to it."""
    lines = re.sub(r"\x1b\[\d+m", "", str(error)).split("\n")
    if lines[0].startswith("Exception encountered when calling"):
        lines = lines[1:]
    return next((line for line in lines if line.strip()), "").strip()


def _assigned_value(
    variable: Any, read: Callable[[], torch.Tensor], value: torch.Tensor
) -> torch.Tensor:
    """The value that the call reads after an assignment, as on replicas."""
    current = read()
    if torch.is_grad_enabled() and current.requires_grad:
        return assigned_value(current, value)
    return value.detach()
