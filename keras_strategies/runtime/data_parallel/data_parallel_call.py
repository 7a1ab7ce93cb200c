"""The data-parallel call of a layer, for engines with separate replicas.

# Why the call, and not the step

A step of `Model.fit` runs once, on the global batch, as Keras or its user wrote
it. Only the outermost calls of layers in it (`self(x, training=True)`) are
parallel: the rows of their arguments are split over the replicas, each replica
calls the layer on its rows, and the outputs are joined to one global batch. The
loss, its reduction and masks, every metric, `add_loss`, clipping, accumulation and
the optimizer get the same values as on one device, so they need no distributed
version, and a custom `train_step` is exact whatever it computes. In the backward
pass the outputs' gradient is split by rows, each replica runs its own backward
pass, and the gradients of the variables are summed.

Only results of code *inside* the layer have to be combined: batch statistics (see
`training/batch_norm.py`), losses that layers add, and state that they update.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.keras_compat.models.building import is_built
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.keras_compat.variables.generator_seeds import (
    create_global_generator,
)
from keras_strategies.rows.declarations import is_declared
from keras_strategies.rows.layer_calls import LayerCall, argument_leaves
from keras_strategies.rows.row_placements import RowProof
from keras_strategies.rows.row_proofs import RowProofs, is_plain
from keras_strategies.rows.row_prover import RowProver
from keras_strategies.runtime.data_parallel.call_notes import CallNote, note_of
from keras_strategies.runtime.data_parallel.call_on_replicas import call_on_replicas
from keras_strategies.runtime.data_parallel.proof_replica import proof_surroundings
from keras_strategies.runtime.data_parallel.replica_executor import (
    LayerCallDriver,
    NotOnReplicasError,
    UnmatchedSumsError,
    UnprovedCallError,
)
from keras_strategies.runtime.data_parallel.row_parts import RowParts, parts_of
from keras_strategies.runtime.data_parallel.split_plan import SplitPlan
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.replicas.tensor_primitives import TensorPrimitives
from keras_strategies.runtime.row_splits import split_sizes
from keras_strategies.runtime.state.replica_state import has_rows
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.rows.trace import Trace
    from keras_strategies.runtime.engine import StrategyCore


_logger = logging.getLogger("keras_strategies.row_parts")


class _UnsplitCall(threading.local):
    # Whether this thread is in one: its layers need no warning of their own.
    is_open = False


class DataParallelCall:
    """Calls a layer on all replicas, each on its rows of the global batch.

    Args:
        strategy: the strategy.
        primitives: the functions of the framework's tensors.
        driver: the replicas of the engine.
    """

    def __init__(
        self,
        strategy: StrategyCore,
        primitives: TensorPrimitives,
        driver: LayerCallDriver,
    ):
        self.strategy = strategy
        self.placement = strategy.placement
        self._primitives = primitives
        self._driver = driver
        # Why, as the end of a sentence; empty for layers without foreign variables.
        self._not_on_replicas: weakref.WeakKeyDictionary[Any, str] = (
            weakref.WeakKeyDictionary()
        )
        self._foreign: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._problems: weakref.WeakKeyDictionary[Any, set[str]] = (
            weakref.WeakKeyDictionary()
        )
        # Layers that unsplit calls contain.
        self._in_unsplit_calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._unsplit_call = _UnsplitCall()
        self._row_proofs = RowProofs(
            RowProver(functools.partial(_surroundings, strategy, driver)),
            driver.why_unsplit,
            strategy.sync_batch_norm,
            driver.tracing,
            strategy.placement.workers,
        )

    def workers_changed(self) -> None:
        """Drops the row proofs, which workers agree on."""
        self._row_proofs.clear()

    # The call.

    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with layer_calls_through(None):
            if layer in self._in_unsplit_calls and self._driver.may_recompute():
                # Both passes have to compute the same tensors.
                return _with_all_rows(layer, call, args, kwargs)
            unsplit = self._driver.unsplit
            leaves = argument_leaves(args, kwargs)
            if not is_built(layer):
                return unsplit(layer, call, args, kwargs)
            if any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                return call(*args, **kwargs)
            note = note_of(layer)

            def all_rows(why: str) -> Any:
                note.unsplit(why, has_notes_inside=False)
                return unsplit(layer, note.counting(layer, call), args, kwargs)

            problem = self._not_on_replicas.get(layer)
            if problem is not None:
                return all_rows(f"it {problem}")
            leaves = [_as_tensor(leaf) for leaf in leaves]
            rows = _rows(leaves)
            if rows is None:
                return all_rows("it has no argument with rows")
            layer_call = LayerCall(layer, call, (args, kwargs), leaves, rows)
            row_split = self._row_split(layer_call)
            if row_split is None:
                return all_rows(
                    self._foreign.get(layer)
                    or "the batch has too few rows, or a tensor that replicas cannot "
                    "have parts of"
                )
            proof, is_new, (is_split, outputs) = self._proved(
                layer_call, row_split, note
            )
            if proof.problem is None:
                if not is_split:
                    return all_rows(f"it {self._not_on_replicas[layer]}")
                note.divided(_how(layer, proof))
                return outputs
            note.unsplit(proof.problem, has_notes_inside=True)
            self._in_unsplit_calls.update(sublayers(layer)[1:])
            is_inner = self._unsplit_call.is_open
            self._unsplit_call.is_open = True
            try:
                with layer_calls_through(self._inner_call):
                    outputs = unsplit(layer, call, args, kwargs)
            finally:
                self._unsplit_call.is_open = is_inner
            note.count_own(layer, outputs)
            if is_new and not is_inner:
                self._warn_once(layer, proof.problem)
            return outputs

    def on_row_parts(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        adds: bool = False,
        only_adds: bool = False,
        known: RowProof | None = None,
    ) -> tuple[bool, Any]:
        """Calls a function on replicas, see `RowPartsCaller`."""
        leaves = [_as_tensor(leaf) for leaf in argument_leaves(args, kwargs)]
        in_parts = [leaf for leaf in leaves if isinstance(leaf, RowParts)]
        row_split = in_parts[0].row_split
        if layer in self._not_on_replicas or any(
            parts_of(leaf, row_split) is None for leaf in in_parts
        ):
            return False, None
        rows = in_parts[0].rows
        constants = frozenset(
            i
            for i, leaf in enumerate(leaves)
            if not isinstance(leaf, RowParts)
            and keras.ops.is_tensor(leaf)
            and not self._primitives.may_have_gradient(leaf)
        )
        layer_call = LayerCall(
            *(layer, call, (args, kwargs), leaves, rows),
            *(adds, only_adds, constants),
            exchanges=False,
        )
        with layer_calls_through(None):
            if known is not None and is_plain(layer_call, _with_rows(layer_call)):
                return self._on_replicas(layer_call, row_split, known)
            proof, is_new, found = self._proved(layer_call, row_split)
            if is_new and proof.problem is not None:
                _logger.info(
                    "%r gets all rows of the outputs, which are joined: %s.",
                    layer.name,
                    proof.problem,
                )
            return found

    def _proved(
        self,
        layer_call: LayerCall,
        row_split: RowSplit,
        note: CallNote | None = None,
    ) -> tuple[RowProof, bool, tuple[bool, Any]]:
        """The proof of a call, whether it is new, and `_on_replicas` if it is split."""
        with_rows = _with_rows(layer_call)
        sizes = row_split.every if isinstance(layer_call.rows, int) else ()
        counted = layer_call
        if note is not None and note.work is None:
            counting = note.counting(layer_call.layer, layer_call.call)
            counted = replace(layer_call, call=counting)
        while True:
            proof, is_new = self._row_proofs.of(layer_call, with_rows, sizes)
            if proof.problem is not None:
                return proof, is_new, (False, None)
            try:
                return proof, is_new, self._on_replicas(counted, row_split, proof)
            except UnprovedCallError:
                self._row_proofs.drop(layer_call, proof)
            except UnmatchedSumsError:
                proof = self._row_proofs.refuse(layer_call, proof)
                return proof, True, (False, None)

    def _on_replicas(
        self, layer_call: LayerCall, row_split: RowSplit, proof: RowProof
    ) -> tuple[bool, Any]:
        """Whether a layer works on replicas, and its outputs."""
        plan = SplitPlan(self.strategy, layer_call, row_split, proof, self)
        try:
            return True, call_on_replicas(plan, self._driver)
        except NotOnReplicasError as error:
            problem, remedy = error.problem, error.remedy
        layer = layer_call.layer
        warn_user(
            f"Layer {layer.name!r} ({type(layer).__name__}) {problem}. It is called on "
            "one device with the unsplit batch, which is exact but not parallel. "
            f"{remedy} to run the layer on all replicas."
        )
        self._not_on_replicas[layer] = problem
        return False, None

    def _inner_call(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call in a layer that is unsplit: blocks of layers are split in turn.

        A single layer is not: to move its rows can take longer than its computation.
        """
        if len(sublayers(layer)) > 1:
            return self(layer, call, args, kwargs)
        return _with_all_rows(layer, call, args, kwargs)

    def _row_split(self, layer_call: LayerCall) -> RowSplit | None:
        """The rows of each replica that takes part; None to call the layer unsplit."""
        layer, rows = layer_call.layer, layer_call.rows
        tensors = [leaf for leaf in layer_call.leaves if has_rows(leaf, rows)]
        if not self._driver.can_split(tensors) or self._has_foreign_variables(layer):
            return None
        row_split = self._split_of_parts(layer_call) or self._new_split(layer_call)
        if row_split is None:
            # Fewer rows than workers: each worker computes all rows.
            return None
        replicas, lead = self.placement.replicas, self.placement.variables
        is_alone = len(row_split.every) == 1 and replicas[0] == lead
        if not row_split.sizes or is_alone:
            return None
        return row_split

    def _has_foreign_variables(self, layer: Any) -> bool:
        """Whether a layer has variables without copies on replicas; warns once."""
        known = self._foreign.get(layer)
        if known is None:
            what = self._driver.foreign_variables(layer)
            known = self._foreign[layer] = f"it contains {what}" if what else ""
            if known:
                warn_user(
                    f"Layer {layer.name!r} contains {what}. Replicas cannot have "
                    "copies of their variables, so the layer is called on one device "
                    "with the unsplit batch, which is exact but not parallel. Use "
                    "`add_weight` and Keras layers to run it on all replicas."
                )
        return bool(known)

    def _split_of_parts(self, layer_call: LayerCall) -> RowSplit | None:
        """The rows of an argument that is on its replicas; None without one."""
        for leaf in layer_call.leaves:
            if (
                isinstance(leaf, RowParts)
                and leaf.caller is self
                and has_rows(leaf, layer_call.rows)
                and leaf.parts is not None
                and self._driver.accepts_parts(layer_call, leaf.row_split)
            ):
                return leaf.row_split
        return None

    def _new_split(self, layer_call: LayerCall) -> RowSplit | None:
        """The rows in equal parts; None if a worker has none."""
        rows, workers = layer_call.rows, self.placement.workers
        total = self.placement.replica_counts.total
        every: list[Any] = []
        if isinstance(rows, int):
            # Replicas without rows do not participate.
            every, all_have_rows = split_sizes(rows, total), True
        else:
            every, all_have_rows = self._driver.sizes_in_program(layer_call, total)
        if workers is None:
            return RowSplit.local(self._primitives, every, all_have_rows)
        return RowSplit.over(self._primitives, every, workers, all_have_rows)

    def _warn_once(self, layer: Any, problem: str) -> None:
        """Warns, unless another proof of the layer has found the same problem."""
        known = self._problems.setdefault(layer, set())
        if problem in known:
            return
        known.add(problem)
        warn_user(
            f"Layer {layer.name!r} ({type(layer).__name__}) cannot be split by rows: "
            f"{problem}. Its code runs on one device with the unsplit batch instead, "
            f"which is exact{self._driver.but_for}; only blocks of layers in it that "
            "can be split are parallel. "
            f"To run all of it on all replicas of {self.strategy!r}, compute "
            "each row from its own inputs, and move computations on the full batch out "
            "of the layer, for example to the loss."
        )


