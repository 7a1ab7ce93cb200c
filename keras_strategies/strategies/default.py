"""The strategy where no other one is current: everything passes through."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

from keras_strategies import context
from keras_strategies.backends import get_backend
from keras_strategies.backends.base import Placement
from keras_strategies.errors import MixedStrategyError
from keras_strategies.strategies.base import Strategy
from keras_strategies.strategies.devices import default_devices


class DefaultStrategy(Strategy):
    """One replica on the backend's own device; there is one object of it.

    `ks.get_strategy()` returns it outside every scope.
    """

    def __init__(self) -> None:
        device = default_devices(get_backend())[0]
        super().__init__(Placement((device,), device, mirrored=False))

    @functools.cached_property
    def _replica(self) -> context.ReplicaContext:
        return context.ReplicaContext(self, 0, self.backend.lone_replica())

    @property
    def default_replica_context(self) -> context.ReplicaContext:
        return self._replica

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Does nothing; inside another strategy's scope it is a `RuntimeError`."""
        if context.has_strategy():
            raise MixedStrategyError(
                "Mixing different strategies: the scope of the default strategy was "
                f"opened where {context.get_strategy()!r} is current."
            )
        yield self


@functools.cache
def get_default_strategy() -> DefaultStrategy:
    return DefaultStrategy()


context.set_default_strategy_factory(get_default_strategy)
