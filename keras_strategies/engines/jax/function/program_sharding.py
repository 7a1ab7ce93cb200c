"""Layouts: on which devices the arrays of a program are."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import numpy as jnp

from keras_strategies.engines.jax.array_placement import put_all
from keras_strategies.engines.jax.function.trace_scopes import is_stacked


class Layout:
    """Where a program runs.

    Args:
        whole: the sharding of an array that every replica has; None to leave arrays
            where they are.
        split: the sharding of an array whose first axis is split over replicas: along
            the first axis of its mesh.
        home: the sharding of variables, where that is elsewhere.
        own: gives the sharding of a variable, where they are not all alike.
    """

    def __init__(
        self,
        whole: jax.sharding.Sharding | None = None,
        split: jax.sharding.NamedSharding | None = None,
        home: jax.sharding.Sharding | None = None,
        own: Callable[[Any], jax.sharding.Sharding] | None = None,
    ):
        self.whole = whole
        self.split = split
        self.home = home
        self.own = own
        # For each replica the devices that have its part; the first one gives it out.
        self._rows: list[list[jax.Device]] = []
        if split is not None:
            devices = split.mesh.devices
            self._rows = [list(row) for row in devices.reshape(len(devices), -1)]

    def place_state(self, variables: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """The variables' arrays, where a program expects them."""
        if self.own is None:
            return self.place(arrays)
        found = list(arrays)
        for i, variable in enumerate(variables):
            own = self.own(variable)
            if found[i].sharding != own or not found[i].committed:
                found[i] = jax.device_put(found[i], own)
        return found

    def state_shardings(self, variables: Sequence[Any]) -> Any:
        """The shardings of variables that come out of a program."""
        if self.own is None:
            return self.whole
        return [self.own(variable) for variable in variables]

    @functools.cached_property
    def _own_rows(self) -> list[list[jax.Device]]:
        """The rows of this process."""
        own = jax.process_index()
        return [row for row in self._rows if row[0].process_index == own]

    def place(self, arrays: Sequence[Any]) -> list[Any]:
        """The arrays, where every replica has them; moved in one transfer."""
        whole = self.whole
        if whole is None:
            return list(arrays)
        return self._moved(
            arrays, lambda array: array.sharding == whole and array.committed
        )

    def place_inputs(self, arrays: Sequence[Any]) -> list[Any]:
        """As `place`, for what comes from outside of programs.

        What is on the only device may stay as it is. State may not: it comes out of a
        program with another sharding than it went in, and that is another program.
        """
        whole = self.whole
        if whole is None:
            return list(arrays)
        if len(whole.device_set) > 1:
            return self.place(arrays)
        return self._moved(
            arrays,
            lambda array: array.committed and array.devices() == whole.device_set,
        )

    def _moved(
        self, arrays: Sequence[Any], is_there: Callable[[jax.Array], bool]
    ) -> list[Any]:
        found = list(arrays)
        away = [
            i
            for i, array in enumerate(found)
            if not isinstance(array, jax.Array) or not is_there(array)
        ]
        if away:
            assert self.whole is not None
            moved = put_all([found[i] for i in away], self.whole)
            for i, array in zip(away, moved, strict=True):
                found[i] = array
        return found

    def join(self, parts: Sequence[Any]) -> Any:
        """One array of the replicas' parts, each of which goes to its device.

        The parts are those of this process, as `part_shards` and `own_shards` are;
        the other ones', of the same shape, are where those processes are.
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
        """Of the n-th array, which all devices have, what is on the n-th of them."""
        if self.split is None:
            return list(arrays)
        found = []
        for array, row in zip(arrays, self._rows, strict=True):
            if row[0].process_index != jax.process_index():
                continue
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            found.append(shards[row[0]])
        return found

    def part_shards(self, array: jax.Array, count: int, stacked: bool) -> list[Any]:
        """The replicas' parts of a program's result, each on its device."""
        if self.split is None:
            parts = jnp.split(array, count)
        else:
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            parts = [shards[row[0]] for row in self._own_rows]
        return [jnp.squeeze(part, 0) for part in parts] if stacked else parts
