"""Whether layer calls can be split by rows, known by type or proved by operations."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.keras_compat.models.layers import rematerializes
from keras_strategies.keras_compat.models.row_wise_layers import is_row_wise
from keras_strategies.keras_compat.variables.generator_seeds import seed_generators
from keras_strategies.runtime.row_proofs.layer_calls import LayerCall, UnsplitCall
from keras_strategies.runtime.row_proofs.layer_settings import (
    ArgumentSettings,
    LayerSettings,
)
from keras_strategies.runtime.row_proofs.python_state import PythonState
from keras_strategies.runtime.row_proofs.row_placements import (
    MEAN,
    ROWS,
    SAME,
    RowPlacement,
    RowProof,
)
from keras_strategies.runtime.row_proofs.row_prover import RowProver
from keras_strategies.runtime.row_proofs.traced_apart import traced_apart

if TYPE_CHECKING:
    from keras_strategies.communication.communicator import Communicator

# Proofs of a layer for different attributes. A proof takes longer than a step.
_MOST_SETTINGS = 16

_PLAIN = (type(None), bool, int, float, complex, str, bytes)


@dataclass
class _LayerProofs:
    """The proofs of one layer."""

    settings: LayerSettings
    found: dict[Any, RowProof] = field(default_factory=dict)
    # The last result of this worker by the arguments, and that of all workers.
    agreed: dict[Any, tuple[RowProof | None, RowProof]] = field(default_factory=dict)
    # Whether a call is known by the types of its layers, and whether it may draw.
    row_wise: dict[Any, tuple[bool, bool]] = field(default_factory=dict)
    # Results that the trace of a layer around it has shown, by settings and arguments.
    shown: dict[Any, RowProof] = field(default_factory=dict)


class RowProofs:
    """The proofs for all layers that a strategy calls.

    A proof holds for calls with equal flags, shapes, numbers of rows on replicas,
    attributes of layers, `trainable` flags and dtype policies.

    Args:
        prover: the framework's propagation of placements.
        synchronizes_batch_norm: bool, whether batch statistics are those of all rows.
        workers: the workers, which make the same calls; None without a cluster. A layer
            is split on all of them or on none.
    """

    def __init__(
        self,
        prover: RowProver,
        synchronizes_batch_norm: bool,
        workers: Communicator | None = None,
    ):
        self._prover = prover
        self._workers = workers
        self._synchronizes = synchronizes_batch_norm
        # Of a call that is known by the types of its layers.
        self._by_type = RowProof(
            every_output=ROWS,
            every_loss=MEAN,
            every_update=SAME if synchronizes_batch_norm else MEAN,
        )
        self._layers: weakref.WeakKeyDictionary[Any, _LayerProofs] = (
            weakref.WeakKeyDictionary()
        )

    def of(
        self,
        call: LayerCall,
        with_rows: Sequence[bool],
        sizes: Sequence[int],
        local: int,
    ) -> tuple[RowProof, bool]:
        """The proof of a call, and whether it is new.

        Args:
            call: the call.
            with_rows: for each leaf, whether replicas get slices of its rows.
            sizes: the rows of all replicas; empty in a program for any number.
            local: int, how many replicas call the layer in this process.
        """
        layer = call.layer
        proofs = self._of_layer(layer)
        if self._workers is not None and proofs.settings.count >= _MOST_SETTINGS:
            # The limit below may be reached on one worker alone.
            proofs.settings = LayerSettings(layer)
            proofs.found.clear()
            proofs.row_wise.clear()
            proofs.shown.clear()
        settings = proofs.settings.number()
        by_type = False
        if is_plain(call, with_rows):
            ranks = tuple(len(leaf.shape) for leaf in call.leaves if _is_tensor(leaf))
            key = settings, ranks
            known = proofs.row_wise.get(key)
            if known is None:
                may_draw = bool(seed_generators(layer))
                # What is computed again in the backward pass would draw again.
                is_known = is_row_wise(layer, ranks) and not (
                    may_draw and rematerializes(layer)
                )
                known = proofs.row_wise[key] = is_known, may_draw
            by_type, may_draw = known
            by_type = by_type and not self._prover.has_hooks(layer)
            if by_type and not may_draw:
                return self._by_type, False
        if by_type:
            arguments = self._arguments(call, with_rows)
        else:
            arguments = self._arguments_with_rows(call, with_rows, sizes, local)
        found = proofs.found.get((settings, arguments))
        if found is not None:
            return found, False
        if proofs.settings.count > _MOST_SETTINGS and not by_type:
            # The former result for these arguments was told already.
            found = proofs.found.get(arguments)
            if found is None:
                found = proofs.found[arguments] = RowProof(problem=_OFTEN)
                return found, True
            return found, False
        own = proofs.shown.pop((settings, arguments), None)
        if own is None:
            prove = self._draws if by_type else self._proved
            own = prove(call, with_rows, sizes, local)
            for inner in own.inner:
                self._note_unsplit(inner, sizes, local)
            own = replace(own, inner=())
        before, agreed = proofs.agreed.get(arguments, (None, own))
        # Settings can change on one worker alone, such as a counter of saved files.
        # Workers exchange results where these change, which is so on all of them.
        found = agreed if before == own else self._agreed(call, own)
        proofs.agreed[arguments] = own, found
        proofs.found[settings, arguments] = found
        return found, True

    def _of_layer(self, layer: Any) -> _LayerProofs:
        proofs = self._layers.get(layer)
        if proofs is None:
            proofs = self._layers[layer] = _LayerProofs(LayerSettings(layer))
        return proofs

    def _arguments(self, call: LayerCall, with_rows: Sequence[bool]) -> tuple[Any, ...]:
        """What a proof depends on besides the layer's settings and numbers of rows."""
        return (*_kinds(call, with_rows)[0], self._prover.surroundings())

    def _arguments_with_rows(
        self,
        call: LayerCall,
        with_rows: Sequence[bool],
        sizes: Sequence[int],
        local: int,
    ) -> tuple[Any, ...]:
        rows = call.rows if isinstance(call.rows, int) else None
        return (
            *self._arguments(call, with_rows),
            frozenset(sizes),
            rows,
            local > 1,
        )

    def _note_unsplit(
        self, inner: UnsplitCall, sizes: Sequence[int], local: int
    ) -> None:
        """Notes the result of a call that follows if the call around it is unsplit."""
        call = inner.call
        proofs = self._of_layer(call.layer)
        arguments = self._arguments_with_rows(call, inner.with_rows, sizes, local)
        key = proofs.settings.number(), arguments
        proofs.shown[key] = RowProof(problem=inner.problem)

    def _proved(
        self,
        call: LayerCall,
        with_rows: Sequence[bool],
        sizes: Sequence[int],
        local: int,
    ) -> RowProof:
        hooks = self._prover.has_hooks(call.layer)
        if hooks:
            return RowProof(problem=f"{hooks}, which would see the rows of one replica")
        _, problem = _kinds(call, with_rows)
        state = PythonState(call.layer, call.objects)
        problem = problem or self._of_layer(call.layer).settings.problem
        if problem or state.problem:
            return RowProof(problem=problem or state.problem)
        trace = traced_apart(state, lambda: self._prover.prove(call, with_rows, sizes))
        found, changes = trace.result, trace.changes
        if trace.draws_numbers:
            return RowProof(problem="it draws random numbers of Python or NumPy")
        if found.problem is not None:
            # They may have tensors of the trace.
            state.clear_caches()
            return found
        if not self._synchronizes and not call.adds:
            # Statistics are those of a replica's rows, by the user's choice.
            updates = dict.fromkeys(found.updates, MEAN)
            found = replace(found, updates=updates)
        for change in changes:
            if change.has_tensors:
                return replace(
                    found,
                    problem=f"its code keeps a tensor of the call in {change.where}, "
                    "which would have the rows of one replica",
                )
        if self._prover.has_left_tensors():
            where = state.clear_caches() or "an object that a proof cannot find"
            return replace(
                found,
                problem=f"its code keeps a tensor of the call in {where}, which would "
                "have the rows of one replica",
            )
        if changes and local > 1:
            return replace(
                found,
                problem=f"its code changes {changes[0].where}, which the replicas of "
                "one process would change once each",
            )
        return found

    def _draws(
        self,
        call: LayerCall,
        with_rows: Sequence[bool],
        sizes: Sequence[int],
        local: int,
    ) -> RowProof:
        found = self._prover.draws(call, with_rows, sizes)
        if found.problem is not None:
            return found
        return replace(self._by_type, draws=found.draws)

    def _agreed(self, call: LayerCall, own: RowProof) -> RowProof:
        """The result for all workers: a problem if any worker has found one."""
        if self._workers is None:
            return own
        every = self._workers.group.gather_values(
            f"the row proof of layer {call.layer.name!r}", own.problem
        )
        for problem in every:
            if problem is not None:
                return RowProof(problem=problem)
        return own

    def clear(self) -> None:
        """Drops all results: workers that have joined lack them."""
        self._layers.clear()


