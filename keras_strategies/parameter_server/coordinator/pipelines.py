"""Pipelines of a pass over input that workers read: which worker reads what."""

from __future__ import annotations

from collections.abc import Callable

from keras_strategies.parameter_server.wire.batch_references import BatchReference


class Pipelines:
    """The pipelines of one pass, in the scheduler's thread.

    Pipeline `i` is that of worker `i`, which reads its next batch for a step that is
    assigned to it. In an exact pass a step that is repeated has the batches that it
    had, and other workers read the pipeline of one that is lost.

    Args:
        reader: int, number of the `WorkerResource` that reads them.
        pass_number: int, the number of earlier passes.
        count: int, the number of pipelines.
        per_step: int, batches of a step.
        is_exact: bool, whether each batch is read for one step.
    """

    def __init__(
        self, reader: int, pass_number: int, count: int, per_step: int, is_exact: bool
    ):
        self._reader = reader
        self._pass_number = pass_number
        self._next = [0] * count
        self._ended: set[int] = set()
        self._per_step = per_step
        self.is_exact = is_exact

    def have_ended(self, place: tuple[int, int] | None) -> bool:
        """Whether no pipeline has a batch for a step.

        Args:
            place: the place of a step that is repeated, which may have a batch where
                the pipeline has ended behind it; None for a new step.
        """
        return place is None and len(self._ended) == len(self._next)

    def of_worker(
        self,
        worker: int,
        is_alive: Callable[[int], bool],
        place: tuple[int, int] | None,
    ) -> int:
        """The pipeline that a worker would read for a step; -1 for none.

        Args:
            worker: int, the worker.
            is_alive: callable of the number of a worker.
            place: the place of a step that is repeated; None for a new step.
        """
        pipelines = range(len(self._next))
        if not self.is_exact:
            own = worker % len(pipelines)
            return -1 if own in self._ended else own
        wanted = [place[0]] if place else [p for p in pipelines if p not in self._ended]
        if worker in wanted:
            return worker
        return next((p for p in wanted if not is_alive(p)), -1)

    def position(self, pipeline: int) -> int:
        """The number of batches of a pipeline that steps have been assigned."""
        return self._next[pipeline]

    def take(self, pipeline: int) -> tuple[int, int]:
        """The place of the next step that reads a pipeline."""
        place = (pipeline, self._next[pipeline])
        self._next[pipeline] += self._per_step
        return place

    def references(self, place: tuple[int, int]) -> list[BatchReference]:
        """The batches of a step."""
        pipeline, position = place
        return [
            BatchReference(self._reader, self._pass_number, pipeline, position + i)
            for i in range(self._per_step)
        ]

    def end(self, pipeline: int) -> None:
        """A pipeline has no more batches."""
        self._ended.add(pipeline)
