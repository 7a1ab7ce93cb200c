"""Generations of an elastic group of workers.

A generation is a `WorkerGroup` of fixed members. When a worker is lost or a new one
waits, the others end the generation and form the next one (`rendezvous.py`), in the
same processes. The chief is the first worker of a generation: when it is lost, the next
one takes over.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from dataclasses import dataclass
from typing import Self

from keras_strategies.cluster.group.group_messages import BEAT, MessageConnection
from keras_strategies.cluster.group.group_settings import GroupSettings
from keras_strategies.cluster.group.hub import Hub
from keras_strategies.cluster.group.rendezvous import (
    Formed,
    GroupIsRunningError,
    Rendezvous,
)
from keras_strategies.cluster.group.rendezvous_listener import RendezvousListener
from keras_strategies.cluster.group.worker_group import WorkerGroup
from keras_strategies.errors import WorkerError

# Seconds within which the loss behind a failed collective is reported.
_LOSS_SECONDS = 2.0


@dataclass(frozen=True)
class Member:
    """A worker of a generation.

    Args:
        index: int, its number in the cluster, the same in all generations.
        uid: str, its process.
        step: int, the last step that it has finished; None without training state.
        host: str, its address.
    """

    index: int
    uid: str
    step: int | None
    host: str


@dataclass(frozen=True)
class Generation:
    """The workers between two changes.

    Args:
        number: int, counted from 0.
        rank: int, this worker's place in `members`.
        members: the workers, by rank; the first is the chief.
        lost: indices of the previous generation's workers that are not members.
        joined: indices of the members that were not in the previous generation.
    """

    number: int
    rank: int
    members: tuple[Member, ...]
    lost: tuple[int, ...]
    joined: tuple[int, ...]

    @property
    def step(self) -> int | None:
        """The last finished step of all; None if no worker has training state."""
        return max((m.step for m in self.members if m.step is not None), default=None)

    @property
    def source(self) -> int | None:
        """Rank of the worker with the state after `step`; None without one."""
        steps = [member.step for member in self.members]
        return None if self.step is None else steps.index(self.step)

    @property
    def behind(self) -> tuple[int, ...]:
        """Ranks of the workers that need the state of `source`."""
        ranks = enumerate(self.members)
        return tuple(rank for rank, each in ranks if each.step != self.step)

    def __str__(self) -> str:
        at = "" if self.step is None else f" after step {self.step}"
        count = len(self.members)
        before = count - len(self.joined) + len(self.lost)
        parts = []
        if self.lost:
            parts.append(f"{_workers(self.lost)} lost{at}")
        if self.joined:
            parts.append(f"{_workers(self.joined)} added{at}")
        text = f"training continues with {count} workers, {before} before"
        return f"{', '.join(parts) or 'the group was formed again'}; {text}"


def _workers(indices: tuple[int, ...]) -> str:
    named = " and ".join(map(str, indices))
    return f"worker {named} was" if len(indices) == 1 else f"workers {named} were"


class Membership:
    """An elastic group of workers, as seen by one of them.

    Use `join`, which has the same arguments. `begin_step` and `reform` are for one
    thread.

    Example:

    >>> membership = Membership.join(GroupSettings(addresses, index, limits))
    >>> try:
    ...     may_begin = membership.begin_step()
    ...     if may_begin:
    ...         train()
    ...         step += 1
    ... except WorkerError:
    ...     may_begin = False
    >>> if not may_begin:
    ...     generation = membership.reform(step)
    """

    def __init__(self, settings: GroupSettings):
        self._limits = settings.limits
        self._lock = threading.Lock()
        self._group: WorkerGroup | None = None
        self._generation: Generation | None = None
        self._is_agreed = False
        self._listener = RendezvousListener(settings, self._end, self._newcomer)
        self._rendezvous = Rendezvous(self._listener)

    @classmethod
    def join(cls, settings: GroupSettings, *, is_ready: bool = True) -> Self:
        """Forms the first generation with the other workers, or joins a running one.

        Args:
            settings: `GroupSettings`.
            is_ready: bool, whether this worker can join a group that trains without it.

        Returns:
            A `Membership`.

        Raises:
            ClusterError: if this worker cannot listen at its address, two workers have
                one index, or workers disagree.
            WorkerError: if fewer than `limits.min_workers` connect in time.
        """
        membership = cls(settings)
        try:
            try:
                membership.reform(None, is_ready=is_ready)
            except GroupIsRunningError:
                membership.begin_alone()
        except BaseException:
            membership.leave()
            raise
        return membership

    @property
    def group(self) -> WorkerGroup:
        """The group of this generation."""
        assert self._group is not None
        return self._group

    @property
    def generation(self) -> Generation:
        """The current generation."""
        assert self._generation is not None
        return self._generation

    def begin_step(self) -> bool:
        """Requests permission for another step.

        Returns:
            Whether the step may begin; False on all workers after the same step if new
            ones wait: call `reform`.

        Raises:
            WorkerError: if a worker is lost: restore the state after the last finished
                step and call `reform`.
        """
        self.group.check()
        may_begin = self.group.begin_step()
        self._is_agreed = not may_begin
        return may_begin

    @property
    def count(self) -> int:
        """int, the workers of the cluster, members or not."""
        return len(self._listener.addresses)

    @property
    def is_member(self) -> bool:
        """bool, whether this worker is in the group of the others."""
        return self._generation is not None

    def begin_alone(self) -> None:
        """Begins a group of this worker, while the others train without it."""
        listener = self._listener
        listener.forget()
        info = {**listener.info, "index": listener.index, "host": listener.host}
        with socket.create_server(("127.0.0.1", 0)) as server:
            connection = MessageConnection(
                socket.create_connection(server.getsockname())
            )
            served = MessageConnection(server.accept()[0])
        hub = Hub.over([served], [info], self._limits.timeout)
        listener.start(hub.serve, 0, served)
        hub.welcome({})
        group = WorkerGroup.over(
            0, [info], connection, hub, self._limits.timeout, self._limits.patience
        )
        with self._lock:
            self._group, self._generation = group, None
        self._rendezvous.only_joins = True

    def is_broken(self) -> bool:
        """Whether a worker is lost, after a call has raised `WorkerError`.

        A worker that has reported its failure is lost when its process ends.
        """
        until = time.monotonic() + _LOSS_SECONDS
        failed_until = time.monotonic() + self._limits.timeout
        while True:
            try:
                self.group.check()
            except WorkerError:
                return True
            has_failed = self.group.loss() is not None
            if time.monotonic() > (failed_until if has_failed else until):
                return False
            time.sleep(BEAT / 5)

    def reform(
        self, step: int | None, *, is_ready: bool = True, admits: bool = True
    ) -> Generation:
        """Forms the next generation with all workers that are alive or wait.

        Args:
            step: int, the last step that this worker has finished, counted from the
                start of training; its state must be the one after this step. None
                without training state.
            is_ready: bool, whether this worker can join a group that trains without it.
            admits: bool, whether new workers can begin after `step`; otherwise they
                wait for a later generation.

        Returns:
            A `Generation`; the workers in `behind` need the state of `source`.

        Raises:
            GroupIsRunningError: if the others train without this worker, and it is not
                ready; call `begin_alone`.
            WorkerError: if there are fewer than `min_workers` for too long, or a larger
                part of the workers may continue without this one.
        """
        silent = None
        if self._group is not None:
            if self._is_agreed:
                self._wait_for_last_step(self._group)
            silent = self._silent(self._group)
            self._group.abandon()
            self._is_agreed = False
        formed = self._rendezvous.form(step, silent, is_ready=is_ready, admits=admits)
        self._rendezvous.only_joins = False
        generation = self._begin_generation(formed)
        self._newcomer()
        return generation

    def _silent(self, group: WorkerGroup) -> int | None:
        loss = group.loss()
        if loss is None or not loss.is_silent:
            return None
        return self.generation.members[loss.index].index

    def _wait_for_last_step(self, group: WorkerGroup) -> None:
        # Workers close their connections only after all have finished the last step.
        with contextlib.suppress(WorkerError):
            group.barrier("the end of a generation")

    def _begin_generation(self, formed: Formed) -> Generation:
        facts = formed.facts
        members = facts["members"]
        uids = [each["uid"] for each in members]
        rank = uids.index(self._listener.uid)
        timeout = self._limits.timeout
        group = WorkerGroup.over(
            rank, members, formed.connection, formed.hub, timeout, self._limits.patience
        )
        previous = {int(index): uid for index, uid in facts["previous"]}
        stayed = {each["index"] for each in members if each["uid"] in previous.values()}
        generation = Generation(
            facts["generation"],
            rank,
            tuple(Member(m["index"], m["uid"], m["step"], m["host"]) for m in members),
            tuple(sorted(set(previous) - stayed)),
            tuple(m["index"] for m in members if m["index"] not in stayed),
        )
        with self._lock:
            self._group, self._generation = group, generation
        return generation

    def _end(self, generation: int) -> None:
        with self._lock:
            group, current = self._group, self._generation
        if group is not None and current is not None and current.number == generation:
            group.end("the other workers form another group")

    def _newcomer(self) -> None:
        """Requests the end of the generation if a worker waits at this chief."""
        with self._lock:
            group = self._group
        if group is not None and self._listener.joining > 0:
            group.request_stop()

    def leave(self) -> None:
        """Leaves the group; the others continue without this worker."""
        self._listener.close()
        if self._group is not None:
            self._group.leave()