_OFTEN = (
    "attributes of its layers change from call to call, and each of them would need "
    "another proof; hold what changes in a `keras.Variable`"
)


def _is_tensor(leaf: Any) -> bool:
    return bool(keras.ops.is_tensor(leaf))


def is_plain(call: LayerCall, with_rows: Sequence[bool]) -> bool:
    """Whether all arguments are tensors with rows or flags."""
    return all(
        has_rows or leaf is None or isinstance(leaf, bool)
        for leaf, has_rows in zip(call.leaves, with_rows, strict=True)
    )


def _kinds(call: LayerCall, with_rows: Sequence[bool]) -> tuple[tuple[Any, ...], str]:
    """What a call's arguments are, besides the values of tensors.

    Returns:
        A key, and why changes of an argument cannot be found; "" if they can.
    """
    args, kwargs = call.structure
    found: list[Any] = [len(args), tuple(sorted(kwargs)), call.constants]
    problem = ""
    for leaf, has_rows in zip(call.leaves, with_rows, strict=True):
        if _is_tensor(leaf):
            shape = tuple(leaf.shape)[1:] if has_rows else tuple(leaf.shape)
            found.append((has_rows, shape, leaf.dtype))
        elif isinstance(leaf, _PLAIN):
            found.append((type(leaf), leaf))
        else:
            settings = ArgumentSettings(leaf)
            found.append(settings.token)
            problem = problem or settings.problem
    return tuple(found), problem


__all__ = ["RowPlacement", "RowProof", "RowProofs", "is_plain"]
