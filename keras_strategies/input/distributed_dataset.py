"""Distributed datasets and iterators: one component for each replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.errors import (
    ContextError,
    InputError,
    InvalidArgumentError,
    InvalidTypeError,
)
from keras_strategies.input.feeds import Feed
from keras_strategies.input.prefetch import Prefetcher
from keras_strategies.runtime.engine import Engine
from keras_strategies.types import InputOptions
from keras_strategies.values import PerReplica, map_structure


class DistributedDataset:
    """Batches with a component for each replica, on the replica's device.

    Created by `strategy.experimental_distribute_dataset` and
    `strategy.distribute_datasets_from_function`. Each iteration starts from the first
    batch; `fit`, `evaluate` and `predict` accept it as well.

    Args:
        engine: the engine.
        devices: the local replicas' devices.
        feed: the batches of the replicas, on the host.
        options: an `InputOptions`.
        workers: the workers that the batches are split over; None without a cluster.

    Example:

    >>> dataset = strategy.experimental_distribute_dataset(dataset)
    >>> for batch in dataset:
    ...     strategy.run(train_step, args=(batch,))
    """

    def __init__(
        self,
        engine: Engine,
        devices: Sequence[Device],
        feed: Feed,
        options: InputOptions,
        workers: Communicator | None = None,
    ):
        self._engine = engine
        self._devices = tuple(devices)
        self._feed = feed
        self._options = options
        self._workers = workers

    @property
    def generation(self) -> object:
        """Another object for each group of elastic workers."""
        return None if self._workers is None else self._workers.group

    @property
    def feed(self) -> Feed:
        """The feed of the replicas, on the host."""
        return self._feed

    @property
    def element_spec(self) -> Any:
        """Specifications of the batches, with an open number of rows.

        `tf.TensorSpec` on TensorFlow and `keras.KerasTensor` elsewhere, in a
        `PerReplica` where there are several replicas. If a dataset has no
        specification, its first batch is read.
        """

        def leaf(spec: Any) -> Any:
            if spec is None:
                return None
            native = self._engine.tensor_spec(tuple(spec.shape), spec.dtype)
            count = len(self._devices)
            return native if count == 1 else PerReplica([native] * count)

        return map_structure(leaf, self._feed.spec())

    @property
    def cardinality(self) -> int | None:
        """int, the number of steps; None where it is unknown or without end."""
        return self._feed.cardinality

    def __len__(self) -> int:
        if self.cardinality is None:
            raise InvalidTypeError(
                "`len` needs a number of batches, and `cardinality` of this dataset is "
                "None (unknown or infinite): call `take` or `repeat(n)` on its source."
            )
        return self.cardinality

    def __iter__(self) -> DistributedIterator:
        self.check_outside_program()
        return DistributedIterator(self, self._batches())

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Combines the batches, one after the other.

        Args:
            initial_state: the state before the first batch.
            reduce_func: callable of the state and a batch, as in an iteration, that
                returns the next state.

        Returns:
            The last state.

        Example:

        >>> rows = dataset.reduce(0, lambda n, batch: n + count_rows(batch))
        """
        state = initial_state
        for batch in self:
            state = reduce_func(state, batch)
        return state

    def check_outside_program(self) -> None:
        """Raises an error while a program is traced; batches would be parts of it."""
        if self._engine.in_program():
            raise ContextError(
                "A distributed dataset was iterated while a program is traced, in a "
                "`ks.function`, a `tf.function` or a function that `run` calls: its "
                "batches would be constants of the program. Iterate outside, and call "
                "the function with each batch: `for batch in dataset: step(batch)`."
            )

    def _batches(self) -> Iterator[Any]:
        size = self._options.experimental_per_replica_buffer_size
        where = self._where()
        if self._feed.is_in_memory and all(device.kind == "cpu" for device in where):
            # Batches are ready in memory: a prefetch thread would only add overhead.
            size = 0
        if self._feed.is_read_in_turn:
            size = 0  # The prefetch thread would read before its turn.
        begin = _PrefetchedIteration(self._engine, self._feed, where, bool(size))
        return Prefetcher(begin, size) if size else begin()

    def _where(self) -> tuple[Device, ...]:
        if self._options.experimental_fetch_to_device:
            return self._devices
        return (Device("cpu", 0),) * len(self._devices)

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self._devices)
        steps = self.cardinality
        length = "unknown number of" if steps is None else str(steps)
        return f"<{type(self).__name__} of {length} batches on {devices}>"


