"""Passes over batches that steps read, of which workers compare one ahead."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from keras_strategies.engines.tensorflow.data_parallel.own_batches import (
    as_tensors,
    has_all_rows,
)
from keras_strategies.keras_compat.models.input_adapters import RowsOfWorker, own_part
from keras_strategies.runtime.batch_prefetch import compared_ahead
from keras_strategies.runtime.row_splits import check_batch
from keras_strategies.runtime.worker_batch import WorkerBatch

if TYPE_CHECKING:
    from keras_strategies.communication.worker_steps import WorkerSteps
    from keras_strategies.runtime.placement import Placement


class BatchPasses:
    """What steps use of batches.

    The step functions of a strategy share it: where one is made again within `fit`, the
    next step uses the batch that has been read ahead.

    Args:
        placement: the devices and workers of the strategy.
    """

    def __init__(self, placement: Placement):
        self._placement = placement
        self._passes: WeakKeyDictionary[tf.data.Iterator, Iterator[tuple[Any, Any]]]
        self._passes = WeakKeyDictionary()

    def ahead(
        self, batches: tf.data.Iterator, spec: Any, steps: WorkerSteps
    ) -> Iterator[tuple[Any, Any]]:
        """The batches of an iterator as `prepared`; one is read ahead.

        Args:
            batches: the iterator.
            spec: its `element_spec`.
            steps: the steps of this worker.
        """
        if batches not in self._passes:
            # Without a reference, so that it ends when Keras no longer has it.
            own = weakref.ref(batches)

            def read() -> Any:
                found = own()
                assert found is not None
                return next(found)

            prepare = functools.partial(self.prepared, spec=spec)
            timed = steps.timed(iter(read, None))
            self._passes[batches] = compared_ahead(timed, prepare, steps)
        return self._passes[batches]

    def prepared(self, batch: Any, spec: Any = None) -> tuple[Any, Any]:
        """Begins to compare a batch of a dataset with the `element_spec` `spec`.

        As in Keras 3.15, the program is traced for the specification and not for the
        batch. Keras omits what is unknown there, such as the number of rows by which it
        weights the losses of several outputs. The rank is the batch's if it is unknown.

        Returns:
            What its step uses, and the specification.
        """
        order = batch.order if isinstance(batch, WorkerBatch) else None
        batch, spec = as_tensors(batch, spec, self._placement.replica_counts)
        batch = keras.tree.map_structure(_none_if_optional, batch)
        check_batch(own_part(batch))
        workers = self._placement.workers
        if workers is None:
            return batch, spec
        if isinstance(batch, RowsOfWorker):
            workers.steps.check_rows(int(batch.every.shape[0]), order)
            if has_all_rows(batch):
                batch, spec = own_part(batch), own_part(spec)
                workers.steps.check_batch(batch)
        else:
            workers.steps.check_batch(batch)
        return batch, spec


def _none_if_optional(leaf: Any) -> Any:
    # A dataset represents None as an empty optional.
    return None if isinstance(leaf, tf.experimental.Optional) else leaf
