"""All sequences of a few faults in a small group that trains."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from lead.model import DONE, Worker, World

#: A fault, the worker or the number of ticks, and the rounds of messages after it.
Action = tuple[str, int, int]


def fresh(workers: int, total: int = 8) -> World:
    """A group that trains."""
    world = World(random.Random(1), workers, total)
    rounds(world, 14)
    assert world.lead.group.phase.value == "running", world.lead.group
    return world


def rounds(world: World, count: int) -> None:
    """Delivers one message each from and to all workers, and lets them act."""
    for _ in range(count):
        for worker in list(world.workers.values()):
            world.deliver_to_lead(worker)
            world.deliver_to_worker(worker)
            world.act(worker)


def _current(world: World, index: int) -> Worker:
    return [w for w in world.workers.values() if w.index == index][-1]


def _faults(world: World) -> Iterator[tuple[str, int]]:
    for index in range(world.settings.workers):
        worker = _current(world, index)
        if not worker.alive or worker.phase in DONE:
            yield "start", index
            continue
        yield "kill", index
        if worker.stopped:
            yield "resume", index
        elif not worker.is_deaf:
            yield "stop", index
            if worker.connected:
                yield "cut", index
                yield "cut_unnoticed", index
            else:
                yield "connect", index
    yield "time", 2
    yield "time", 6


def _do(world: World, action: Action) -> None:
    name, which, count = action
    if name == "time":
        for _ in range(which):
            world.tick()
    elif name == "start":
        world.start(which)
    else:
        getattr(world, name)(_current(world, which))
    rounds(world, count)


def check_all(workers: int, depth: int, delays: Sequence[int]) -> int:
    """Plays all sequences of `depth` faults, with rounds of messages after each.

    Returns:
        The number of sequences.
    """
    count, paths = 0, [()]
    while paths:
        path: tuple[Action, ...] = paths.pop()
        world = fresh(workers)
        try:
            for action in path:
                _do(world, action)
            if len(path) == depth:
                count += 1
                world.check_end()
                continue
        except Exception as error:
            raise AssertionError(f"{path}: {error}") from error
        last = len(path) == depth - 1
        for fault in _faults(world):
            paths += [(*path, (*fault, n)) for n in ((1,) if last else delays)]
    return count