def _with_all_rows(
    layer: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Calls a layer in one that is not split."""
    note = note_of(layer)
    note.unsplit("", has_notes_inside=False)
    return note.counting(layer, call)(*args, **kwargs)


def _how(layer: Any, proof: RowProof) -> str:
    """How a call was split, for `describe`."""
    if is_declared(layer):
        return "split as declared"
    return "split by type" if proof.is_by_type else "split by rows"


@contextlib.contextmanager
def _surroundings(
    strategy: StrategyCore,
    driver: LayerCallDriver,
    trace: Trace,
    rows: Any,
    replicas: int,
) -> Iterator[None]:
    """See `proof_surroundings`."""
    with proof_surroundings(strategy, driver.tracing, trace, rows, replicas):
        yield
    if trace.draws_without_seed:
        create_global_generator()


def _with_rows(layer_call: LayerCall) -> list[bool]:
    """For each leaf of a call, whether it has the rows."""
    return [has_rows(leaf, layer_call.rows) for leaf in layer_call.leaves]


def _as_tensor(leaf: Any) -> Any:
    """Converts NumPy arrays to tensors; other leaves are returned unchanged."""
    if hasattr(leaf, "__array__") and not keras.ops.is_tensor(leaf):
        if isinstance(leaf, keras.Variable):
            return leaf
        return keras.ops.convert_to_tensor(leaf)
    return leaf


def _rows(leaves: list[Any]) -> Any:
    """The rows of the first tensor with a batch axis; None without one."""
    for leaf in leaves:
        if keras.ops.is_tensor(leaf) and len(leaf.shape) > 0:
            is_in_parts = isinstance(leaf, RowParts)
            return leaf.rows if is_in_parts else keras.ops.shape(leaf)[0]
    return None
