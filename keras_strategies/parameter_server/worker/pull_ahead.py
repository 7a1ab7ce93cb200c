"""Prefetched steps: values pulled ahead of the step that is computed.

A message pushes the result of a step and pulls the values of a later one. With
unbounded staleness the later one is the step after the next: its values are in transit,
and the servers update, while the next step is computed. The message is sent before the
reply to the previous one has arrived, so that the servers need not wait for a worker.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.wire.step_messages import StepReply, StepRequest
from keras_strategies.parameter_server.wire.task_messages import ScheduledTask
from keras_strategies.parameter_server.worker.step_execution import PullPlan

#: Number of steps that are prefetched.
PULL_AHEAD_STEPS = 2


@dataclass
class PrefetchedStep:
    """A step with values that are pulled ahead.

    Args:
        task: its task.
        index: int, the index of its batch in the task.
        plan: its pull plan.
        pulled: the replies by server; None until they arrive.
    """

    task: ScheduledTask
    index: int
    plan: PullPlan
    pulled: dict[int, StepReply] | None = None


@dataclass(frozen=True)
class _Sent:
    """Unanswered requests.

    Args:
        numbers: the requests by server.
        ahead: the prefetched step, None for none.
        confirm: called with the replies of the servers in `pushed`.
        pushed: servers that updates were pushed to.
    """

    numbers: dict[int, int]
    ahead: PrefetchedStep | None
    confirm: Callable[[dict[int, StepReply]], None] | None
    pushed: tuple[int, ...]


class PullAheadQueue:
    """Prefetched steps of a worker, in the order of their execution.

    Args:
        servers: the servers.
    """

    def __init__(self, servers: ServerConnections):
        self._servers = servers
        self._ahead: collections.deque[PrefetchedStep] = collections.deque()
        self._sent: collections.deque[_Sent] = collections.deque()
        # Number of requests of the last `send`.
        self._last = 0

    def __len__(self) -> int:
        """Number of prefetched steps."""
        return len(self._ahead)

    @property
    def is_waiting(self) -> bool:
        """Whether the values of the next step are in transit."""
        return bool(self._ahead) and self._ahead[0].pulled is None

    def take(
        self, task: ScheduledTask, index: int
    ) -> tuple[PullPlan, dict[int, StepReply]] | None:
        """Plan and values of a step, if they have arrived."""
        if not self._ahead:
            return None
        ahead = self._ahead.popleft()
        if ahead.task is not task or ahead.index != index or ahead.pulled is None:
            self.drop()
            return None
        return ahead.plan, ahead.pulled

    def send(
        self,
        pushes: Mapping[int, StepRequest],
        steps: Sequence[PrefetchedStep],
        confirm: Callable[[dict[int, StepReply]], None] | None = None,
    ) -> None:
        """Pushes the result of a step and pulls the values of later ones.

        Shared memory can be reused: all requests before the previous call have been
        answered, and at most one request to a server comes between the pull of a step's
        values and their use.

        Args:
            pushes: updates by server.
            steps: later steps in their order; the first is sent with the pushes.
            confirm: called by `await_replies` with the replies to the pushes; None if
                there are none.
        """
        first = steps[0] if steps else None
        pulls = first.plan.pulls if first is not None else {}
        merged = {
            server: merge(pushes.get(server), pulls.get(server))
            for server in {*pushes, *pulls}
        }
        numbers = self._servers.send_steps(merged)
        self._sent.append(_Sent(numbers, first, confirm, tuple(pushes)))
        for ahead in steps[1:]:
            numbers = self._servers.send_steps(ahead.plan.pulls)
            self._sent.append(_Sent(numbers, ahead, None, ()))
        self._last = max(1, len(steps))
        self._ahead.extend(steps)

    def await_replies(self, *, wait_last: bool = True) -> None:
        """Waits for the replies to the requests.

        Args:
            wait_last: bool, whether to wait for those of the last `send` too.
        """
        while len(self._sent) > (0 if wait_last else self._last):
            sent = self._sent.popleft()
            found = self._servers.receive_steps(sent.numbers)
            if sent.ahead is not None:
                sent.ahead.pulled = found
            if sent.confirm is not None:
                sent.confirm({server: found[server] for server in sent.pushed})

    def drop(self) -> None:
        """Drops the prefetched steps; replies to pushes stay pending."""
        self._ahead.clear()
        self._sent = collections.deque(replace(sent, ahead=None) for sent in self._sent)


def merge(push: StepRequest | None, pull: StepRequest | None) -> StepRequest:
    """One request for a push and a pull."""
    if push is None:
        assert pull is not None
        return pull
    if pull is None:
        return push
    return replace(push, pull=pull.pull, pull_rows=pull.pull_rows)
