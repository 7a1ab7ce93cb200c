"""What an engine implements for data-parallel layer calls.

A `LayerCallDriver` belongs to a strategy, a `ReplicaExecutor` to one call. Both are
interfaces; the call itself is `data_parallel_call.py`, the same on all engines.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.rows.layer_calls import LayerCall
from keras_strategies.rows.row_placements import RowProof
from keras_strategies.runtime.data_parallel.gradient_boundary import GradientBoundary
from keras_strategies.runtime.data_parallel.split_plan import (
    OutputActivation,
    SplitPlan,
)
from keras_strategies.runtime.random_numbers.row_draws import OwnRows
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.state.replica_state import (
    CallState,
    ReplicaResult,
)

#: Calls the layer on a replica: with the replica's slices of the split tensors, its
#: variables, and its rows if the call draws random numbers.
CallOnReplica = Callable[[Sequence[Any], CallState, OwnRows | None], ReplicaResult]


class NotOnReplicasError(Exception):
    """A layer cannot be called on replicas, as its first call on them has shown.

    Args:
        problem: str, what the layer does.
        remedy: str, what to do to run it on all replicas.
    """

    def __init__(self, problem: str, remedy: str):
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


class UnprovedCallError(Exception):
    """Replicas have computed with other operations than those that are proved."""


class UnmatchedSumsError(Exception):
    """Replicas do not call the functions whose results they have to exchange."""


@dataclass(frozen=True)
class ForwardPass:
    """What the replicas of one layer call have computed.

    Args:
        results: the results of the replicas.
        slices: for each tensor that was split its slices, on their replicas.
        needs_gradient: for each of these tensors, whether its slices have a gradient.
        reads: for each replica the copies of variables that have a gradient, as
            `ReplicaState.reads`.
        activations: by number of an output, the activation that losses look for.
    """

    results: list[ReplicaResult]
    slices: list[list[Any]]
    needs_gradient: list[bool]
    reads: list[dict[Any, tuple[Any, Any]]]
    activations: dict[int, OutputActivation] = field(default_factory=dict)


class ReplicaExecutor(abc.ABC):
    """The replicas of one layer call."""

    #: The plan of the call.
    plan: SplitPlan

    @property
    def is_eager(self) -> bool:
        """Whether replicas compute now, and no program is traced."""
        return True

    @abc.abstractmethod
    def forward(self, tensors: Sequence[Any], call: CallOnReplica) -> ForwardPass:
        """Splits tensors by rows and calls the layer on each replica.

        Args:
            tensors: tensors of the global batch.
            call: the call on one replica.

        Raises:
            NotOnReplicasError: if the layer does not work on replicas.
        """

    def undo_draws(self) -> None:
        """Random numbers are as before the call, whose results are dropped."""
        return None

    @abc.abstractmethod
    def connect(self, boundary: GradientBoundary) -> list[Any]:
        """The global tensors of a boundary's channels, with gradients to its targets.

        In the backward pass, `boundary.backward` has what each replica computes, and
        `boundary.sums` makes gradients of the targets of it.
        """


class LayerCallDriver(abc.ABC):
    """Layer calls of a strategy on the replicas of an engine."""

    #: In what an unsplit call may differ from one device, for a warning.
    but_for = ""

    @abc.abstractmethod
    def can_split(self, tensors: Sequence[Any]) -> bool:
        """Whether replicas can call a layer with slices of these tensors."""

    @abc.abstractmethod
    def foreign_variables(self, layer: Any) -> str | None:
        """The objects of the framework, in a layer, whose variables have no copies.

        Returns:
            str, the objects, for a warning; None without any.
        """

    @abc.abstractmethod
    def executor(self, plan: SplitPlan) -> ReplicaExecutor:
        """The replicas that have rows in a call."""

    @abc.abstractmethod
    def unsplit(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a layer that is not split."""

    def why_unsplit(self, layer: Any, proof: RowProof | None) -> str:
        """Why calls of a layer are not split, whatever its operations are.

        Args:
            layer: the layer.
            proof: the proof of the call; None before it is proved.

        Returns:
            str, as the end of a sentence, such as "it has hooks of torch"; empty if
            they are split.
        """
        return ""

    def tracing(
        self, note: Callable[[str], None]
    ) -> contextlib.AbstractContextManager[Any]:
        """A context around the trace of a layer call, in which constants are made.

        Args:
            note: gets why the call cannot be split, as the end of "its code ...".
        """
        return contextlib.nullcontext()

    def may_recompute(self) -> bool:
        """Whether code around a call may repeat it for its gradients."""
        return False

    def sizes_in_program(
        self, layer_call: LayerCall, count: int
    ) -> tuple[list[Any], bool]:
        """Rows for each replica, in a program for any number of rows.

        Returns:
            The scalar tensors, and whether each is known to be positive.
        """
        raise NotImplementedError

    def accepts_parts(self, layer_call: LayerCall, row_split: RowSplit) -> bool:
        """Whether a layer can be called on the rows of an argument's parts."""
        return True
