"""Layers that mix rows, in `run`: each replica calls them with its rows only."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.keras_compat.models.building import is_built
from keras_strategies.keras_compat.models.layer_calls import (
    layer_calls_seen_by,
    layer_calls_through,
)
from keras_strategies.rows.declarations import is_declared
from keras_strategies.rows.layer_calls import LayerCall, argument_leaves
from keras_strategies.rows.row_proofs import RowProofs
from keras_strategies.rows.row_prover import RowProver
from keras_strategies.runtime.data_parallel.proof_replica import proof_surroundings
from keras_strategies.runtime.state.replica_state import has_rows
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class MixedRows:
    """Warns, once for a layer, where replicas compute something else than one device.

    What cannot be traced (code of a framework, values that are read) may well be right,
    and nothing is said.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: StrategyCore):
        self._strategy = strategy
        surroundings = functools.partial(proof_surroundings, strategy, _tracing)
        self._proofs = RowProofs(
            RowProver(surroundings),
            lambda layer, proof: "",
            True,
            _tracing,
            may_exchange=False,
        )
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()

    def checked(
        self, sizes: Sequence[int], own: int
    ) -> contextlib.AbstractContextManager[None]:
        """A context around the function on a replica, whose layer calls are checked.

        Args:
            sizes: the numbers of rows of all replicas.
            own: that of the replica.
        """
        if sum(size > 0 for size in sizes) < 2 or not own:
            return contextlib.nullcontext()
        return layer_calls_seen_by(functools.partial(self._call, tuple(sizes), own))

    def _call(
        self,
        sizes: Sequence[int],
        own: int,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with layer_calls_through(None):
            if layer not in self._warned and is_built(layer):
                problem = self._problem(sizes, own, layer, call, args, kwargs)
                if problem is not None:
                    self._warned.add(layer)
                    self._warn(layer, problem, sum(size > 0 for size in sizes))
            return call(*args, **kwargs)

    def _problem(
        self,
        sizes: Sequence[int],
        own: int,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> str | None:
        leaves = argument_leaves(args, kwargs)
        with_rows = [has_rows(leaf, own) for leaf in leaves]
        is_symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in leaves)
        if is_symbolic or not any(with_rows) or is_declared(layer):
            return None
        found = LayerCall(layer, call, (args, kwargs), leaves, sum(sizes))
        proof, _ = self._proofs.of(found, with_rows, sizes)
        return proof.problem if proof.mixes else None

    def _warn(self, layer: Any, problem: str, replicas: int) -> None:
        warn_user(
            f"Layer {layer.name!r} ({type(layer).__name__}) in `run` depends on which "
            f"rows a replica has: {problem}. Each of {replicas} replicas calls it with "
            "its rows only, so the results are not those of one device. Compute each "
            "row from its own inputs, exchange values with "
            "`ks.get_replica_context().all_reduce`, or train with `fit`, which is "
            "exact; `ks.rulecheck` shows what is found. If each row of the results "
            "does depend on its own row only, declare the layer with `ks.row_wise`."
        )


@contextlib.contextmanager
def _tracing(note: Callable[[str], None]) -> Iterator[None]:
    yield
