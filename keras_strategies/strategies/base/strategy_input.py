"""Methods of strategies that make distributed values and datasets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.input import distribute
from keras_strategies.input.arrays import from_arrays
from keras_strategies.input.distributed_dataset import DistributedDataset
from keras_strategies.strategies.base import unused
from keras_strategies.strategies.base.strategy_checks import StrategyChecks
from keras_strategies.training.model_hooks import install_hooks
from keras_strategies.types import InputContext, InputOptions
from keras_strategies.values import PerReplica, map_structure


@dataclass(frozen=True)
class ValueContext:
    """The replica that a value is created for.

    Args:
        replica_id_in_sync_group: int, the number of the replica, from 0.
        num_replicas_in_sync: int, the number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class StrategyInput(StrategyChecks):
    """Distributed values and datasets of a strategy."""

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a per-replica value, or a structure of them, from a function.

        Args:
            value_fn: callable of a `ValueContext`, which identifies the replica;
                returns its component, or a structure of components.

        Returns:
            The structure, with a `PerReplica` of the components as each leaf; with one
            replica, its components.

        Example:

        >>> strategy.experimental_distribute_values_from_function(
        ...     lambda context: context.replica_id_in_sync_group)
        """
        self._check_outside_replicas("experimental_distribute_values_from_function")
        counts = self.placement.replica_counts
        values = [
            value_fn(ValueContext(counts.first + i, counts.total))
            for i in range(counts.count)
        ]
        if counts.count == 1:
            return values[0]
        return map_structure(lambda *own: PerReplica(own), *values)

    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        batch_size: int | None = None,
    ) -> DistributedDataset:
        """Splits each global batch of a dataset over the replicas.

        Every row goes to one replica, in order: `range(10).batch(4)` on two replicas
        ends `[8]`, `[9]`. Replicas without rows get zero rows.

        Args:
            dataset: a dataset of global batches: a `tf.data.Dataset`,
                a torch `DataLoader`, a `keras.utils.PyDataset`, or an iterable of
                structures of arrays, each of shape `(rows, ...)`. Arrays, tensors
                and frames of pandas, alone or in tuples and dictionaries, are made
                into batches first.
            options: `InputOptions`, or None for the defaults.
            batch_size: int, rows of the global batch, for arrays; None for 32, as in
                `fit`.

        Returns:
            A `DistributedDataset`: an iterable of batches with leaves that
            are `PerReplica`, with one replica tensors.

        Raises:
            ValueError: if `dataset` is not a dataset or not batched; and, during
                iteration, for a batch with parts of different lengths.
            RuntimeError: inside `run`.

        Example:

        >>> dataset = strategy.experimental_distribute_dataset(
        ...     tf.data.Dataset.from_tensor_slices((x, y)).batch(64))
        >>> for batch in dataset:
        ...     strategy.run(train_step, args=(batch,))
        """
        self._check_outside_replicas("experimental_distribute_dataset")
        unused.used(self)
        install_hooks()
        return distribute.dataset(self, dataset, options, batch_size)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Distributes datasets that a function makes, without splitting batches.

        Args:
            dataset_fn: callable of an `InputContext` that returns a dataset of any
                kind. Each batch is for one replica: consecutive batches go to
                consecutive replicas, without being split or joined. The function is
                called once for each worker, or once for each replica with
                `InputReplicationMode.PER_REPLICA`. If the dataset ends before the last
                replica, the remaining ones get zero rows.
            options: `InputOptions`, or None for the defaults.

        Returns:
            A `DistributedDataset`.

        Raises:
            TypeError: if `dataset_fn` is not callable.
            ValueError: if its result is not a dataset or not batched.
            RuntimeError: inside `run`.

        Example:

        >>> def dataset_fn(context):
        ...     batch_size = context.get_per_replica_batch_size(64)
        ...     return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        >>> dataset = strategy.distribute_datasets_from_function(dataset_fn)
        """
        self._check_outside_replicas("distribute_datasets_from_function")
        unused.used(self)
        install_hooks()
        return distribute.from_function(self, dataset_fn, options)

    # The former experimental name.
    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def make_experimental_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> Any:
        """A dataset of the rows of arrays, to be batched and then distributed.

        Args:
            numpy_input: structure of arrays with the same first axis, `(rows, ...)`.
            session: must be None: there are no sessions here.

        Returns:
            On TensorFlow a `tf.data.Dataset`; elsewhere an object with its methods
            `batch`, `shuffle`, `repeat`, `prefetch` and `cardinality`.

        Raises:
            ValueError: for scalars and arrays of different lengths, and for a session.

        Example:

        >>> dataset = strategy.make_experimental_numpy_dataset((x, y)).batch(64)
        >>> dataset = strategy.experimental_distribute_dataset(dataset)
        """
        if session is not None:
            raise InvalidArgumentError(
                "`session` is for TensorFlow 1 and not supported. Omit it. "
                f"Received: {session!r}"
            )
        rows = from_arrays(numpy_input)
        return rows.as_tf_data() if self._engine.name == "tensorflow" else rows
