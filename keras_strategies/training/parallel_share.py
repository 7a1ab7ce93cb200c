"""One line at the end of the first epoch where much of a step ran on one device."""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.runtime.data_parallel.call_notes import (
    notes_of,
    parallel_share,
    reason,
    share_text,
)

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

#: A line is printed below this share.
_LEAST = 0.9

#: Models whose first epoch is over: a loop over `fit` prints one line.
_reported: weakref.WeakSet[keras.Model] = weakref.WeakSet()


class ParallelShare(keras.callbacks.Callback):  # type: ignore[misc]
    """Prints a line to stderr if replicas divided less than 90 % of the arithmetic.

    Args:
        count: int, the number of replicas.
    """

    # Steps do not wait for it.
    async_safe = True

    def __init__(self, count: int):
        super().__init__()
        self._count = count

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.model in _reported:
            return
        _reported.add(self.model)
        notes = notes_of(sublayers(self.model))
        share = parallel_share(notes.values())
        if share is None or share >= _LEAST:
            return
        causes = [reason(layer, note) for layer, note in notes.items() if note.why]
        cause = f"; all rows: {causes[0]}" if causes else ""
        others = f" and {len(causes) - 1} more" if len(causes) > 1 else ""
        print(
            f"keras_strategies: {share_text(share)} ran in parallel on {self._count} "
            f"replicas{cause}{others}. `strategy.describe(model)` lists all calls.",
            file=sys.stderr,
            flush=True,
        )


def with_parallel_share(
    strategy: StrategyCore, name: str, given: dict[str, Any]
) -> dict[str, Any]:
    """The callbacks of `fit` with `ParallelShare`, where it may print.

    Args:
        strategy: the strategy.
        name: str, the method.
        given: dict of its arguments.
    """
    callbacks, workers = given.get("callbacks"), strategy.workers
    if (
        name != "fit"
        or strategy.num_replicas_in_sync == 1
        or strategy.drivers.servers is not None
        or (workers is not None and not workers.is_chief)
        or given.get("verbose", "auto") == 0
        or isinstance(callbacks, keras.callbacks.CallbackList)
    ):
        return {}
    listed = [] if callbacks is None else keras.tree.flatten(callbacks)
    return {"callbacks": [*listed, ParallelShare(strategy.num_replicas_in_sync)]}
