"""Sums over rows in a layer call, which replicas exchange where the proof says so."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from keras_strategies.keras_compat.recorded_calls import calls_handled_by, unrecorded
from keras_strategies.rows.row_placements import (
    FUNCTIONS_OF_SUMS,
    Exchange,
    ProvedEvent,
)
from keras_strategies.rows.variances import as_means
from keras_strategies.runtime import context


class ExchangedSums:
    """The sums of one replica, see `CallHandler`.

    The replica calls what the proof lists, in its order, or has diverged: then it sends
    zeros, so that no replica waits for it, and all drop the results of the call.

    Args:
        layer: the layer that is called.
        events: what the replica calls, by the proof.
        rows: the number of this replica's rows.
        share: returns their share in those of all replicas.
        all_have_rows: bool, whether each replica is known to have rows.
    """

    def __init__(
        self,
        layer: Any,
        events: Sequence[ProvedEvent],
        rows: Any,
        share: Callable[[], Any],
        all_have_rows: bool,
    ):
        self._layer = layer
        self._events = events
        self._rows = rows
        self._share = functools.cache(share)
        self._all_have_rows = all_have_rows
        self._next = 0
        self._is_inside = False
        self.has_diverged = False

    def layer_call(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        is_outermost = layer is self._layer
        if self._is_inside or self.has_diverged or is_outermost:
            return call(*args, **kwargs)
        event = self._event()
        if event is None or event.layer != id(layer):
            self.has_diverged = True
            return call(*args, **kwargs)
        self._next += 1
        with self._inside() if event.is_one else contextlib.nullcontext():
            return call(*args, **kwargs)

    def function_call(
        self, name: str, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self._is_inside or self.has_diverged:
            return original(*args, **kwargs)
        composed = as_means(name, args[0]) if args else None
        if composed is not None:
            return composed(*args, **kwargs)
        with self._inside():
            found = original(*args, **kwargs)
        if name not in FUNCTIONS_OF_SUMS or found is NotImplemented:
            return found
        event = self._event()
        if (
            event is None
            or event.name != FUNCTIONS_OF_SUMS[name]
            or not _is_like(found, event.exchange)
        ):
            self.has_diverged = True
            return found
        self._next += 1
        return found if event.exchange is None else self._sum(found, event.exchange)

    def during(self, call: Callable[[], Any]) -> Any:
        """Makes the call, and sends what other replicas still wait for."""
        with calls_handled_by(self):
            found = call()
        for event in self._events[self._next :]:
            self.has_diverged = True
            if event.exchange is not None:
                shape, dtype = event.exchange.shape, event.exchange.dtype
                self._sum(keras.ops.zeros(shape, dtype), event.exchange)
        return found

    def _event(self) -> ProvedEvent | None:
        return self._events[self._next] if self._next < len(self._events) else None

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _sum(self, own: Any, exchange: Exchange) -> Any:
        """That of all rows, from that of this replica's."""
        ops, replica = keras.ops, context.current_replica()
        assert replica is not None
        with unrecorded():
            if not self._all_have_rows:
                # The mean of no rows is no number.
                own = ops.where(self._rows > 0, own, ops.zeros_like(own))
            if exchange.is_mean:
                own = own * ops.cast(self._share(), exchange.dtype)
            return replica.all_reduce("SUM", own)


def _is_like(found: Any, exchange: Exchange | None) -> bool:
    """Whether a sum has the shape and dtype of that of the proof."""
    if exchange is None:
        return True
    shape = tuple(found.shape)
    dtype = keras.backend.standardize_dtype(found.dtype)
    return (
        dtype == exchange.dtype
        and len(shape) == len(exchange.shape)
        and all(own in (None, n) for own, n in zip(shape, exchange.shape, strict=True))
    )
