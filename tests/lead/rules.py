"""A lead without a network, that tests feed with events."""

from __future__ import annotations

from typing import Any

from keras_strategies.lead import events
from keras_strategies.lead.decisions import step
from keras_strategies.lead.events import TICK, Beat, Message
from keras_strategies.lead.state import LeadState, Settings


class Lead:
    """The decisions of a lead, and its last messages; uids begin with the index."""

    def __init__(self, workers: int, **settings: Any):
        times = {"timeout": 2.0, "patience": 10.0}
        self.state = LeadState(Settings(workers, **(times | settings)))
        self.now = 0.0
        self.silent: set[str] = set()
        self.out: list[Message] = []
        self.feed(events.Tick(0.0, {}))

    def feed(self, event: Any) -> dict[str, Message]:
        """The messages after an event, by kind."""
        self.state, self.out = step(self.state, event)
        return {message.kind: message for message in self.out}

    def come(
        self, uid: str, step: int | None = None, **facts: Any
    ) -> dict[str, Message]:
        """A worker connects and waits."""
        found = self.feed(events.Hello(uid, int(uid[0]), "host", step=step, **facts))
        return found | self.feed(events.Ready(uid, step))

    def ready(self, step: int, *uids: str) -> dict[str, Message]:
        """Workers wait with the state after a step; the messages after the last one."""
        return [self.feed(events.Ready(uid, step)) for uid in uids][-1]

    def begin(self, step: int, *uids: str) -> None:
        """Workers begin the next generation at a step."""
        self.ready(step, *uids)
        self.hold(step)

    def hold(self, step: int) -> dict[str, Message]:
        """All members have the state."""
        found, number = {}, self.state.group.number
        for uid in self.state.group.ranks:
            found = self.feed(events.Holds(uid, number, step))
        return found

    def wait(self, seconds: float) -> dict[str, Message]:
        """Time passes; workers that are not `silent` send beats."""
        found: dict[str, Message] = {}
        for _ in range(int(seconds / TICK)):
            self.now += TICK
            heard = {u: Beat() for u in self.state.workers if u not in self.silent}
            found |= self.feed(events.Tick(self.now, heard))
        return found

    def stop(self, uid: str) -> dict[str, Message]:
        """A worker is silent, for longer than `timeout`."""
        self.silent = {uid}
        return self.wait(2.5)

    def resume(self) -> None:
        """No worker is silent."""
        self.silent = set()
        self.wait(TICK)

    @classmethod
    def training(cls, workers: int, **settings: Any) -> Lead:
        """A lead with a first generation that trains: "0a", "1a" and so on."""
        lead = cls(workers, **settings)
        lead.run(*(f"{index}a" for index in range(workers)))
        return lead

    def run(self, *uids: str) -> dict[str, Message]:
        """The first generation trains."""
        for uid in uids:
            self.come(uid)
        return self.hold(0)

    def lose(self, *uids: str) -> dict[str, Message]:
        """The connections of workers end."""
        found = {}
        for uid in uids:
            found |= self.feed(events.Gone(uid))
        return found
