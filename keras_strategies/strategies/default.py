"""The default strategy, outside of every scope: one replica."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from keras_strategies.engines import get_engine
from keras_strategies.errors import MixedStrategyError
from keras_strategies.input import distribute
from keras_strategies.runtime import context
from keras_strategies.runtime.engine import Engine
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.runtime.replicas.collectives import SingleReplica
from keras_strategies.strategies.base import unused
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.device_selection import all_devices
from keras_strategies.types import InputContext, InputOptions, RunOptions


class DefaultStrategy(Strategy):
    """One replica on the backend's own device; a singleton.

    `ks.get_strategy()` returns it outside every scope.

    Example:

    >>> ks.DefaultStrategy() is ks.get_strategy()
    True
    """

    _singletons: ClassVar[dict[Engine, DefaultStrategy]] = {}

    def __new__(cls) -> DefaultStrategy:
        # A process has one backend; tests have several.
        return cls._singletons.setdefault(get_engine(), super().__new__(cls))

    def __init__(self) -> None:
        if hasattr(self, "_drivers"):
            return
        device = all_devices(get_engine())[0]
        super().__init__(Placement((device,), device, mirrored=False))
        unused.used(self)  # It is that of models without a strategy.

    @functools.cached_property
    def _replica(self) -> ReplicaContext:
        return ReplicaContext(self, 0, SingleReplica())

    @property
    def default_replica_context(self) -> ReplicaContext:
        return self._replica

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn`."""
        RunOptions.parse(options)
        return fn(*args, **(kwargs or {}))

    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        batch_size: int | None = None,
    ) -> Any:
        """Returns the dataset unchanged, if no options are given.

        Arrays, pandas frames and `keras.utils.PyDataset`, which are not iterables of
        batches, become a `DistributedDataset` of one replica.
        """
        if (
            batch_size is None
            and options is None
            and distribute.iterates_batches(dataset)
        ):
            return dataset
        return super().experimental_distribute_dataset(
            dataset, options, batch_size=batch_size
        )

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """Calls the function; see `experimental_distribute_dataset` for the result."""
        if options is not None:
            return super().distribute_datasets_from_function(dataset_fn, options)
        distribute.check_dataset_fn(dataset_fn)
        dataset = dataset_fn(self.input_context())
        return self.experimental_distribute_dataset(dataset)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def _check_outside_replicas(self, method: str) -> None:
        """Does nothing: outside of every scope all code is in replica context."""

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Does nothing; raises a `RuntimeError` inside another strategy's scope."""
        current = context.current_strategy()
        if current is not None:
            raise MixedStrategyError(
                "Mixing different strategies: the scope of the default strategy was "
                f"opened inside that of {current!r}. Leave that scope first."
            )
        yield self
