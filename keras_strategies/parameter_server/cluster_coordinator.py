"""`ClusterCoordinator`: scheduled functions on the workers of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from keras_strategies.errors import InvalidArgumentError, InvalidTypeError
from keras_strategies.parameter_server.coordinator.cluster_status import (
    Status,
    status_of,
)
from keras_strategies.parameter_server.coordinator.process_cluster import ProcessCluster
from keras_strategies.parameter_server.coordinator.remote_values import (
    PerWorkerValues,
    RemoteValue,
)
from keras_strategies.parameter_server.parameter_server_strategy import (
    ParameterServerStrategy,
)
from keras_strategies.parameter_server.worker.current_worker import CurrentWorker
from keras_strategies.runtime.compiled_functions import original_function


class ClusterCoordinator:
    """Schedules functions on workers and reschedules those of lost workers.

    Each strategy has one; creating it again returns the same object.

    Args:
        strategy: a `ParameterServerStrategy`.

    Raises:
        ValueError: for another strategy.

    Example:

    >>> coordinator = ks.ClusterCoordinator(strategy)
    >>> per_worker_dataset = coordinator.create_per_worker_dataset(dataset_fn)
    >>> iterator = iter(per_worker_dataset)
    >>> for _ in range(steps):
    ...     coordinator.schedule(step_fn, args=(iterator,))
    >>> coordinator.join()
    """

    _strategy: ParameterServerStrategy
    _cluster: ProcessCluster

    def __new__(cls, strategy: Any) -> ClusterCoordinator:
        if not isinstance(strategy, ParameterServerStrategy):
            raise InvalidArgumentError(
                "`strategy` of a ClusterCoordinator must be a "
                f"ks.ParameterServerStrategy. Received: {strategy!r}"
            )
        made: ClusterCoordinator | None = strategy._coordinator
        if made is None:
            made = super().__new__(cls)
            made._strategy = strategy
            made._cluster = strategy.cluster
            strategy._coordinator = made
        return made

    def __repr__(self) -> str:
        return f"<ClusterCoordinator of {self._strategy!r}>"

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedules a function on any worker; returns immediately.

        Blocks only while the queue is full. The function is pickled by cloudpickle and
        sent once, with the models and variables that it refers to. Its updates of
        variables are applied exactly once, also if it runs again because a worker
        died. Within `strategy.run` or a `ks.function`, only the looked-up rows of
        large tables are sent.

        Args:
            fn: callable; a `ks.function` or `tf.function` too.
            args: sequence of arguments; per-worker values are replaced by the worker's.
            kwargs: dict of keyword arguments, likewise.

        Returns:
            A `RemoteValue`.

        Raises:
            Exception: the first error of an earlier scheduled function, once.
            TypeError: if `fn` is not callable.
        """
        if not callable(fn):
            raise InvalidTypeError(
                "`fn` of `schedule` must be callable. Received: "
                f"{fn!r} of type {type(fn).__name__}"
            )
        return self._strategy.functions.schedule(fn, args or (), kwargs or {})

    def join(self, timeout: float | None = None) -> None:
        """Waits until all scheduled functions are done.

        Args:
            timeout: float, seconds; None to wait as long as it takes.

        Raises:
            Exception: the first error of a scheduled function, once. Queued functions
                are cancelled, and the coordinator can be used again.
            RuntimeError: as `ks.errors.ServerLostError`, if a parameter server died
                and cannot be restored; as `ks.errors.ClusterTimeoutError`.
        """
        self._cluster.scheduler.tasks.wait_until_done(timeout)
        self._strategy.functions.release()

    def done(self) -> bool:
        """Whether all scheduled functions are done.

        Raises:
            Exception: as `join`.
        """
        return self._cluster.scheduler.tasks.is_done()

    def fetch(self, val: Any) -> Any:
        """Waits for values.

        Args:
            val: structure of `RemoteValue`s and other objects.

        Returns:
            The structure, with the functions' return values.
        """
        return keras.tree.map_structure(
            lambda v: v.fetch() if isinstance(v, RemoteValue) else v, val
        )

    def create_per_worker_dataset(
        self, dataset_fn: Callable[..., Any]
    ) -> PerWorkerValues:
        """Creates a dataset on each worker.

        Args:
            dataset_fn: callable without arguments that returns a dataset of any kind,
                or a dataset that can be pickled; called on each worker.

        Returns:
            `PerWorkerValues`; `iter` of it creates an iterator on each worker.
        """
        if not callable(dataset_fn):
            dataset = dataset_fn
            dataset_fn = lambda: dataset  # noqa: E731
        return self.create_per_worker_values(original_function(dataset_fn))

    def create_per_worker_values(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Creates a value on each worker, when it is first used there.

        Args:
            fn: callable without arguments.

        Returns:
            `PerWorkerValues`, to be passed to scheduled functions.

        Raises:
            TypeError: if `fn` is not callable.
        """
        if not callable(fn):
            raise InvalidTypeError(
                "`fn` of `create_per_worker_values` must be a callable that returns "
                f"the value. Received: {fn!r} of type {type(fn).__name__}"
            )
        return self._strategy.functions.add_value(fn)

    def status(self) -> Status:
        """A table of the workers and servers: alive, steps, queue, bytes.

        Returns:
            A `Status`: text in a terminal, a table in a notebook.
        """
        return status_of(self._cluster.scheduler, self._strategy.registry)

    def add_worker(self) -> int:
        """Starts another worker, in a cluster that the strategy has started.

        It receives work as soon as it is ready. In other clusters a worker joins when
        its process calls `ks.Server`.

        Returns:
            int, the worker's number.

        Raises:
            ValueError: if the strategy does not start the processes.
        """
        if not self._cluster.starts_processes:
            raise InvalidArgumentError(
                "`add_worker` works in local clusters and on Ray, where the strategy "
                "starts the processes. Start another worker of this cluster with "
                "`ks.Server(...).join()` and a new task index."
            )
        return self._cluster.scheduler.add_worker()


def get_current_worker_index() -> int | None:
    """int, the number of the worker of this process; None on the coordinator.

    Scheduled functions and those of `create_per_worker_dataset` and
    `create_per_worker_values` run on workers, also on threads that they start.

    Example:

    >>> coordinator.schedule(ks.get_current_worker_index).fetch()
    """
    return CurrentWorker.index


# Name of `tf.distribute.coordinator`.
experimental_get_current_worker_index = get_current_worker_index
