"""The coordinator's variables: numbers and placement of values on the servers."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.optimizers.applying import slot_reference
from keras_strategies.keras_compat.optimizers.optimizer_classes import plain_optimizer
from keras_strategies.keras_compat.optimizers.optimizer_parts import is_optimizer
from keras_strategies.keras_compat.variables.creation import mix_in, variable_maker
from keras_strategies.keras_compat.variables.values import declared_shape, stored_dtype
from keras_strategies.parameter_server.engines import parameter_server_engine
from keras_strategies.parameter_server.variables.coordinator_variables import (
    CoordinatorVariables,
)
from keras_strategies.parameter_server.variables.dtype_sizes import bytes_per_element
from keras_strategies.parameter_server.variables.initial_values import (
    CONSTANTS,
    ShardInitializer,
    pickled,
    shard_initializers,
)
from keras_strategies.parameter_server.variables.shard_placement import (
    RoundRobinPlacement,
)
from keras_strategies.parameter_server.variables.sharded_variable import ShardedVariable
from keras_strategies.parameter_server.variables.transfer_progress import (
    TransferProgress,
)
from keras_strategies.parameter_server.variables.variable_partitioners import (
    PartitionFunction,
)
from keras_strategies.parameter_server.variables.weak_numbers import WeakNumbers
from keras_strategies.parameter_server.wire.row_indexing import indexed
from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.wire.variable_description import (
    ShardRange,
    VariableDescription,
    is_sharded,
    shard_devices,
)
from keras_strategies.text_tables import readable_bytes
from keras_strategies.user_warnings import warn_user

#: Variables up to this size are initialized on the coordinator, with the same values as
#: without a strategy, and then sharded. Larger ones are initialized shard by shard.
_LOCAL_BYTES = 64 << 20
_STREAMED_BYTES = 32 << 20
#: Ratio to an equal share, and difference in bytes, above which a warning is emitted.
_IMBALANCE_RATIO = 1.5
_IMBALANCE_BYTES = 16 << 20


class VariableRegistry:
    """Numbers and places variables (`VariableHost`).

    Args:
        servers: the parameter servers.
        partitioner: number of shards of a variable; None for one.
        local: values of metrics' variables.
    """

    is_local = False

    def __init__(
        self,
        servers: ServerConnections,
        partitioner: PartitionFunction | None,
        local: CoordinatorVariables,
    ):
        self._servers = servers
        self._places = RoundRobinPlacement(len(servers), partitioner)
        self._local = local
        self._numbers = itertools.count()
        self._described: dict[int, VariableDescription] = {}
        self._number_of = WeakNumbers()
        # Numbers of variables deleted from the servers, for `take_deleted`.
        self._deleted: list[int] = []
        self.references: dict[int, int] = {}
        self._variables: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )
        # The variable that new ones are colocated with; None for round-robin.
        self._colocated: VariableDescription | None = None
        self._has_warned = False
        # Held while variables are created and deleted.
        self.lock = threading.RLock()
        #: Variables with more bytes than this are saved and loaded in pieces.
        self.streamed_bytes = _STREAMED_BYTES

    # Creating variables

    def create(self, variable: Any, value: Any) -> None:
        array = np.asarray(keras.ops.convert_to_numpy(value))
        with self.lock:
            self._register(variable, tuple(array.shape))
            self._create_shards(variable, lambda start, stop: array[start:stop], array)

    def create_with(self, variable: Any, initializer: Callable[..., Any]) -> None:
        with self.lock:
            self._create_with(variable, initializer)

    def _create_with(self, variable: Any, initializer: Callable[..., Any]) -> None:
        shape = declared_shape(variable)
        dtype = stored_dtype(variable)
        description = self._register(variable, shape)
        nbytes = math.prod(shape) * bytes_per_element(dtype)
        is_constant = isinstance(initializer, CONSTANTS)
        if description.kind == "local" or (nbytes <= _LOCAL_BYTES and not is_constant):
            value = initializer(shape, dtype=dtype)
            array = np.asarray(keras.ops.convert_to_numpy(value))
            self._create_shards(variable, lambda start, stop: array[start:stop], array)
            return
        self._initialize_shards(
            description, shard_initializers(initializer, shape, dtype)
        )

    def _register(self, variable: Any, shape: tuple[int, ...]) -> VariableDescription:
        self.delete_released()
        most = parameter_server_engine().most_rows
        if shape and shape[0] > most:
            raise InvalidArgumentError(
                f"Variable {variable.path!r} has {shape[0]:,} rows. JAX computes ids "
                f"in int32, which has {most:,}: others would be wrapped to ids of "
                "other rows. Call `jax.config.update('jax_enable_x64', True)`, or use "
                "several tables."
            )
        with self.lock:
            number = next(self._numbers)
            kind, reference = self._kind(variable, shape)
            dtype = stored_dtype(variable)
            if kind == "local":
                shards: tuple[ShardRange, ...] = ()
            elif kind == "scalar":
                shards = tuple(ShardRange(i, 0, 1) for i in range(len(self._servers)))
            elif reference is not None:
                shards = self.describe(reference).shards
                self.references[number] = self.describe(reference).number
            elif kind == "slot":
                shards = (ShardRange(0, 0, shape[0]),)
            elif self._colocated is not None:
                server = self._described[self._colocated.number].shards[0].server
                shards = (ShardRange(server, 0, shape[0] if shape else 1),)
            else:
                placed = self._places.place(shape, dtype)
                shards = tuple(ShardRange(p.server, p.start, p.stop) for p in placed)
            description = VariableDescription(
                number,
                variable.path,
                shape,
                dtype,
                variable.trainable,
                kind,
                shards,
                is_idle=variable.synchronization == "none",
            )
            self._described[number] = description
            if is_sharded(description):
                mix_in(variable, ShardedVariable)
            self._number_of.set(variable, number)
            self._variables[number] = variable
            return description

    def _kind(self, variable: Any, shape: tuple[int, ...]) -> tuple[str, Any]:
        if variable.synchronization == "on_read":
            return "local", None
        reference = slot_reference()
        if reference is not None:
            return "slot", reference
        maker = variable_maker()
        if maker is None or not is_optimizer(maker):
            return "weight", None
        plain_optimizer(maker)
        # Without a reference variable; placed when the optimizer is used.
        return ("slot" if shape else "scalar"), None

    @contextlib.contextmanager
    def colocated(self, variable: Any) -> Iterator[None]:
        """Places new variables, unsharded, on the first server of another one."""
        description = self.describe(variable)
        before = self._colocated
        self._colocated = description if description.shards else None
        try:
            yield
        finally:
            self._colocated = before

    def _create_shards(
        self, variable: Any, shard: Callable[[int, int], Any], unsharded: Any
    ) -> None:
        """Creates the shards of a variable on their servers.

        Args:
            variable: a registered variable.
            shard: callable of a shard's first and last row (exclusive) that returns its
                value, an array or a pickled initializer.
            unsharded: array, the unsharded value; None if it is initialized by shards.
        """
        description = self.describe(variable)
        if description.kind == "local":
            self._local.set(description.number, unsharded)
            return
        is_scalar = not description.shape and unsharded is not None
        by_server: dict[int, list[Any]] = {}
        for each in description.shards:
            value = unsharded if is_scalar else shard(each.start, each.stop)
            by_server.setdefault(each.server, []).append(
                ((description.number, each.start), value)
            )
        self._servers.request_all("create", by_server)

    def _initialize_shards(
        self,
        description: VariableDescription,
        shard: Callable[[int, int], ShardInitializer],
    ) -> None:
        """Creates shards whose values are computed on their servers, in pieces."""
        each = {p: shard(p.start, p.stop) for p in description.shards}
        new: dict[int, list[Any]] = {}
        ranges: dict[int, list[Any]] = {}
        for place, made in each.items():
            key = (description.number, place.start)
            new.setdefault(place.server, []).append((key, pickled(made)))
            rest = [(key, *rows) for rows in made.requests()][1:]
            ranges.setdefault(place.server, []).extend(rest)
        with self._progress("creating", description) as progress:
            self._servers.request_all("create", new)
            for step in itertools.zip_longest(*ranges.values()):
                asked = {
                    server: rows
                    for server, rows in zip(ranges, step, strict=True)
                    if rows is not None
                }
                self._servers.request_all("initialize", asked)
                rows = sum(last - first for _, first, last in asked.values())
                progress.advance(rows * _row_bytes(description))

    # Using variables

    def describe(self, variable: Any) -> VariableDescription:
        """The description of a variable for workers and servers."""
        number = self._number_of.get(variable)
        if number is None:
            raise InvalidArgumentError(
                f"Variable {variable.path!r} was created outside of the strategy's "
                "scope, so no parameter server has it. Create it inside of `with "
                "strategy.scope():`."
            )
        description = self._described[number]
        trainable, regularizer = bool(variable.trainable), variable.regularizer
        if (
            description.trainable != trainable
            or description.regularizer is not regularizer
        ):
            description = dataclasses.replace(
                description, trainable=trainable, regularizer=regularizer
            )
            self._described[number] = description
        return description

    def find(self, number: int) -> Any:
        """The variable with a number; None if it no longer exists."""
        return self._variables.get(number)

    def variable(self, number: int) -> Any:
        """The variable with a number."""
        return self._variables[number]

    def read(self, variable: Any) -> np.ndarray:
        description = self.describe(variable)
        if description.kind == "local":
            return self._local.get(description.number)
        return self._servers.read(description)

    def read_slice(self, variable: Any, index: Any) -> np.ndarray:
        """The result of NumPy indexing, which reads as few rows as possible."""
        description = self.describe(variable)
        if description.kind == "local":
            return indexed(index, self.read(variable))
        return self._servers.read_slice(description, index)

    def write(self, variable: Any, value: Any) -> None:
        description = self.describe(variable)
        array = np.asarray(keras.ops.convert_to_numpy(value))
        if description.kind == "local":
            self._local.set(description.number, array)
        else:
            self._servers.write(description, array)

    def add(self, variable: Any, delta: Any) -> Any:
        description = self.describe(variable)
        array = np.asarray(keras.ops.convert_to_numpy(delta), self.read(variable).dtype)
        array = np.broadcast_to(array, description.shape)
        if description.kind == "local":
            self._local.add({description.number: array})
        else:
            self._servers.add(description, array)
        return variable.value

    def is_large(self, variable: Any) -> bool:
        """Whether a variable is saved and loaded in pieces."""
        description = self.describe(variable)
        if description.kind == "local" or not description.shape:
            return False
        nbytes = math.prod(description.shape) * bytes_per_element(description.dtype)
        return nbytes > self.streamed_bytes

    def pieces(self, variable: Any) -> Iterator[tuple[int, np.ndarray]]:
        description = self.describe(variable)
        with self._progress("reading", description) as progress:
            for start, rows in self._servers.pieces(description):
                yield start, rows
                progress.advance(rows.nbytes)

    def write_pieces(
        self, variable: Any, pieces: Iterable[tuple[int, np.ndarray]]
    ) -> None:
        description = self.describe(variable)
        with self._progress("writing", description) as progress:
            for start, rows in pieces:
                self._servers.write_rows(description, start, rows)
                progress.advance(rows.nbytes)

    def write_durably(self, write: Callable[[], None]) -> None:
        everyone = range(len(self._servers))
        is_written = False
        while not is_written:
            before = self._servers.request_all("flush", dict.fromkeys(everyone, False))
            write()
            after = self._servers.request_all("flush", dict.fromkeys(everyone, True))
            # A server that was restarted may have lost the first of the writes.
            is_written = before == after

    def _progress(
        self, what: str, description: VariableDescription
    ) -> TransferProgress:
        rows = description.shape[0] if description.shape else 1
        nbytes = rows * _row_bytes(description)
        return TransferProgress(f"{what} {description.path}", nbytes)

    def places(self, variable: Any) -> list[tuple[str, int, int]]:
        return shard_devices(self.describe(variable))

    def place(self, variable: Any) -> str:
        """Placement of a variable, for its representation."""
        description = self.describe(variable)
        if description.kind == "local":
            return f"on the coordinator, value={self._local.get(description.number)}"
        if description.kind == "scalar":
            return f"on every parameter server, value={self.read(variable)}"
        names = [f"ps:{p.server} [{p.start}:{p.stop}]" for p in description.shards]
        if len(names) == 1:
            return f"on ps:{description.shards[0].server}"
        return f"{len(names)} shards on {', '.join(names)}"

    def replicate(self, variable: Any) -> None:
        """Copies an optimizer's scalar, such as Nadam's, to every server."""
        description = self.describe(variable)
        value = self.read(variable)
        everywhere = tuple(ShardRange(i, 0, 1) for i in range(len(self._servers)))
        self._described[description.number] = dataclasses.replace(
            description, kind="scalar", shards=everywhere
        )
        shard = ((description.number, 0), value)
        self._servers.request_all("create", {p.server: [shard] for p in everywhere})

    # Deleting variables

    def delete_released(self) -> None:
        """Deletes from the servers variables that no longer exist here."""
        self._delete(self._number_of.take_released())

    def take_deleted(self) -> list[int]:
        """Numbers of variables that have been deleted since the last call."""
        with self.lock:
            found, self._deleted = self._deleted, []
            return found

    def _delete(self, numbers: list[int]) -> None:
        if not numbers:
            return
        old: dict[int, list[Any]] = {}
        with self.lock:
            for number in numbers:
                self.references.pop(number, None)
                description = self._described.pop(number)
                if description.kind == "local":
                    self._local.delete(number)
                for shard in description.shards:
                    old.setdefault(shard.server, []).append((number, shard.start))
            self._deleted += numbers
        self._servers.request_all("delete", old)

    # Balance

    def bytes_per_server(self) -> list[int]:
        """Bytes of the variables on each server."""
        found = [0] * len(self._servers)
        for number in list(self._variables):
            description = self._described[number]
            for shard in description.shards:
                found[shard.server] += _row_bytes(description) * (
                    shard.stop - shard.start
                )
        return found

    def warn_of_imbalance(self) -> None:
        """Warns once if one server has much more than an equal share."""
        bytes_per_server = self.bytes_per_server()
        share = sum(bytes_per_server) / len(bytes_per_server)
        most = max(bytes_per_server)
        is_large = most > _IMBALANCE_RATIO * share and most - share >= _IMBALANCE_BYTES
        if self._has_warned or not is_large:
            return
        self._has_warned = True
        server = bytes_per_server.index(most)
        held = {
            self._described[n].path: sum(
                _row_bytes(self._described[n]) * (shard.stop - shard.start)
                for shard in self._described[n].shards
                if shard.server == server
            )
            for n in list(self._variables)
        }
        path = max(held, key=lambda name: held[name])
        warn_user(
            f"Parameter server {server} holds {readable_bytes(most)} of "
            f"{readable_bytes(sum(bytes_per_server))}, {most / share:.1f} times its "
            f"share of {len(bytes_per_server)} servers, and every step waits for it; "
            f"{readable_bytes(held[path])} are {path!r}. Shard large variables: make "
            "the strategy with "
            f"`variable_partitioner=ks.experimental.partitioners.MinSizePartitioner(max_shards={len(bytes_per_server)})`."
        )


def _row_bytes(description: VariableDescription) -> int:
    return math.prod(description.shape[1:]) * bytes_per_element(description.dtype)
