"""Row proofs on Torch: recorded calls, and the placements of their results."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import torch

from keras_strategies.engines.torch.compat import (
    has_global_hooks,
    module_hooks,
    why_saved_tensors_hooks_are_disabled,
)
from keras_strategies.engines.torch.replicas.recorded_draws import (
    DrawsDiffer,
    multiples_of,
)
from keras_strategies.engines.torch.row_proofs.call_recorder import CallRecorder
from keras_strategies.engines.torch.row_proofs.call_recording import (
    CallFailed,
    CallRecording,
    NoDerivative,
)
from keras_strategies.engines.torch.row_proofs.draws_of_calls import recorded_draws
from keras_strategies.engines.torch.row_proofs.function_log import (
    CodeDiffers,
    FunctionLog,
    check_code,
    check_values,
)
from keras_strategies.engines.torch.row_proofs.propagation import (
    Propagation,
    RecordingsDiffer,
)
from keras_strategies.engines.torch.row_proofs.unsplit_inner_calls import (
    unsplit_inner_calls,
)
from keras_strategies.engines.torch.row_proofs.value_placements import SAME, Placed
from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.keras_compat.variables.generator_seeds import (
    is_seed_state,
    substitute_global_generator,
)
from keras_strategies.runtime.random_numbers.row_draws import drawing
from keras_strategies.runtime.row_proofs.known_calls import (
    KnownCalls,
    UnknownUse,
)
from keras_strategies.runtime.row_proofs.layer_calls import LayerCall
from keras_strategies.runtime.row_proofs.row_placements import (
    MEAN,
    RowKind,
    RowPlacement,
    RowProof,
)
from keras_strategies.runtime.row_proofs.row_prover import (
    RowProver,
    is_plain_output,
    problem_of_output,
)

_ROWS = Placed(RowKind.ROWS)
#: Numbers of rows with which draws of known layers are recorded, without memory.
_SAMPLED_COUNTS = (23, 17)


class TorchRowProver(RowProver):
    """Records the ATen operations of calls on fake tensors, and propagates placements.

    A call is recorded with the rows of the global batch and with those of each replica,
    so a proof holds for these numbers of rows. Torch computes one row by other
    operations than more: there the functions that the code calls are compared, and the
    operations of calls with more rows have the placements.
    """

    def prove(
        self, call: LayerCall, with_rows: Sequence[bool], sizes: Sequence[int]
    ) -> RowProof:
        with (
            torch.inference_mode(False),
            _without_hooks(),
            substitute_global_generator(),
            drawing(None),
        ):
            try:
                return self._proof(call, with_rows, sizes)
            finally:
                # Autocast keeps the weights that it has cast, those of the proof too.
                torch.clear_autocast_cache()

    def _proof(
        self, call: LayerCall, with_rows: Sequence[bool], sizes: Sequence[int]
    ) -> RowProof:
        self._made.objects = []
        try:
            return self._proof_with(True, call, with_rows, sizes)
        except (UnknownUse, _RecordingsOfTypes):
            return self._proof_with(False, call, with_rows, sizes)

    def _proof_with(
        self,
        known_types: bool,
        call: LayerCall,
        with_rows: Sequence[bool],
        sizes: Sequence[int],
    ) -> RowProof:
        counts = [size for size in sizes if size]
        found: list[RowProof] = []
        # Truth values that Python reads, each with both results.
        todo: list[list[bool]] = [[]]
        while todo:
            branches = todo.pop()
            proof = _Proof(self, call, with_rows, counts, branches, known_types)
            try:
                found.append(proof.result())
            except _RecordingProblem as problem:
                if proof.uses_types:
                    raise _RecordingsOfTypes from problem
                return RowProof(problem=str(problem))
            except _Problem as problem:
                inner = unsplit_inner_calls(proof.compared)
                return RowProof(problem=str(problem), inner=inner)
            self._made.objects += proof.close()
            taken = proof.branches
            todo += [
                [*taken[:i], not taken[i]] for i in range(len(branches), len(taken))
            ]
        return _of_all_branches(found)

    def draws(
        self, call: LayerCall, with_rows: Sequence[bool], sizes: Sequence[int]
    ) -> RowProof:
        with drawing(None):
            found = [recorded_draws(call, with_rows, rows) for rows in _SAMPLED_COUNTS]
        try:
            multiples = multiples_of(
                _SAMPLED_COUNTS, found, self.strategy.partitions_draws
            )
            return RowProof(draws=self.on_devices(multiples))
        except DrawsDiffer as error:
            return RowProof(problem=str(error))

    def on_devices(self, draws: tuple[int, ...]) -> tuple[int, ...]:
        """The draws of a proof, if the replicas' devices draw the same numbers."""
        kinds = {device.kind for device in self.strategy.placement.replicas}
        if draws and len(kinds) > 1:
            raise DrawsDiffer(
                "it draws random numbers, and replicas are on devices of different "
                f"kinds ({', '.join(sorted(kinds))}), which have other generators"
            )
        return draws

    def has_hooks(self, layer: Any) -> str:
        if has_global_hooks() or any(map(any, map(module_hooks, sublayers(layer)))):
            return "it has hooks of torch"
        return ""

    def surroundings(self) -> Any:
        return (
            torch.get_default_dtype(),
            *(
                (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in ("cpu", "cuda")
            ),
        )


def _of_all_branches(proofs: Sequence[RowProof]) -> RowProof:
    """One proof for a call, whichever branches Python takes."""
    first = proofs[0]
    for proof in proofs[1:]:
        if proof != first:
            return RowProof(
                problem="its results depend on truth values that Python reads"
            )
    return first


def _without_hooks() -> contextlib.AbstractContextManager[Any]:
    """Hooks of the user's for saved tensors would see tensors without values."""
    if why_saved_tensors_hooks_are_disabled() is not None:
        return contextlib.nullcontext()
    # An operation that saves its own result would keep itself alive.
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _itself)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _Problem(Exception):
    """Why a call cannot be split by rows."""


