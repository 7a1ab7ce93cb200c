"""Shardings of the inputs, results and state of a program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from keras_strategies.engines.jax.array_placement import put_all
from keras_strategies.engines.jax.function.trace_state import is_stacked


class ProgramSharding:
    """Shardings of a program's arrays.

    Args:
        replicated: the sharding of an array on every device; None to leave arrays on
            their devices.
        split: the sharding of an array with the replicas as first axis, along the
            first axis of its mesh.
        home: the sharding of variables between programs, where it is another.
        sharding_of: returns the sharding of a variable; None where variables are
            replicated.
    """

    def __init__(
        self,
        replicated: jax.sharding.Sharding | None = None,
        split: jax.sharding.NamedSharding | None = None,
        home: jax.sharding.Sharding | None = None,
        sharding_of: Callable[[Any], jax.sharding.Sharding] | None = None,
    ):
        self.replicated = replicated
        self.split = split
        self.home = home
        self.sharding_of = sharding_of
        # The devices of each replica; its results are read from the first one.
        self._rows: list[list[jax.Device]] = []
        if split is not None:
            devices = split.mesh.devices
            self._rows = [list(row) for row in devices.reshape(len(devices), -1)]

    def place_state(self, variables: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """The arrays of variables with the shardings of a program's inputs."""
        if self.sharding_of is None:
            return self.place(arrays)
        found = list(arrays)
        for i, variable in enumerate(variables):
            own = self.sharding_of(variable)
            if found[i].sharding != own or not found[i].committed:
                found[i] = jax.device_put(found[i], own)
        return found

    def state_shardings(self, variables: Sequence[Any]) -> Any:
        """The shardings of variables among a program's results."""
        if self.sharding_of is None:
            return self.replicated
        return [self.sharding_of(variable) for variable in variables]

    @functools.cached_property
    def _own_rows(self) -> list[list[jax.Device]]:
        """The devices of each local replica."""
        own = jax.process_index()
        return [row for row in self._rows if row[0].process_index == own]

    def place(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays, replicated; moved in one transfer."""
        replicated = self.replicated
        if replicated is None:
            return list(arrays)

        def is_there(array: Any) -> bool:
            if not isinstance(array, jax.Array) or not array.committed:
                return False
            # Results of programs have the object itself.
            own = array.sharding
            return own is replicated or own == replicated

        found = list(arrays)
        away = [i for i, array in enumerate(found) if not is_there(array)]
        if away:
            moved = put_all([found[i] for i in away], replicated)
            for i, array in zip(away, moved, strict=True):
                found[i] = array
        return found

    def join(self, parts: Sequence[Any]) -> Any:
        """One array, sharded over replicas, of the local replicas' components.

        Components of other workers' replicas have the same shape and stay there.
        """
        if self.split is None:
            return jnp.stack(parts) if is_stacked(parts[0]) else jnp.concatenate(parts)
        if is_stacked(parts[0]):
            parts = [jnp.expand_dims(part, 0) for part in parts]
        rows = parts[0].shape[0] * len(self._rows)
        shape = (rows, *parts[0].shape[1:])
        devices = [device for row in self._own_rows for device in row]
        width = len(self._own_rows[0])
        parts = [part for part in parts for _ in range(width)]
        if not all(
            isinstance(part, jax.Array)
            and part.committed
            and part.devices() == {device}
            for part, device in zip(parts, devices, strict=True)
        ):
            parts = jax.device_put(parts, devices)
        return jax.make_array_from_single_device_arrays(shape, self.split, parts)

    def own_shards(self, arrays: Sequence[jax.Array]) -> list[Any]:
        """Of the n-th replicated array, the shard on replica n, for local replicas."""
        if self.split is None:
            return list(arrays)
        found = []
        for array, row in zip(arrays, self._rows, strict=True):
            if row[0].process_index != jax.process_index():
                continue
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            found.append(shards[row[0]])
        return found

    def part_shards(
        self,
        array: jax.Array,
        count: int,
        stacked: bool,
        rows: Sequence[int] | None,
    ) -> list[Any]:
        """The local replicas' components of a result, each on its device.

        Args:
            array: the result of all replicas.
            count: int, the number of replicas.
            stacked: bool, whether components were joined along a new axis.
            rows: those of each replica, if they differ.
        """
        if self.split is None:
            parts = jnp.split(array, count)
        else:
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            parts = [shards[row[0]] for row in self._own_rows]
            own = jax.process_index()
            are_own = [row[0].process_index == own for row in self._rows]
            rows = rows and [*itertools.compress(rows, are_own)]
        if rows is not None:
            return [part[:n] for part, n in zip(parts, rows, strict=True)]
        return [jnp.squeeze(part, 0) for part in parts] if stacked else parts
