"""Assignment of shards to another number of servers, with few moves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from keras_strategies.parameter_server.variables.dtype_sizes import bytes_per_element
from keras_strategies.parameter_server.wire.step_messages import Key
from keras_strategies.parameter_server.wire.variable_description import (
    ShardRange,
    VariableDescription,
)


@dataclass(frozen=True)
class ShardGroup:
    """Shards that stay on one server: of a weight, its slots and colocated variables.

    Args:
        keys: tuple of shards.
        server: int, their server.
        nbytes: int, their bytes.
    """

    keys: tuple[Key, ...]
    server: int
    nbytes: int


def shard_groups(
    described: Mapping[int, VariableDescription], homes: Mapping[int, int]
) -> list[ShardGroup]:
    """The groups of all shards of variables.

    Args:
        described: descriptions by number.
        homes: for a slot or a colocated variable, the number of the variable that it is
            colocated with.
    """
    found: dict[Key, ShardGroup] = {}
    for number, description in described.items():
        if description.kind in ("local", "scalar"):
            continue
        home = number
        while homes.get(home) in described:
            home = homes[home]
        starts = [shard.start for shard in described[home].shards]
        row = math.prod(description.shape[1:]) * bytes_per_element(description.dtype)
        for i, shard in enumerate(description.shards):
            is_aligned = len(description.shards) == len(starts)
            key = (home, starts[i] if is_aligned else starts[0])
            group = found.get(key, ShardGroup((), shard.server, 0))
            found[key] = replace(
                group,
                keys=(*group.keys, (number, shard.start)),
                nbytes=group.nbytes + row * shard.rows,
            )
    return list(found.values())


def assign(groups: Sequence[ShardGroup], servers: int) -> list[int]:
    """The new server of each group.

    Groups of removed servers go to the server with the fewest bytes. Then groups move
    from the server with the most bytes to that with the fewest, while this makes them
    more equal.

    Args:
        groups: the groups.
        servers: int, the new number of servers.

    Example:

    >>> assign([ShardGroup((), 0, 8), ShardGroup((), 0, 5), ShardGroup((), 1, 1)], 2)
    [0, 1, 1]
    """
    found = [group.server if group.server < servers else -1 for group in groups]
    held = [0] * servers
    for server, group in zip(found, groups, strict=True):
        if server >= 0:
            held[server] += group.nbytes
    largest_first = sorted(range(len(groups)), key=lambda i: -groups[i].nbytes)
    for i in largest_first:
        if found[i] < 0:
            found[i] = held.index(min(held))
            held[found[i]] += groups[i].nbytes
    while True:
        most, least = held.index(max(held)), held.index(min(held))
        gap = held[most] - held[least]
        movable = [
            i for i in largest_first if found[i] == most and 0 < groups[i].nbytes < gap
        ]
        if not movable:
            return found
        best = min(movable, key=lambda i: abs(gap - 2 * groups[i].nbytes))
        found[best] = least
        held[most] -= groups[best].nbytes
        held[least] += groups[best].nbytes


def new_shards(
    described: Mapping[int, VariableDescription],
    groups: Sequence[ShardGroup],
    assigned: Sequence[int],
    servers: int,
) -> dict[int, tuple[ShardRange, ...]]:
    """The shards of each variable after an assignment, by its number."""
    server_of = {
        key: server
        for group, server in zip(groups, assigned, strict=True)
        for key in group.keys
    }
    found = {}
    for number, description in described.items():
        if description.kind == "scalar":
            found[number] = tuple(ShardRange(i, 0, 1) for i in range(servers))
        elif description.kind != "local":
            found[number] = tuple(
                replace(shard, server=server_of[number, shard.start])
                for shard in description.shards
            )
    return found
