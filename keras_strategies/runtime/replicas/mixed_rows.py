"""Layers in `run` whose rows depend on each other: sums over rows are exchanged.

Each replica calls a layer with its rows. A sum over rows that the layer uses further is
that of all rows, as batch statistics are: replicas exchange it, with its gradient.
Where a layer needs the rows of other replicas themselves, a warning says so.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.models.building import is_built
from keras_strategies.keras_compat.models.layer_calls import (
    layer_calls_seen_by,
    layer_calls_through,
    thread_route,
)
from keras_strategies.rows.declarations import is_declared
from keras_strategies.rows.layer_calls import LayerCall, argument_leaves
from keras_strategies.rows.row_placements import RowProof
from keras_strategies.rows.row_proofs import RowProofs
from keras_strategies.rows.row_prover import RowProver
from keras_strategies.rows.row_tensors import symbolic
from keras_strategies.runtime import context
from keras_strategies.runtime.data_parallel.exchanged_sums import ExchangedSums
from keras_strategies.runtime.data_parallel.proof_replica import proof_surroundings
from keras_strategies.runtime.data_parallel.replica_executor import LayerCallDriver
from keras_strategies.runtime.state.replica_state import has_rows
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class MixedRows:
    """Calls of layers by the replicas of a strategy.

    What cannot be traced (code of a framework, values that are read) may well be right,
    and nothing is said.

    Args:
        strategy: the strategy.
        driver: how its engine traces calls; None where replicas of all workers are one
            program.
        proving: a context around proofs.
    """

    def __init__(
        self,
        strategy: StrategyCore,
        driver: LayerCallDriver | None = None,
        proving: Callable[
            [], contextlib.AbstractContextManager[Any]
        ] = contextlib.nullcontext,
    ):
        self._strategy = strategy
        self._proving = proving
        tracing = _tracing if driver is None else driver.tracing
        surroundings = functools.partial(proof_surroundings, strategy, tracing)
        self._proofs = RowProofs(
            RowProver(surroundings),
            _may_be_split if driver is None else driver.why_unsplit,
            True,
            tracing,
            None if driver is None else strategy.placement.workers,
        )
        self._warned: weakref.WeakSet[Any] = weakref.WeakSet()

    def of_run(self, sizes: Sequence[int], exchanges: bool = True) -> RunOfLayers:
        """The calls in one run, or in a program that is traced.

        Args:
            sizes: the numbers of rows of all replicas; empty for any numbers.
            exchanges: bool, whether replicas may exchange sums. Otherwise warnings say
                that they do not.
        """
        return RunOfLayers(self, self._strategy, sizes, exchanges)

    def proof(
        self, call: LayerCall, with_rows: Sequence[bool], sizes: Sequence[int]
    ) -> RowProof:
        """The proof of a call; warns, once for a layer, where rows are mixed."""
        with self._proving():
            proof, _ = self._proofs.of(call, with_rows, sizes)
        layer = call.layer
        if proof.mixes and layer not in self._warned:
            self._warned.add(layer)
            warn_user(
                f"Layer {layer.name!r} ({type(layer).__name__}) in `run` depends on "
                f"which rows a replica has: {proof.problem}. Each of "
                f"{self._strategy.num_replicas_in_sync} replicas calls it with its "
                "rows only, so the results are not those of one device. Compute each "
                "row from its own inputs, exchange values with "
                "`ks.get_replica_context().all_reduce`, or train with `fit`, which is "
                "exact; `ks.rulecheck` shows what is found. If each row of the results "
                "does depend on its own row only, declare the layer with `ks.row_wise`."
            )
        return proof


class RunOfLayers:
    """The layers that replicas call in one run.

    Args:
        mixed: the proofs.
        strategy: the strategy.
        sizes, exchanges: see `MixedRows.of_run`.
    """

    def __init__(
        self,
        mixed: MixedRows,
        strategy: StrategyCore,
        sizes: Sequence[int],
        exchanges: bool,
    ):
        self._mixed = mixed
        self._exchanges = exchanges
        self._strategy = strategy
        self._sizes = tuple(sizes)
        # Layers that the first replica could not build before its call.
        self._unbuilt: weakref.WeakSet[Any] = weakref.WeakSet()

    def on_replica(self, own: Any) -> contextlib.AbstractContextManager[None]:
        """A context around the function on a replica.

        Args:
            own: the number of its rows; None without any argument with rows.
        """
        strategy = self._strategy
        # With one replica that has rows, sums are those of all rows.
        is_alone = len(self._sizes) - self._sizes.count(0) == 1
        is_alone = is_alone or strategy.num_replicas_in_sync == 1
        if own is None or is_alone or not strategy.sync_batch_norm:
            return contextlib.nullcontext()
        return layer_calls_seen_by(
            functools.partial(self._call, own, thread_route.call)
        )

    def _call(
        self,
        own: Any,
        route: Any,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A layer call of a replica.

        Args:
            own: the number of its rows.
            route: where layer calls go otherwise.
            layer: the layer.
            call: its original `__call__`.
            args: the arguments.
            kwargs: the keyword arguments.
        """
        with layer_calls_through(None):
            proof = self._proof(own, layer, call, args, kwargs)
        if route is not None:
            call = functools.partial(_routed, route, layer, call)
        with layer_calls_through(route):
            if proof is None or not proof.events:
                return call(*args, **kwargs)
            share = functools.partial(_share, own)
            sums = ExchangedSums(layer, proof.events, own, share, False)
            found = sums.during(lambda: call(*args, **kwargs))
        if sums.has_diverged:
            raise ContextError(
                f"Layer {layer.name!r} ({type(layer).__name__}) in `run` uses sums "
                "over rows, which replicas exchange, and has computed other ones than "
                "a trace of it. Make what changes an argument, an attribute of the "
                "layer or a `keras.Variable`, and compute with `keras.ops`."
            )
        return found

    def _proof(
        self,
        own: Any,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> RowProof | None:
        """The proof of a call with rows; None for others."""
        leaves = argument_leaves(args, kwargs)
        with_rows = [has_rows(leaf, own) for leaf in leaves]
        is_symbolic = any(isinstance(leaf, keras.KerasTensor) for leaf in leaves)
        if is_symbolic or not any(with_rows) or is_declared(layer):
            return None
        if not is_built(layer):
            _build(call, args, kwargs)
        if not is_built(layer):
            self._unbuilt.add(layer)
        if layer in self._unbuilt:
            return None
        found = LayerCall(
            *(layer, call, (args, kwargs), leaves, sum(self._sizes) or None),
            exchanges=self._exchanges,
            is_in_run=True,
        )
        return self._mixed.proof(found, with_rows, self._sizes)


@contextlib.contextmanager
def _tracing(note: Callable[[str], None]) -> Iterator[None]:
    yield


def _may_be_split(layer: Any, proof: RowProof | None) -> str:
    return ""


def _routed(
    route: Any, layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    return route(layer, call, args, kwargs)


def _build(call: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Makes a layer's variables without values of tensors, if it can."""

    with contextlib.suppress(Exception):  # The call itself raises the error.
        args, kwargs = keras.tree.map_structure(symbolic, (args, kwargs))
        call(*args, **kwargs)


def _share(own: Any) -> Any:
    """The share of a replica's rows in those of all replicas."""
    replica = context.current_replica()
    assert replica is not None
    rows = keras.ops.cast(own, "float32")
    return rows / keras.ops.maximum(replica.all_reduce("SUM", rows), 1.0)
