"""Collectives of a compiled program, read from its HLO text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

# Lines of a compiled program:
#
#   %all-reduce.3 = (f32[64,8]{1,0}, f32[8]{0}) all-reduce(%a, %b), channel_id=1,
#       replica_groups={{0,1},{2,3}}, to_apply=%add
#   %w = (s32[], f32[4]{0}) while(%t), condition=%c, body=%b,
#       backend_config={"known_trip_count":{"n":"5"}}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
    r" = (?P<type>.*?) (?P<kind>all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute)(?:-start)?\("
)
_CALLED = re.compile(
    r"(?:body|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
# replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, of which a part of an axis is
# written 'axis_1':(1)2.
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")


@dataclass
class _Computation:
    collectives: list[tuple[str, int]]
    calls: list[tuple[str, int]]


def sent_bytes(text: str) -> dict[str, tuple[int, int]]:
    """Counts a program's collectives and the bytes that each device sends in them.

    Bytes are those of a ring: each device sends (n-1)/n of what is gathered or
    scattered, and twice that for an all-reduce.

    Args:
        text: str, a compiled program in XLA's notation.

    Returns:
        dict from kind to the number of collectives and of bytes.
    """
    computations: dict[str, _Computation] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header:
            current = header[1]
            computations[current] = _Computation([], [])
            entry = current if line.startswith("ENTRY") else entry
        elif current:
            _read(line, computations[current])
    totals: dict[str, tuple[int, int]] = {}
    for kind, nbytes, times in _executed(computations, entry, 1):
        count, total = totals.get(kind, (0, 0))
        totals[kind] = (count + times, total + times * nbytes)
    return totals


def _read(line: str, computation: _Computation) -> None:
    found = _COLLECTIVE.search(line)
    if found:
        kind = found["kind"]
        nbytes = sum(
            math.prod(int(n) for n in dims.split(",") if n) * _item(dtype)
            for dtype, dims in _ARRAY.findall(found["type"])
        )
        computation.collectives.append((kind, _ring(kind, nbytes, line)))
        return
    trips = _TRIPS.search(line)
    times = int(trips[1]) if trips and " while(" in line else 1
    computation.calls += [(name, times) for name in _CALLED.findall(line)]
    for names in _BRANCHES.findall(line):
        computation.calls += [(n.strip().lstrip("%"), 1) for n in names.split(",")]


def _ring(kind: str, nbytes: int, line: str) -> int:
    size = _group_size(line)
    if kind == "collective-permute":
        return nbytes
    share = nbytes * (size - 1) / size
    if kind == "all-reduce":
        return round(2 * share)
    # The result of a reduce-scatter is one shard of its operand.
    return round(share * size if kind == "reduce-scatter" else share)


def _group_size(line: str) -> int:
    """The number of devices in each group of a collective."""
    if groups := _GROUPS.search(line):
        return groups[1].count(",") + 1
    if iota := _IOTA_GROUPS.search(line):
        return int(iota[1])
    if mesh := _MESH_GROUPS.search(line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        used = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part or sizes[axis]) for axis, part in used)
    return 1


def _item(dtype: str) -> int:
    """Bytes of an element: of "f32" 4, of "bf16" 2, of "pred" 1."""
    digits = re.search(r"\d+", dtype)
    return max(int(digits[0]) // 8, 1) if digits else 1


def _executed(
    computations: dict[str, _Computation], name: str, times: int
) -> Iterator[tuple[str, int, int]]:
    computation = computations.get(name)
    if computation is None:
        return
    for kind, nbytes in computation.collectives:
        yield kind, nbytes, times
    for called, trips in computation.calls:
        yield from _executed(computations, called, times * trips)
