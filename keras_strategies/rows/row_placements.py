"""Row placements: how a value of the global batch follows from those of replicas."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.keras_compat.recorded_calls import Calls
from keras_strategies.rows.code_names import Lines


class RowKind(enum.Enum):
    """How replicas' values of one tensor become its value for the global batch.

    The values on replicas are those of the same computation on each replica's rows.
    """

    #: Axis 0 has the rows: concatenated in replica order.
    ROWS = "rows"
    #: Equal on all replicas and to the value of the global batch.
    SAME = "same"
    #: A sum over rows: added.
    SUM = "sum"
    #: A mean over rows: averaged with the replicas' numbers of rows as weights.
    MEAN = "mean"
    #: A row depends on others, or a value on the number of rows in another way.
    MIXED = "mixed"


@dataclass(frozen=True)
class RowPlacement:
    """The placement of one tensor.

    Args:
        kind: RowKind.
        multiple: int, entries of axis 0 for each row of the call; for `ROWS` only.
        reason: str, the operation that mixes rows or has no rule, with its place where
            it is known; for `MIXED` only.
    """

    kind: RowKind
    multiple: int = 1
    reason: str = ""


ROWS = RowPlacement(RowKind.ROWS)
SAME = RowPlacement(RowKind.SAME)
SUM = RowPlacement(RowKind.SUM)
MEAN = RowPlacement(RowKind.MEAN)


#: Operations that may be sums over rows, and the functions and operators of them.
_SUMS = "CountNonzero Dot Einsum Inner Matmul Mean Nansum Sum Tensordot Vdot"
SUMS = frozenset(_SUMS.split())
FUNCTIONS_OF_SUMS = {
    **{name.lower(): name for name in SUMS},
    **dict.fromkeys(["__matmul__", "__rmatmul__"], "Matmul"),
    "count_nonzero": "CountNonzero",
}


@dataclass(frozen=True)
class Exchange:
    """A sum over rows that replicas exchange.

    Args:
        is_mean: bool, whether it is a mean: replicas send it times their shares.
        shape: tuple of int.
        dtype: str.
    """

    is_mean: bool
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ProvedEvent:
    """What a replica calls, in a call with exchanges.

    Args:
        name: str, an operation of `SUMS`; empty for a call of a layer.
        layer: int, the `id` of the layer; 0 for an operation.
        is_one: bool, whether the layer's own sums are not in the list.
        exchange: of an operation, after which replicas exchange its result.
    """

    name: str = ""
    layer: int = 0
    is_one: bool = False
    exchange: Exchange | None = None


@dataclass(frozen=True)
class RowProof:
    """Placements of the results of one layer call, its backward pass included.

    Args:
        outputs: placements of the leaves of the outputs, in the order of `keras.tree`;
            None for a leaf that is no tensor and equal for any number of rows.
        losses: placements of the losses that the layer adds, in their order.
        updates: placements of the values that the call assigns, by `id(variable)`.
        problem: str, why the call cannot be split by rows exactly, as the end of the
            sentence "Layer 'x' cannot be split by rows: ..."; None if it can be.
        mixes: bool, whether the problem is an operation by which rows of the outputs or
            losses depend on one another, as far as rules tell.
        draws: for each draw of random numbers, in their order, the entries of its axis
            0 for each row; 0 for a draw that all rows share.
        drawn: the names of the functions that draw them with a parameter for each
            entry; empty for others.
        calls: where calls are eager, what replicas with a number of rows called just
            after the proof, by this number. A replica that calls something else has
            computed what is not proved.
        lines: the lines of the user's code that ran in the traces; empty if unknown.
        events: where replicas exchange sums over rows: the sums and the layers of the
            call, in their order.
        problem_without: str, why the call cannot be split without exchanges.
        every_output, every_loss, every_update: the placement of all outputs, losses and
            updates, of a call that is known by type; None where they are listed.
    """

    outputs: Sequence[RowPlacement | None] = ()
    losses: Sequence[RowPlacement] = ()
    updates: Mapping[int, RowPlacement] = field(default_factory=dict)
    problem: str | None = None
    mixes: bool = False
    draws: Sequence[int] = ()
    drawn: Sequence[str] = ()
    calls: dict[int, Calls] = field(default_factory=dict, compare=False)
    lines: Lines = field(default_factory=set, compare=False)
    events: Sequence[ProvedEvent] = ()
    problem_without: str | None = None
    every_output: RowPlacement | None = None
    every_loss: RowPlacement | None = None
    every_update: RowPlacement | None = None

    @property
    def is_by_type(self) -> bool:
        """Whether the call is known by the types of its layers."""
        return self.every_output is not None

    def of_outputs(self, count: int) -> list[RowPlacement | None]:
        """The placements of a number of outputs."""
        return [self.every_output] * count if self.is_by_type else list(self.outputs)

    def of_losses(self, count: int) -> list[RowPlacement]:
        """The placements of a number of losses."""
        return [self.every_loss] * count if self.every_loss else list(self.losses)

    def of_update(self, variable: Any) -> RowPlacement | None:
        """The placement of the value that the call assigns; None if it is unknown."""
        return self.every_update or self.updates.get(id(variable))
