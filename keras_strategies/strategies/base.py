"""What every strategy is: devices, variables, a reducer, input; and their use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from keras_strategies import context, keras_compat
from keras_strategies.backends import get_backend
from keras_strategies.backends.base import Backend, Placement, TrainerAdapter
from keras_strategies.errors import ModelScopeError
from keras_strategies.strategies.describe import Description, describe

if TYPE_CHECKING:
    from keras_strategies.collectives import CrossDeviceOps

# Called with the first strategy; the room of training sets it, which stands below.
_on_first_use: list[Callable[[], None]] = []


def on_first_use(callback: Callable[[], None]) -> None:
    """Calls `callback` before the first strategy is made."""
    _on_first_use.append(callback)


class Strategy:
    """How variables and computation are laid out over devices.

    Strategies are made by their subclasses, which choose the parts and add nothing.

    Args:
        placement: where replicas compute and where variables are.
        cross_device_ops: how values are combined, or None for the backend's way.
        sync_batch_norm: bool, whether batch normalization uses the statistics of
            the global batch.
    """

    def __init__(
        self,
        placement: Placement,
        cross_device_ops: CrossDeviceOps | None = None,
        sync_batch_norm: bool = True,
    ):
        for callback in _on_first_use:
            callback()
        self._backend = get_backend()
        self._placement = placement
        self._cross_device_ops = cross_device_ops
        self._sync_batch_norm = bool(sync_batch_norm)
        self._trainer = self._backend.trainer(self)

    @property
    def placement(self) -> Placement:
        """Where replicas compute and where variables are."""
        return self._placement

    @property
    def backend(self) -> Backend:
        """The engine below."""
        return self._backend

    @property
    def trainer(self) -> TrainerAdapter:
        """How this strategy trains Keras models."""
        return self._trainer

    @property
    def sync_batch_norm(self) -> bool:
        """bool, whether batch normalization uses the global batch's statistics."""
        return self._sync_batch_norm

    @property
    def num_replicas_in_sync(self) -> int:
        """int, how many replicas compute one step together."""
        return len(self._placement.replicas)

    @property
    def cluster_resolver(self) -> Any:
        """What says who is who in the cluster; None on one machine."""
        return None

    @property
    def distribution(self) -> Any:
        """The `keras.distribution.Distribution` underneath; None without one."""
        return self._trainer.distribution()

    @property
    def default_replica_context(self) -> context.ReplicaContext | None:
        """The replica context outside every scope; only the default strategy's."""
        return None

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this strategy current: models made inside belong to it.

        Returns:
            A context manager; the `as` target is the strategy.

        Raises:
            RuntimeError: inside another strategy's scope ("Mixing different
                strategies").

        Example:

        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        """
        with context.cross_replica(self), self._trainer.scope():
            yield self

    def describe(self, model: Any) -> Description:
        """A table of where the model's variables are, and of bytes per device.

        Args:
            model: a built `keras.Model`, made in this strategy's scope.

        Returns:
            A `Description`: text in a terminal, a table in a notebook.

        Raises:
            ValueError: if the model has no variables yet.
            RuntimeError: if the model was made elsewhere.
        """
        if not self.owns(model):
            raise ModelScopeError(
                f"Model {model.name!r} was not made in the scope of {self!r}, so its "
                "variables are not this strategy's to describe."
            )
        return describe(self, model)

    def owns(self, model: Any) -> bool:
        """Whether a model was made in this strategy's scope."""
        return keras_compat.strategy_of(model) is self

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # Copies of a model train under the same strategy.
        return self

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self._placement.replicas)
        return f"<{type(self).__name__} on {devices}>"