class _RecordingProblem(_Problem):
    """Operations differ, or a recording fails."""


class _RecordingsOfTypes(Exception):
    """Recordings in which operations stand for known layers are no proof."""


class _Proof:
    """The proof of one call."""

    def __init__(
        self,
        prover: TorchRowProver,
        call: LayerCall,
        with_rows: Sequence[bool],
        sizes: Sequence[int],
        branches: Sequence[bool],
        known_types: bool,
    ):
        self._prover = prover
        self._strategy = prover.strategy
        self._adds = call.adds
        self._known_calls = KnownCalls() if known_types else None
        counts = _counts(call.rows, sizes)
        has_one_row = 1 in (call.rows, *sizes)
        self.recordings = [
            CallRecording(
                prover.strategy,
                call,
                with_rows,
                rows,
                len(sizes),
                branches,
                self._known_calls,
                has_log=has_one_row,
            )
            for rows in (*counts, *([1] if has_one_row else []))
        ]
        #: The recordings whose operations are compared.
        self.compared = self.recordings[: len(counts)]
        self._one_row = self.recordings[-1] if has_one_row else None
        recorders = [recording.recorder for recording in self.compared]
        self._propagation = Propagation(counts, recorders)
        self._groups = 0

    @property
    def uses_types(self) -> bool:
        """Whether operations stand for known layers."""
        return self._known_calls is not None and self._known_calls.is_used

    @property
    def branches(self) -> list[bool]:
        """The truth values that Python has read."""
        return self.recordings[0].recorder.branches

    def close(self) -> list[weakref.ref[torch.Tensor]]:
        """Drops the recordings' tensors, and returns weak references to them."""
        return [each for recording in self.recordings for each in recording.close()]

    def result(self) -> RowProof:
        for recording in self.recordings:
            self._record(recording)
        first = self.recordings[0]
        for _, version, has_rows in first.inputs:
            self._propagation.place(version, _ROWS if has_rows else SAME)
        self._advance()
        outputs = [self._output(*leaves) for leaves in self._columns("outputs")]
        self._check_masks(outputs)
        losses = [self._placement("loss", ls) for ls in self._columns("losses")]
        updates = self._updates()
        self._check_inputs()
        self._differentiate(outputs, losses)
        self._check_one_row()
        return RowProof(outputs, losses, updates, draws=self._draws())

    def _draws(self) -> tuple[int, ...]:
        """The draws of the call; none is in its backward pass."""
        counts = [recording.rows for recording in self.recordings]
        try:
            multiples = multiples_of(
                counts,
                [each.draws for each in self.recordings],
                self._strategy.partitions_draws,
            )
            return self._prover.on_devices(multiples)
        except DrawsDiffer as error:
            raise _Problem(str(error)) from error

    def _record(self, recording: CallRecording) -> None:
        try:
            recording.forward()
        except CallFailed as error:
            raise _RecordingProblem(str(error)) from error
        if recording.recorder.problem:
            raise _RecordingProblem(recording.recorder.problem)

    def _advance(self) -> None:
        try:
            self._propagation.advance()
        except RecordingsDiffer as error:
            raise _RecordingProblem(
                f"its operations differ with the rows: {error}"
            ) from error
        if self._propagation.problem:
            raise _Problem(self._propagation.problem)

    def _columns(self, name: str) -> list[tuple[Any, ...]]:
        """Results of all recordings, by result."""
        found = [getattr(recording, name) for recording in self.recordings]
        if len(set(map(len, found))) > 1:
            raise _Problem(f"how many {name} it has depends on the number of rows")
        return list(zip(*found, strict=True))

    # Results of the call.

    def _output(self, *leaves: Any) -> RowPlacement | None:
        if isinstance(leaves[0], torch.Tensor):
            return self._placement("output", leaves)
        first = leaves[0]
        if not is_plain_output(first):
            raise _Problem(problem_of_output(first))
        if any(type(leaf) is not type(first) or leaf != first for leaf in leaves[1:]):
            raise _Problem("one of its outputs is no tensor and depends on the rows")
        return None

    def _placement(self, what: str, values: Sequence[Any]) -> RowPlacement:
        placed = self._placed(values).joined()
        if not placed.is_joined:
            raise _Problem(placed.reason or f"its {what} mixes rows")
        return placed

    def _placed(self, values: Sequence[Any]) -> Placed:
        recorders = [recording.recorder for recording in self.compared]
        versions = tuple(
            _version(recorder, value)
            for recorder, value in zip(recorders, values, strict=False)
        )
        try:
            return self._propagation.placed(versions)
        except RecordingsDiffer as error:
            raise _RecordingProblem(
                f"its results differ with the rows: {error}"
            ) from error

    def _check_masks(self, outputs: Sequence[RowPlacement | None]) -> None:
        for output, masks in zip(outputs, self._columns("masks"), strict=True):
            if masks[0] is None:
                continue
            if self._placement("mask", masks) != output:
                raise _Problem("the mask of an output has other rows than the output")

    def _updates(self) -> Mapping[int, RowPlacement]:
        found = {}
        for key, (variable, _) in self.recordings[0].updates.items():
            if is_seed_state(variable):
                continue  # It counts draws, which are proved.
            values = [
                recording.updates[key][1]
                for recording in self.recordings
                if key in recording.updates
            ]
            name = f"the value that it assigns to variable {variable.path!r}"
            if len(values) < len(self.recordings):
                raise _Problem(f"{name} depends on the number of rows")
            placed = self._placement(name, values)
            if self._adds:
                if placed.kind is RowKind.ROWS:
                    raise _Problem(f"{name} has rows")
                found[key] = placed
                continue
            if placed.kind not in (RowKind.SAME, RowKind.MEAN):
                raise _Problem(f"{name} is placed by {placed.kind.value} over rows")
            is_float = keras.backend.is_float_dtype(variable.dtype)
            if not self._strategy.sync_batch_norm and is_float:
                placed = MEAN
            found[key] = placed
        return found

    def _check_inputs(self) -> None:
        for recording in self.recordings:
            if recording.changes_inputs:
                raise _Problem("it changes an argument or a variable in place")

    def _check_one_row(self) -> None:
        """Checks that a replica with one row calls what the others call."""
        one = self._one_row
        if one is None:
            return
        first, second = self.compared[:2]
        counts = first.rows, second.rows
        logs = [_log(recording) for recording in (first, second)]
        if one.recorder.branches != first.recorder.branches:
            raise _RecordingProblem("Python reads other truth values with one row")
        try:
            check_code(counts, logs, _log(one))
            found = [_results(recording) for recording in (first, second)]
            check_values(counts, logs, found, _log(one), _results(one))
        except CodeDiffers as error:
            raise _RecordingProblem(f"{error} is another with one row") from error

    # The backward pass.

    def _differentiate(
        self,
        outputs: Sequence[RowPlacement | None],
        losses: Sequence[RowPlacement],
    ) -> None:
        columns = [*self._columns("outputs"), *self._columns("losses")]
        results = list(zip([*outputs, *losses], columns, strict=True))
        # The gradients of a mean, or of a value that is equal on all replicas, are
        # weighted by the replicas' fractions of the rows.
        for power, kinds in (
            (0, (RowKind.ROWS, RowKind.SUM)),
            (-1, (RowKind.MEAN, RowKind.SAME)),
        ):
            group = [
                (placement, column)
                for placement, column in results
                if placement is not None
                and placement.kind in kinds
                and column[0].requires_grad
            ]
            if group:
                self._check_gradients(power, group)

    def _check_gradients(
        self, power: int, group: Sequence[tuple[RowPlacement, tuple[Any, ...]]]
    ) -> None:
        try:
            gradients, given = self._gradients(group, False)
        except NoDerivative:
            # That of an argument raises on one device as well, if it is needed.
            gradients, given = self._gradients(group, True)
        for (placement, _), version in zip(group, given, strict=True):
            is_rows = placement.kind is RowKind.ROWS
            placed = _ROWS.changed(multiple=placement.multiple) if is_rows else SAME
            self._propagation.place(version, placed)
        self._advance()
        first = self.recordings[0]
        of_rows = [has_rows for _, has_rows in first.arguments]
        of_rows += [False] * (len(gradients[0]) - len(of_rows))
        for has_rows, column in zip(of_rows, zip(*gradients, strict=True), strict=True):
            if all(gradient is None for gradient in column):
                continue
            if any(gradient is None for gradient in column):
                raise _Problem("its gradients depend on the number of rows")
            placed = self._placed(column)
            if not placed.is_joined:
                raise _Problem(placed.reason)
            if not placed.is_gradient(power, has_rows):
                what = "an argument" if has_rows else "a variable, or of an argument"
                raise _Problem(
                    f"the gradient of {what} is not "
                    f"{'by rows' if has_rows else 'a sum over rows'}"
                )

    def _gradients(
        self,
        group: Sequence[tuple[RowPlacement, tuple[Any, ...]]],
        of_variables_only: bool,
    ) -> tuple[list[list[torch.Tensor | None]], list[int]]:
        """Records the backward pass of a group of results.

        Returns:
            The gradients of all recordings, and the versions of those of the results
            in the first one.
        """
        gradients: list[list[torch.Tensor | None]] = []
        given: list[int] = []
        self._groups += 1
        for i, recording in enumerate(self.recordings):
            try:
                versions, found = recording.backward(
                    self._groups, [column[i] for _, column in group], of_variables_only
                )
            except CallFailed as error:
                if isinstance(error, NoDerivative) and not of_variables_only:
                    raise
                raise _RecordingProblem(f"its backward pass fails: {error}") from error
            gradients.append(found)
            if i == 0:
                given = versions
            if recording.recorder.problem:
                raise _Problem(f"{recording.recorder.problem} in the backward pass")
        return gradients, given


def _counts(rows: int, sizes: Sequence[int]) -> list[int]:
    """The numbers of rows with which operations are compared; that of all rows first.

    Those of one row are others.
    """
    found = [
        each for each in (rows, *sorted(set(sizes) - {rows}, reverse=True)) if each > 1
    ]
    found = found or [2]
    return found if len(found) > 1 else [*found, found[0] + 1]


def _log(recording: CallRecording) -> FunctionLog:
    assert recording.recorder.log is not None
    return recording.recorder.log


def _results(recording: CallRecording) -> list[Any]:
    updates = [value for _, value in recording.updates.values()]
    return [recording.outputs, recording.masks, recording.losses, updates]


def _version(recorder: CallRecorder, value: Any) -> int:
    if not isinstance(value, torch.Tensor):
        raise _Problem("a loss or an assigned value is no tensor")
    return recorder.version(value)
