"""Reading variables that are cut over the devices of several workers.

JAX reads an array only where all of it is. So a variable whose parts are elsewhere is
gathered when it is read, which all workers do together; a variable that is cut over
each worker's own devices is put together without asking anyone.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from keras_strategies import keras_compat
from keras_strategies.engines.jax.array_placement import is_spread, put_one
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.errors import WorkerError


class Parts:
    """The parts of the variables of one strategy, on this worker and on others.

    Args:
        workers: the workers over whose devices variables are cut.
    """

    # The last one that was made in this process. A variable that was made outside of
    # any scope, as slots can be, is gathered through it: the workers are the same.
    last: ClassVar[weakref.ref[Parts] | None] = None

    def __init__(self, workers: JaxWorkers):
        self._workers = workers
        # What has been gathered, by variable, while a model is being saved.
        self._known: dict[int, Any] = {}
        Parts.last = weakref.ref(self)

    def read(self, variable: Any, array: jax.Array) -> Any:
        """A variable's whole value, a NumPy array.

        Args:
            variable: the `keras.Variable`.
            array: its value, spread over workers and not whole on each.

        Raises:
            WorkerError: if the other workers do not read it as well.
        """
        known = self._known.get(id(variable))
        if known is not None:
            return known
        own = assembled(array)
        return self._gathered(variable.path, array) if own is None else own

    def _gathered(self, path: str, array: jax.Array) -> Any:
        workers = self._workers
        # The hub notices who does not come; XLA would wait for it.
        workers.group.barrier(
            f"reading {path!r}, which is cut over the workers, so that all of them "
            "read it together"
        )
        with workers.exchange():
            whole = jax.NamedSharding(array.sharding.mesh, jax.P())  # type: ignore[attr-defined]
            found = jax.jit(lambda value: value, out_shardings=whole)(array)
            return np.asarray(found.addressable_data(0))

    @contextlib.contextmanager
    def reading(self, variables: Sequence[Any]) -> Iterator[None]:
        """Entered on all workers where one of them reads variables, to save them."""
        group = self._workers.group
        try:
            for variable in variables:
                array = keras_compat.raw_value(variable)
                if is_cut(array) and assembled(array) is None:
                    found = self._gathered(variable.path, array)
                    if group.is_chief:
                        self._known[id(variable)] = found
            yield
        finally:
            self._known.clear()

    def check(self, variables: Sequence[Any]) -> None:
        """Checks that workers have given cut variables the same values.

        Each worker takes its parts of the values that it was given, so the chief's
        cannot be lent to the others.

        Raises:
            WorkerError: that names a variable with different values.
        """
        own = [_sums.get(keras_compat.raw_value(variable)) for variable in variables]
        found = self._workers.group.gather_values("the values of cut variables", own)
        for other, sums in enumerate(found):
            for variable, mine, its in zip(variables, own, sums, strict=True):
                if mine != its:
                    raise WorkerError(
                        f"Variable {variable.path!r} is cut over the workers, and "
                        f"worker {self._workers.group.index} has given it other "
                        f"values than worker {other}. Assign and load the same on "
                        "every worker; `strategy.load_sharded` reads each part where "
                        "it belongs."
                    )


class _Sums:
    """Checksums of the values that arrays were made of, as long as they live."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Any, int]] = {}

    def note(self, array: jax.Array, value: Any) -> None:
        key = id(array)
        data = np.ascontiguousarray(np.asarray(value)).view(np.uint8)
        forget = weakref.ref(array, lambda _: self._found.pop(key, None))
        self._found[key] = (forget, zlib.crc32(data.data))

    def get(self, array: jax.Array) -> int | None:
        """The checksum; None for what a program has made, the same on all workers."""
        found = self._found.get(id(array))
        return None if found is None else found[1]


_sums = _Sums()


def put_variable(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    """Places a variable's value, and notes of a cut one what it was made of."""
    placed: jax.Array = put_one(array, sharding)
    if is_cut(placed):
        _sums.note(placed, array)
    return placed


def is_cut(array: Any) -> bool:
    """Whether an array is spread over workers and not whole on every device."""
    return is_spread(array) and not array.is_fully_replicated


def assembled(array: jax.Array) -> Any:
    """A cut array's value, where this worker has every part; None elsewhere."""
    found = np.empty(array.shape, array.dtype)
    missing = found.size
    seen: set[str] = set()
    for shard in array.addressable_shards:
        place = str(shard.index)
        if place not in seen:
            seen.add(place)
            missing -= shard.data.size
    if missing:
        return None
    for shard in array.addressable_shards:
        found[shard.index] = np.asarray(shard.data)
    return found


def reader(parts_of: Callable[[Any], Parts | None]) -> Callable[[Any, Any], Any]:
    """What reads a variable's value for Keras; None for what JAX reads itself."""

    def read(variable: Any, array: Any) -> Any:
        if isinstance(array, jax.core.Tracer) or not is_cut(array):
            return None
        parts = parts_of(variable)
        if parts is None and Parts.last is not None:
            parts = Parts.last()
        return assembled(array) if parts is None else parts.read(variable, array)

    return read
