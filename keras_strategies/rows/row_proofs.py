"""Whether layer calls can be split by rows, known by type or proved by operations."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.keras_compat.models.layers import rematerializes
from keras_strategies.keras_compat.models.row_wise_layers import is_row_wise
from keras_strategies.keras_compat.variables.generator_seeds import seed_generators
from keras_strategies.rows.declarations import is_declared
from keras_strategies.rows.declared_calls import problem_of_declared
from keras_strategies.rows.layer_calls import LayerCall, leaf_key
from keras_strategies.rows.python_state import LayerSettings
from keras_strategies.rows.row_placements import (
    MEAN,
    ROWS,
    SAME,
    RowPlacement,
    RowProof,
)
from keras_strategies.rows.row_prover import RowProver

if TYPE_CHECKING:
    from keras_strategies.communication.communicator import Communicator

#: See `LayerCallDriver.tracing`.
Comparing = Callable[[Callable[[str], None]], contextlib.AbstractContextManager[Any]]

# Proofs of a layer for different attributes. A proof takes longer than a step.
_MOST_SETTINGS = 16


@dataclass
class _LayerProofs:
    """The proofs of one layer."""

    settings: LayerSettings = field(default_factory=LayerSettings)
    found: dict[Any, RowProof] = field(default_factory=dict)
    # The last result of this worker by the arguments, and that of all workers.
    agreed: dict[Any, tuple[RowProof | None, RowProof]] = field(default_factory=dict)
    # The proof of a call that is known by the types of its layers, None of others, and
    # whether it may draw.
    row_wise: dict[Any, tuple[RowProof | None, bool]] = field(default_factory=dict)
    # How many proofs did not hold for a later call.
    dropped: int = 0
    is_declared: bool = False


@dataclass(eq=False)
class RowProofs:
    """The proofs for all layers that a strategy calls.

    A proof holds for calls with equal flags, shapes, numbers of rows on replicas,
    attributes of layers, `trainable` flags and dtype policies. What else the code of a
    layer reads (globals, closures, files) is constant for a program; in eager calls it
    is noticed by what replicas call.

    Args:
        prover: the prover.
        why_unsplit: returns why a call cannot be split whatever its operations are, as
            the end of a sentence; empty if it can be.
        synchronizes: bool, whether batch statistics are those of all rows.
        comparing: a context around calls of a declared layer with a few rows; gets a
            function for why it cannot be split, as the end of "its code ...".
        workers: the workers, which make the same calls; None without a cluster. A layer
            is split on all of them or on none.
    """

    _prover: RowProver
    _why_unsplit: Callable[[Any, RowProof | None], str]
    _synchronizes: bool
    _comparing: Comparing
    _workers: Communicator | None = None
    _layers: weakref.WeakKeyDictionary[Any, _LayerProofs] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    @property
    def _statistics(self) -> RowPlacement:
        """The placement of statistics; of a replica's rows if it is a mean."""
        return SAME if self._synchronizes else MEAN

    def of(
        self,
        call: LayerCall,
        with_rows: Sequence[bool],
        sizes: Sequence[int],
    ) -> tuple[RowProof, bool]:
        """The proof of a call, and whether it is new.

        Args:
            call: the call.
            with_rows: for each leaf, whether replicas get slices of its rows.
            sizes: the rows of all replicas; empty in a program for any number.
        """
        layer = call.layer
        proofs = self._layers.get(layer)
        if proofs is None:
            proofs = _LayerProofs(is_declared=is_declared(layer))
            self._layers[layer] = proofs
        if self._workers is not None and len(proofs.settings.known) >= _MOST_SETTINGS:
            # The limit below may be reached on one worker alone. What workers have
            # agreed on stays, so that none of them asks alone.
            proofs = self._layers[layer] = _LayerProofs(agreed=proofs.agreed)
        # The proof of a declared layer holds for all its settings.
        settings, by_type, may_draw = 0, None, False
        if not proofs.is_declared:
            settings = proofs.settings.number(layer)
            by_type, may_draw = self._by_types(proofs, call, with_rows, settings)
        if by_type is not None and not may_draw:
            return by_type, False
        arguments: tuple[Any, ...] = _kinds(call, with_rows)
        if not by_type and not proofs.is_declared:
            rows = call.rows if isinstance(call.rows, int) else None
            arguments = (*arguments, frozenset(sizes), rows)
        # The latter is told once for these arguments.
        for key in ((settings, arguments), (_OFTEN, arguments)):
            if key in proofs.found:
                return proofs.found[key], False
        count = max(len(proofs.settings.known), proofs.dropped)
        if count > _MOST_SETTINGS and not by_type:
            found = proofs.found[_OFTEN, arguments] = RowProof(problem=_OFTEN)
            return found, True
        if proofs.is_declared:
            own = self._declared(call, with_rows)
        else:
            own = self._proved(call, with_rows, sizes, by_type is not None)
        before, agreed = proofs.agreed.get(arguments, (None, own))
        # Settings can change on one worker alone, such as a counter of saved files.
        # Workers exchange results where these change, which is so on all of them.
        found = agreed if before == own else self._agreed(call, own)
        proofs.agreed[arguments] = own, found
        # What replicas call is that of this proof.
        found = proofs.found[settings, arguments] = replace(found, calls={})
        return found, True

    def drop(self, call: LayerCall, proof: RowProof) -> None:
        """A proof does not hold any more: a call has computed something else."""
        proofs = self._layers[call.layer]
        proofs.found = {k: v for k, v in proofs.found.items() if v is not proof}
        proofs.agreed.clear()
        proofs.dropped += 1

    def refuse(self, call: LayerCall, proof: RowProof) -> RowProof:
        """A proof without exchanges: replicas do not call the functions of this one."""
        proofs = self._layers[call.layer]
        refused = RowProof(problem=proof.problem_without)
        items = proofs.found.items()
        proofs.found = {k: refused if v is proof else v for k, v in items}
        return refused

    def _declared(self, call: LayerCall, with_rows: Sequence[bool]) -> RowProof:
        problem = self._why_unsplit(call.layer, None)
        drawn = RowProof()
        if not problem and seed_generators(call.layer):
            # Which rows have draws is known of a trace only.
            drawn = self._prover.prove(call, with_rows, ())
            problem = drawn.problem or self._why_unsplit(call.layer, drawn)
            if problem:
                problem = f"it draws random numbers, and {problem}"
        notes: list[str] = []
        if not problem:
            with self._comparing(notes.append):
                problem = problem_of_declared(call, with_rows) or ""
        if notes:
            problem = f"its code {notes[0]}"
        return RowProof(problem=problem) if problem else _of_rows(MEAN, drawn)

    def _by_types(
        self,
        proofs: _LayerProofs,
        call: LayerCall,
        with_rows: Sequence[bool],
        settings: int,
    ) -> tuple[RowProof | None, bool]:
        """The proof of a call that is known by types, and whether it may draw."""
        if not is_plain(call, with_rows):
            return None, False
        layer = call.layer
        tensors = filter(keras.ops.is_tensor, call.leaves)
        ranks = tuple(len(tensor.shape) for tensor in tensors)
        if (settings, ranks) not in proofs.row_wise:
            may_draw = bool(seed_generators(layer))
            # What is computed again in the backward pass would draw again.
            repeats = may_draw and rematerializes(layer)
            # One for these settings, by which programs of the call are found again.
            is_known = is_row_wise(layer, ranks) and not repeats
            proof = _of_rows(self._statistics, RowProof()) if is_known else None
            proofs.row_wise[settings, ranks] = proof, may_draw
        proof, may_draw = proofs.row_wise[settings, ranks]
        is_unsplit = proof is not None and self._why_unsplit(layer, None)
        return None if is_unsplit else proof, may_draw

    def _proved(
        self,
        call: LayerCall,
        with_rows: Sequence[bool],
        sizes: Sequence[int],
        by_type: bool,
    ) -> RowProof:
        problem = self._why_unsplit(call.layer, None)
        if problem:
            return RowProof(problem=problem)
        given = ((),) if by_type else (sizes, call.exchanges)
        found = self._prover.prove(call, with_rows, *given)
        problem = found.problem or self._why_unsplit(call.layer, found)
        if problem:
            return replace(found, problem=problem)
        if by_type:
            return _of_rows(self._statistics, found)
        if self._statistics is MEAN and not call.adds:
            found = replace(found, updates=dict.fromkeys(found.updates, MEAN))
        return found

    def _agreed(self, call: LayerCall, own: RowProof) -> RowProof:
        """The result for all workers: a problem if any worker has found one."""
        if self._workers is None:
            return own
        every = self._workers.group.gather_values(
            f"the row proof of layer {call.layer.name!r}",
            [own.problem, [f"{event.name} {event.exchange}" for event in own.events]],
        )
        for problem, _ in every:
            if problem is not None:
                return RowProof(problem=problem)
        if any(each != every[0] for each in every):
            return RowProof(problem="its code computes other sums on another worker")
        return own

    def clear(self) -> None:
        """Drops all results: workers that have joined lack them."""
        self._layers.clear()


_OFTEN = (
    "attributes of its layers, or what else its code reads, change from call to call, "
    "and each of them would need another proof; hold what changes in a "
    "`keras.Variable`"
)


def _of_rows(update: RowPlacement, drawn: RowProof) -> RowProof:
    """A new proof of a call that is known or declared, with the draws of another."""
    proof = RowProof(every_output=ROWS, every_loss=MEAN, every_update=update)
    return replace(proof, draws=drawn.draws, drawn=drawn.drawn)


def is_plain(call: LayerCall, with_rows: Sequence[bool]) -> bool:
    """Whether all arguments are tensors with rows or flags."""
    return all(
        has_rows or leaf is None or isinstance(leaf, bool)
        for leaf, has_rows in zip(call.leaves, with_rows, strict=True)
    )


def _kinds(call: LayerCall, with_rows: Sequence[bool]) -> tuple[Any, ...]:
    """A key of a call's arguments, without the values of tensors."""
    args, kwargs = call.structure
    leaves = map(leaf_key, call.leaves, with_rows)
    return len(args), tuple(sorted(kwargs)), call.constants, *leaves
