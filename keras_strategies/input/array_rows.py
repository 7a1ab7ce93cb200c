"""This worker's rows of the batches of array rows, for `fit`, `evaluate`, `predict`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from keras_strategies.communication.communicator import Communicator
from keras_strategies.errors import WorkerError
from keras_strategies.input.arrays import ArrayDataset
from keras_strategies.keras_compat.models.input_adapters import batches_adapter
from keras_strategies.runtime.worker_batch import WorkerBatch, WorkerRows


def own_array_rows(
    dataset: ArrayDataset,
    workers: Communicator,
    rows: WorkerRows,
    class_weight: dict[int, float] | None,
) -> Any:
    """The input of Keras's `fit`, `evaluate` and `predict`, with this worker's rows.

    Workers have equal random numbers when a method begins, from which passes of a
    shuffled dataset without a seed draw theirs.

    Args:
        dataset: batches of array rows.
        workers: the workers.
        rows: the rows of each worker.
        class_weight: dict, as for `fit`.

    Raises:
        WorkerError: if the datasets of workers have other orders or lengths.
    """
    found = workers.group.gather_values("the rows of a dataset", dataset.order())
    for other, each in enumerate(found):
        if each != found[0]:
            raise WorkerError(
                f"Workers have different datasets: worker 0 has {_named(found[0])}, "
                f"worker {other} has {_named(each)}. All workers must make the same "
                "datasets and iterate over them equally often."
            )

    def own() -> Iterator[WorkerBatch]:
        for indices in dataset.batch_rows():
            yield rows.read(len(indices), functools.partial(_at, dataset, indices))

    return batches_adapter(
        lambda: (each.batch for each in own()),
        dataset.cardinality(),
        class_weight,
        own=own,
    )


def _at(dataset: ArrayDataset, indices: Any, start: int, stop: int) -> Any:
    return dataset.at(indices[start:stop])


def _named(order: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in order.items())