class _PrefetchedIteration:
    """Starts an iteration over batches with prefetch to the devices.

    Not a method of a dataset or iterator, so that its thread holds no reference to
    them.
    """

    def __init__(
        self, engine: Engine, feed: Feed, devices: Sequence[Device], ahead: bool
    ):
        self._engine = engine
        self._feed = feed
        self._devices = devices
        self._ahead = ahead

    def __call__(self) -> Iterator[Callable[[], Any]]:
        begin = self._engine.transfers(self._devices)
        for parts in self._feed.steps(keras.ops.is_tensor, self._ahead):
            yield begin(parts)


class DistributedIterator:
    """An iterator over the batches of a `DistributedDataset`.

    Batches are moved to the devices ahead of their use by a thread, which ends with
    the batches, at an error, at `close`, and when the iterator is no longer used.

    Args:
        dataset: the dataset.
        batches: transfers that have begun.
    """

    def __init__(self, dataset: DistributedDataset, batches: Iterator[Any]):
        self._dataset = dataset
        self._batches = batches
        self._generation = dataset.generation
        self._is_done = False

    def __iter__(self) -> DistributedIterator:
        return self

    def __repr__(self) -> str:
        state = "ended, " if self._is_done else ""
        return f"<{type(self).__name__}, {state}over {self._dataset!r}>"

    def __next__(self) -> Any:
        self._dataset.check_outside_program()
        if self._is_done:
            raise StopIteration
        if self._generation is not self._dataset.generation:
            self.close()
            raise InputError(
                "The workers have changed since this iterator was made; it splits "
                "batches over the previous workers. When `strategy.run` raises "
                "`ks.WorkersChanged`, make a new iterator that starts with the batch "
                "after its `step`."
            )
        try:
            batch = next(self._batches)()
        except BaseException:
            self.close()
            raise
        return batch

    def get_next(self) -> Any:
        """The next batch.

        Raises:
            IndexError: when there is none, as `ks.errors.OutOfRangeError`; on
                TensorFlow it is a `tf.errors.OutOfRangeError` as well.
        """
        try:
            return next(self)
        except StopIteration:
            raise self._dataset._engine.out_of_range_error(
                "The iterator has no more batches. Create a new one with "
                "`iter(dataset)`, or use a `for` loop or `get_next_as_optional`."
            ) from None

    def get_next_as_optional(self) -> Any:
        """The next batch, or an empty optional.

        Returns:
            An `OptionalBatch`.

        Example:

        >>> optional = iterator.get_next_as_optional()
        >>> while optional.has_value():
        ...     strategy.run(train_step, args=(optional.get_value(),))
        ...     optional = iterator.get_next_as_optional()
        """
        try:
            return OptionalBatch([next(self)])
        except StopIteration:
            return OptionalBatch([])

    @property
    def element_spec(self) -> Any:
        """Specifications of the batches; see `DistributedDataset.element_spec`."""
        return self._dataset.element_spec

    def close(self) -> None:
        """Ends the iterator and its thread."""
        self._is_done = True
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()


class OptionalBatch:
    """A batch, or nothing.

    Args:
        batches: a list of one batch or none.
    """

    def __init__(self, batches: list[Any]):
        self._batches = batches

    def __repr__(self) -> str:
        return f"<OptionalBatch {'with a' if self._batches else 'without'} batch>"

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return bool(self._batches)

    def get_value(self) -> Any:
        """The batch.

        Raises:
            ValueError: if there is none.
        """
        if not self._batches:
            raise InvalidArgumentError(
                "There is no batch: the dataset has ended. Check `has_value()` first."
            )
        return self._batches[0]
