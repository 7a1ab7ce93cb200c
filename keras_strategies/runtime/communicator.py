"""Interface of the collectives that replicas call in `run`."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

from keras_strategies.types import ReduceOp


class Communicator(abc.ABC):
    """Communicator between replicas, called by each of them."""

    @abc.abstractmethod
    def all_reduce(self, replica_id: int, op: ReduceOp, value: Any) -> Any:
        """Reduces a structure over replicas; its gradient is the same reduction."""

    @abc.abstractmethod
    def all_gather(self, replica_id: int, value: Any, axis: int) -> Any:
        """Concatenates a structure over replicas along `axis`; differentiable."""

    @abc.abstractmethod
    def merge_call(
        self,
        replica_id: int,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls `merge_fn(strategy, ...)` once when every replica has arrived."""
