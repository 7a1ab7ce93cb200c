"""Proofs of calls: traces for several numbers of rows, placements of the results."""

from __future__ import annotations

import enum
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np

import keras_strategies.rows.rules  # noqa: F401  Registers the rules.
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import get_mask, set_mask
from keras_strategies.keras_compat.symbolic_backend import routed_backend, tracing
from keras_strategies.keras_compat.variables.generator_seeds import is_seed_state
from keras_strategies.rows.code_names import checked_code
from keras_strategies.rows.exchanges import Exchanges
from keras_strategies.rows.layer_calls import LayerCall
from keras_strategies.rows.placed import (
    SAME,
    ZERO,
    MixesRows,
    UnknownUse,
    are_equal,
    rows_of_shapes,
)
from keras_strategies.rows.propagation import Propagation
from keras_strategies.rows.python_state import PythonState
from keras_strategies.rows.row_placements import RowKind, RowPlacement, RowProof
from keras_strategies.rows.row_tensors import (
    ANY_LENGTH,
    NotTraced,
    RowCount,
    RowTensor,
    error_text,
    is_array,
    shape_of,
)
from keras_strategies.rows.trace import Trace
from keras_strategies.rows.trace_functions import DRAWS, FUNCTIONS

#: Numbers that stand for any number of rows; no length of an axis is a multiple.
_ANY_ROWS = (1009, 1013)
#: Outputs that are no tensors and hold none.
_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.generic)

#: Returns a context around the trace of a call, given the trace, the number of rows of
#: the call, and how many replicas have rows.
Surroundings = Callable[[Trace, Any, int], AbstractContextManager[Any]]


class RowProver:
    """Propagates row placements through the operations of a call.

    The call is made with symbolic tensors for several numbers of rows, those of the
    call and of its replicas among them. What differs between the traces depends on the
    number. Nothing is computed, and no result depends on values of tensors.

    Derivatives need no rules: the derivative of functions of rows and of sums over rows
    is a function of rows, or a sum over rows.

    Args:
        surroundings: see `Surroundings`.
    """

    def __init__(self, surroundings: Surroundings = lambda *_: nullcontext()):
        self._surroundings = surroundings

    def prove(
        self,
        call: LayerCall,
        with_rows: Sequence[bool],
        sizes: Sequence[int],
        may_exchange: bool = False,
    ) -> RowProof:
        """The placements of a call's results, where each replica gets its rows.

        A failure of the call itself (an error of the user's code) is a proof with a
        problem: the unsplit call that follows raises the error again.

        Args:
            call: the call, with tensors of the global batch.
            with_rows: for each leaf of the call, whether replicas get slices of its
                rows; others get it as it is.
            sizes: the numbers of rows of all replicas, in their order; empty in a
                program for any number of rows. Their sum is `call.rows`.
            may_exchange: bool, whether replicas may exchange sums over rows, if the
                call cannot be split otherwise.
        """
        given = (self._surroundings, call, with_rows, sizes, may_exchange)
        # Without collections tensors of traces stay in the youngest generation.
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            with routed_backend():
                return _Attempts(*given, PythonState(call.layer, call.leaves)).proof()
        finally:
            if was_enabled:
                gc.enable()


