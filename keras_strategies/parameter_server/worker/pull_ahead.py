"""What a worker has sent and asked for ahead of the step that it computes.

A message has what a step has come to and asks for the values of a later one. Where
steps may miss updates, that is not the next step but the one after it: its values
travel, and the servers update, while the next one is computed.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.wire.step_messages import StepReply, StepRequest
from keras_strategies.parameter_server.wire.task_messages import ScheduledTask
from keras_strategies.parameter_server.worker.step_execution import PullPlan

#: Steps whose values may be on their way.
PULL_AHEAD_STEPS = 2


@dataclass
class PrefetchedStep:
    """A step that is to come.

    Args:
        task: the task, and
        index: int, which of its batches.
        plan: what the step needs.
        pulled: the values by server, None until they are here.
    """

    task: ScheduledTask
    index: int
    plan: PullPlan
    pulled: dict[int, StepReply] | None = None


@dataclass(frozen=True)
class _Sent:
    """Requests that have not been answered.

    Args:
        numbers: the requests by server.
        ahead: the step whose values they ask for, None for none.
        confirm: called with the answers of the servers that updates were pushed to.
        pushed: those servers.
    """

    numbers: dict[int, int]
    ahead: PrefetchedStep | None
    confirm: Callable[[dict[int, StepReply]], None] | None
    pushed: tuple[int, ...]


class PullAheadQueue:
    """The steps ahead of a worker, in the order in which they will be made.

    Args:
        servers: the servers.
    """

    def __init__(self, servers: ServerConnections):
        self._servers = servers
        self._ahead: collections.deque[PrefetchedStep] = collections.deque()
        self._sent: collections.deque[_Sent] = collections.deque()

    def __len__(self) -> int:
        """How many steps have been asked for and not been taken."""
        return len(self._ahead)

    @property
    def is_waiting(self) -> bool:
        """Whether the next step's values have been asked for and are not here."""
        return bool(self._ahead) and self._ahead[0].pulled is None

    def take(
        self, task: ScheduledTask, index: int
    ) -> tuple[PullPlan, dict[int, StepReply]] | None:
        """A step's plan and values, if they are here."""
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
        confirm: Callable[[dict[int, StepReply]], None],
    ) -> None:
        """Sends what a step has come to, and asks for the values of others.

        All that was sent before has been answered, so that messages take turns.

        Args:
            pushes: by server, what to update.
            steps: those to come, in their order; the first goes with the pushes.
            confirm: called by `await_replies` with the answers to the pushes.
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
            numbers = self._servers.send_steps(ahead.plan.pulls, shares_memory=False)
            self._sent.append(_Sent(numbers, ahead, None, ()))
        self._ahead.extend(steps)

    def await_replies(self) -> None:
        """Takes in the answers to all that has been sent."""
        while self._sent:
            sent = self._sent.popleft()
            found = self._servers.receive_steps(sent.numbers)
            if sent.ahead is not None:
                sent.ahead.pulled = found
            if sent.confirm is not None:
                sent.confirm({server: found[server] for server in sent.pushed})

    def drop(self) -> None:
        """Forgets the steps to come. What has been pushed stays to be settled."""
        self._ahead.clear()
        self._sent = collections.deque(replace(sent, ahead=None) for sent in self._sent)


def merge(push: StepRequest | None, pull: StepRequest | None) -> StepRequest:
    """One message of what to push and what to pull."""
    if push is None:
        assert pull is not None
        return pull
    if pull is None:
        return push
    return replace(push, pull=pull.pull, pull_rows=pull.pull_rows)
