"""The process's random generators, while replicas run in turn.

Torch has one generator for each device of the process. Replicas that run one at a time
each find the state in it that one device would find; it is the caller's when a replica
begins, and that of its last draw when its turn comes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

_State = list[torch.Tensor]


class ReplicaGenerators:
    """The states of the generators for each replica of one computation.

    Args:
        devices: the devices of the replicas; one device draws from the first.
    """

    def __init__(self, devices: Sequence[torch.device]):
        # Replicas on devices of different kinds draw nothing, see `RowNumbers`.
        is_mixed = len({device.type for device in devices}) > 1
        cpu = torch.device("cpu")
        self._devices = [cpu for _ in devices] if is_mixed else list(devices)
        source = self._states(0)
        self._own = [source for _ in self._devices]
        # Generators of other devices than the first are not used on one device.
        others = set(self._devices[1:]) - {self._devices[0], torch.device("cpu")}
        self._others = [(device, generator_of(device).get_state()) for device in others]

    def begin_turn(self, replica_id: int) -> None:
        """Sets the process's generators to a replica's states."""
        pairs = zip(self._generators(replica_id), self._own[replica_id], strict=True)
        for generator, state in pairs:
            generator.set_state(state)

    def end_turn(self, replica_id: int) -> None:
        """Keeps the states that a replica has left."""
        self._own[replica_id] = self._states(replica_id)

    @contextlib.contextmanager
    def shared_turn(self) -> Iterator[None]:
        """Context of a function that is called once, after draws of all replicas."""
        self.begin_turn(0)
        try:
            yield
        finally:
            self._own = [self._states(0)] * len(self._devices)

    def finish(self) -> None:
        """Leaves the states of the first replica, which are those of one device."""
        self.begin_turn(0)
        for device, state in self._others:
            generator_of(device).set_state(state)

    def _states(self, replica_id: int) -> _State:
        return [each.get_state() for each in self._generators(replica_id)]

    def _generators(self, replica_id: int) -> list[torch.Generator]:
        """Of the CPU, and of an accelerator of the replica."""
        device = self._devices[replica_id]
        found = [torch.default_generator]
        return found if device.type == "cpu" else [*found, generator_of(device)]


class _OfMps:
    """The process's generator of MPS devices."""

    get_state = staticmethod(torch.mps.get_rng_state)
    set_state = staticmethod(torch.mps.set_rng_state)


_of_mps: Any = _OfMps()


def generator_of(device: torch.device) -> torch.Generator:
    """The process's generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return _of_mps  # type: ignore[no-any-return]
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found