@dataclass
class _Attempts:
    """Proofs of a call, until all known layers that have to be traced, are."""

    _surroundings: Surroundings
    _call: LayerCall
    _with_rows: Sequence[bool]
    _sizes: Sequence[int]
    _may_exchange: bool
    _state: PythonState
    _followed: frozenset[int] = frozenset()
    _traces: list[Trace] = field(default_factory=list)

    def __post_init__(self) -> None:
        sizes = [size for size in self._sizes if size]
        self._replicas = max(2, len(sizes))
        counts = {*sizes, self._call.rows} if self._sizes else {*_ANY_ROWS}
        if len(counts) < 2:
            counts |= {max(counts) + 3}
        self._counts = tuple(sorted(counts))

    def proof(self) -> RowProof:
        """The proof."""
        try:
            while True:
                try:
                    return self._proof_without_left()
                except UnknownUse as error:  # Of a call that was not followed yet.
                    self._followed |= {*error.args}
                    self._close()
        except MixesRows as error:
            return RowProof(problem=f"its code {error}", mixes=True)
        except Exception as error:  # Of the user's code, or of a framework.
            if isinstance(error, MemoryError):
                raise  # Not a property of the layer, which may be split next time.
            return RowProof(problem=self._failure(error))
        finally:
            self._close()

    def _failure(self, error: Exception) -> str:
        problems = [trace.problem for trace in self._traces if trace.problem]
        if problems:
            return f"its code {problems[0]}"
        return f"its call cannot be traced ({error_text(error)})"

    def _proof_without_left(self) -> RowProof:
        proof = self._proof()
        made = [each for trace in self._traces for each in trace.made]
        self._close()
        if proof.problem is None and _are_alive(made):
            return RowProof(
                problem="its code keeps a tensor of the call, which would have the "
                "rows of one replica"
            )
        return proof

    def _close(self) -> None:
        for trace in self._traces:
            trace.close()
        self._traces.clear()

    def _proof(self) -> RowProof:
        if self._state.problem is not None:
            return RowProof(problem=self._state.problem)
        for rows in self._counts:
            self._trace(rows)
            # After each, as the last may leave what a call of all rows has left.
            change = self._state.change()
            if change is not None:
                return RowProof(problem=change)
        events = self._traces[0].events
        exchanges = Exchanges(events if self._may_exchange else ())
        first = found = self._placed(exchanges)
        while found.problem is not None and exchanges.choose_more():
            found = self._placed(exchanges)
        if found.problem is not None:
            return first
        proved = exchanges.proved(self._call.layer)
        return replace(found, events=proved, problem_without=first.problem)

    def _placed(self, exchanges: Exchanges) -> RowProof:
        try:
            placements = self._propagated(exchanges)
        except MixesRows as error:
            return RowProof(problem=f"its code {error}", mixes=True)
        traces = self._traces
        every = [trace.outputs for trace in traces]
        columns = placements.columns(every, "returns other outputs")
        outputs = [self._output(placements, leaves) for leaves in columns]
        columns = placements.columns([trace.losses for trace in traces])
        losses = [self._joined(placements, each) for each in columns]
        updates = self._updates(placements)
        results = [*outputs, *losses]
        for i, placement in enumerate([*results, *updates.values()]):
            if placement is not None and placement.kind is RowKind.MIXED:
                return RowProof(problem=placement.reason, mixes=i < len(results))
        drawn = [placements.known[x.index] for _, x in traces[0].drawn]
        return RowProof(
            outputs,
            losses,
            updates,
            draws=[each.multiple if each.is_rows else 0 for each in drawn],
            drawn=[name for name, _ in traces[0].drawn],
            # Declared code runs on replicas, and not in a trace.
            lines=set().union(*(x.lines for x in traces if not x.calls_declared)),
        )

    def _trace(self, rows: int) -> None:
        call = self._call
        options = (rows, not self._sizes, self._followed, call.only_adds)
        trace = Trace(*options, FUNCTIONS, DRAWS)
        self._traces.append(trace)
        given = [
            self._argument(trace, leaf, has_rows)
            for leaf, has_rows in zip(call.leaves, self._with_rows, strict=True)
        ]
        args, kwargs = call.arguments(given)
        scope = trace.state.scope()
        with (
            self._surroundings(trace, call.rows, self._replicas),
            layer_calls_through(None),
            tracing(trace),
            checked_code() as trace.lines,
            scope,
        ):
            outputs = call.call(*args, **kwargs)
            (trace.outputs,) = trace.values([outputs])
        trace.losses += scope.losses
        scope.losses.clear()
        if trace.problem is not None:
            raise NotTraced(trace.problem)

    def _argument(self, trace: Trace, leaf: Any, has_rows: bool) -> Any:
        is_tensor = hasattr(leaf, "parts") or isinstance(leaf, keras.KerasTensor)
        if isinstance(leaf, keras.Variable) or not (is_tensor or is_array(leaf)):
            return leaf
        if hasattr(leaf, "shape") and getattr(leaf.shape, "rank", 0) is None:
            raise NotTraced("gets a tensor whose number of axes is unknown")
        shape = [ANY_LENGTH if n is None else int(n) for n in leaf.shape]
        if has_rows:
            shape[0] = trace.rows
        dtype = keras.backend.standardize_dtype(leaf.dtype)
        made = trace.tensor(shape, dtype)
        trace.inputs.append(made)
        mask = get_mask(leaf)
        if mask is not None:
            set_mask(made, self._argument(trace, mask, has_rows))
        return made

    def _propagated(self, exchanges: Exchanges) -> Propagation:
        found = Propagation(self._counts, not self._sizes, exchanges)
        for tensors in zip(*(trace.inputs for trace in self._traces), strict=True):
            shapes = [shape_of(x) for x in tensors]
            found.known[tensors[0].index] = rows_of_shapes(shapes, self._counts)
        variables = [trace.state.initial for trace in self._traces]
        if not all(are_equal(variables[0], each) for each in variables[1:]):
            raise MixesRows("uses other variables for other numbers of rows")
        for value in variables[0].values():
            found.known[value.index] = ZERO if self._call.adds else SAME
        found.run([trace.nodes for trace in self._traces])
        if found.problem is not None:
            raise MixesRows(found.problem)
        return found

    # Results of the call.

    def _output(
        self, placements: Propagation, leaves: Sequence[Any]
    ) -> RowPlacement | None:
        first = leaves[0]
        if isinstance(first, (RowTensor, RowCount)) or is_array(first):
            placed = self._joined(placements, leaves)
            masks = [get_mask(leaf) for leaf in leaves]
            if masks[0] is not None and placements.of_leaf(masks).joined() != placed:
                reason = "the mask of an output has other rows than the output"
                return RowPlacement(RowKind.MIXED, reason=reason)
            return placed
        if not isinstance(first, (*_PLAIN, np.dtype, keras.Variable)):
            raise NotTraced(
                f"returns a {type(first).__name__}, which may hold tensors; return "
                "tuples, lists and dicts"
            )
        if any(type(leaf) is not type(first) or leaf != first for leaf in leaves[1:]):
            raise MixesRows("returns a value that depends on the number of rows")
        return None

    def _joined(
        self, placements: Propagation, leaves: Sequence[Any], variable: Any = None
    ) -> RowPlacement:
        """How a result, or value of a variable, of replicas is joined.

        In `run` replicas have results as they are.
        """
        found = placements.of_leaf(leaves).joined()
        exchanges, reason = placements.exchanges, found.reason
        is_part = found.kind in (RowKind.SUM, RowKind.MEAN)
        if variable is not None:
            if not reason and not self._may_be_assigned(variable, found):
                reason = (
                    f"the value that it assigns to variable {variable.path!r} is "
                    f"placed by {found.kind.value} over rows"
                )
        elif is_part and self._call.is_in_run and exchanges.chosen:
            # A quotient of a replica's sum and that of all rows is neither's.
            reason = "a result is a part of a sum"
        if not reason:
            return found
        exchanges.want(leaves[0])
        return RowPlacement(RowKind.MIXED, reason=reason)

    def _updates(self, placements: Propagation) -> dict[int, RowPlacement]:
        states = [trace.state for trace in self._traces]
        found = {}
        for key, variable in states[0].variables.items():
            values = [state.values[key] for state in states]
            is_changed = any(s.values[key] is not s.initial[key] for s in states)
            if is_changed and not is_seed_state(variable):
                found[key] = self._joined(placements, values, variable)
        return found

    def _may_be_assigned(self, variable: Any, placement: RowPlacement) -> bool:
        if self._call.is_in_run:
            # By default replicas' values are averaged, however many rows they have.
            is_local = variable.synchronization == "on_read"
            is_aggregated = variable.aggregation not in (None, "none")
            return is_local or is_aggregated or placement.kind is RowKind.SAME
        kinds = [RowKind.SAME, RowKind.MEAN]
        if self._call.adds:
            kinds.append(RowKind.SUM)
        return placement.kind in kinds


def _are_alive(references: Sequence[weakref.ref[Any]]) -> bool:
    """Whether Python still holds a tensor of a trace."""
    if all(each() is None for each in references):
        return False
    gc.collect(0)
    return any(each() is not None for each in references)
