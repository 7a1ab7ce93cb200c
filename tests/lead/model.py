"""A model of workers, their network and their collectives, for tests of the decisions.

Each method of `World` is one atomic action. Messages wait in queues until they are
delivered, in order; a lost connection loses them. A collective ends for its members
when all have entered it, as an all-reduce does.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.lead import events
from keras_strategies.lead.decisions import EVENTS, step
from keras_strategies.lead.events import TICK, Beat, Message
from keras_strategies.lead.state import LeadState, Settings

DONE = ("ended", "error")
# Seconds of the model's time in which all workers must have ended after the last fault.
_END_SECONDS = 75


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Generation:
    """What the members of a generation have begun, as it is."""

    members: tuple[str, ...]
    step: int
    is_sent: bool = False
    has_run: bool = False
    entered: dict[int, set[str]] = field(default_factory=dict)


@dataclass
class Worker:
    """A worker; `phase` is new, waiting, syncing, confirming, running, instep, leaving,
    ended or error."""

    uid: str
    index: int
    contact: float
    alive: bool = True
    stopped: bool = False
    connected: bool = True
    state: int | None = None
    phase: str = "new"
    generation: int = 0
    has_left: bool = True
    begun: int = 0
    pausing: bool = False
    last: int | None = None
    away: float | None = 0.0
    waits: bool = False
    number: int = 0
    failing_since: float | None = None
    has_state: bool = False
    was_left: bool = True
    is_deaf: bool = False

    @property
    def claim(self) -> int | None:
        """The state that it reports: initial values do not count before `go`."""
        return self.state if self.has_state else None

    @property
    def runs(self) -> bool:
        return self.alive and not self.stopped


class World:
    """The lead, workers, and their messages.

    Args:
        rng: decides what is left open.
        workers: int, workers of the cluster.
        total: int, the steps of training.
        settings: of `Settings`.
    """

    def __init__(self, rng: random.Random, workers: int, total: int, **settings: Any):
        self.rng, self.total = rng, total
        self.settings = Settings(workers, timeout=1.0, patience=8.0, **settings)
        self.lead = LeadState(self.settings)
        self.now = 0.0
        self.workers: dict[str, Worker] = {}
        self.inbox: dict[str, deque[Any]] = {}
        self.outbox: dict[str, deque[Any]] = {}
        self.generations: dict[int, Generation] = {}
        self.heard: dict[str, Beat] = {}
        # Workers of which the lead has heard.
        self.known: set[str] = set()
        self.count = 0
        self.tick()
        for index in range(workers):
            self.start(index)

    # Faults

    def start(self, index: int) -> None:
        """Starts a process, if none of this index runs."""
        same = [w for w in self.workers.values() if w.index == index]
        if any(w.alive and w.phase not in DONE for w in same):
            return
        self.count += 1
        worker = Worker(f"{index}.{self.count}", index, contact=self.now)
        self.workers[worker.uid] = worker
        self.connect(worker)

    def connect(self, w: Worker) -> None:
        w.connected, w.failing_since, w.is_deaf = True, None, False
        w.has_left = True
        self.inbox[w.uid], self.outbox[w.uid] = deque(), deque()
        self.outbox[w.uid].append(("hello", w.generation, w.claim))
        if w.phase == "waiting":
            self.outbox[w.uid].append(("ready", w.claim, False))
        if w.phase == "leaving":
            self.outbox[w.uid].append(("bye",))

    def cut(self, w: Worker) -> None:
        """The connection ends; messages on their way are lost."""
        if not w.connected:
            return
        w.connected, w.was_left = False, w.has_left
        self.inbox[w.uid].clear()
        self.outbox[w.uid] = deque([("gone",)])
        w.away = self.now if w.away is None else w.away
        w.failing_since = self.now
        if w.runs:
            w.has_left = True

    def cut_unnoticed(self, w: Worker) -> None:
        """The lead sees the end of a connection, the worker only silence."""
        if w.connected and w.runs and w.phase not in DONE:
            self.cut(w)
            w.has_left, w.failing_since, w.is_deaf = w.was_left, None, True

    def kill(self, w: Worker) -> None:
        self.cut(w)
        w.alive = False

    def stop(self, w: Worker) -> None:
        w.stopped = True
        w.away = self.now if w.away is None else w.away

    def resume(self, w: Worker) -> None:
        w.stopped = False

    # Time

    def tick(self) -> None:
        self.now += TICK
        for w in self.workers.values():
            if not w.runs:
                continue
            if w.connected:
                self.outbox[w.uid].append(("beat", self.now, w.claim))
            if w.is_deaf and self.now > w.contact + self.settings.timeout:
                w.is_deaf, w.failing_since, w.has_left = False, self.now, True
            since = self.now if w.connected else w.failing_since
            if since is not None and self.now - since > self.settings.timeout:
                w.phase = "error"
        heard, self.heard = self.heard, {}
        self.feed(events.Tick(self.now, heard))

    def feed(self, event: Any) -> None:
        before = self.lead
        self.lead, out = step(self.lead, event)
        for message in out:
            if message.kind == "begin":
                self.check_begin(message)
            if message.kind == "go":
                self.generations[message.body["generation"]].has_run = True
            if message.kind == "over":
                self.check_over(message, before)
            for uid in message.to:
                if uid in self.workers and self.workers[uid].connected:
                    self.inbox[uid].append((message.kind, message.body))

    # Messages

    def deliver_to_lead(self, w: Worker) -> None:
        if not self.outbox[w.uid]:
            return
        kind, *rest = self.outbox[w.uid].popleft()
        uid = w.uid
        if kind == "gone":
            self.feed(events.Gone(uid, self.heard.pop(uid, None)))
        elif not w.connected:
            return
        elif kind == "beat":
            self.heard[uid] = Beat(rest[1])
            self.inbox[uid].append(("beat", rest[0]))
        else:
            self.heard[uid] = Beat()
            self.event_of(w, kind, rest)

    def event_of(self, w: Worker, kind: str, rest: list[Any]) -> None:
        uid = w.uid
        if kind == "hello":
            known = self.lead.workers.get(uid)
            if known is not None and known.gone is None:
                self.feed(events.Gone(uid))
            if not w.stopped:
                w.away = None
            generation, claim = rest
            hello = events.Hello(uid, w.index, generation=generation, step=claim)
            self.known.add(uid)
            self.feed(hello)
        elif kind == "arrived":
            key = ("", rest[1], f"comparison {rest[1]}", uid)
            self.feed(events.Arrived(uid, rest[0], *key))
        elif kind == "bye":
            self.feed(events.Bye(uid, True, ""))
        else:
            event = EVENTS[kind](uid, *rest)
            if kind in events.JOINT and self.rng.random() < 0.5:
                event = event._replace(others=self.joint(w, (kind, *rest)))
            self.feed(event)

    def joint(self, w: Worker, message: tuple[Any, ...]) -> tuple[str, ...]:
        """Takes the same message of the others, if it is their next one."""
        found = []
        for other in self.workers.values():
            box = self.outbox[other.uid]
            if other is not w and other.connected and box and box[0] == message:
                box.popleft()
                self.heard[other.uid] = Beat()
                found.append(other.uid)
        return tuple(found)

    def deliver_to_worker(self, w: Worker) -> None:
        if not w.runs or not self.inbox[w.uid]:
            return
        w.away = None if w.connected else w.away
        kind, body = self.inbox[w.uid].popleft()
        if kind == "beat":
            w.contact = max(w.contact, body)
        elif kind == "begin":
            w.generation, w.has_left, w.phase = body["generation"], False, "syncing"
            w.begun, w.pausing, w.last, w.number = 0, False, None, 0
            w.waits = False
            w.has_state |= not body["is_first"]
            if not w.has_state:
                w.state = None
        elif kind == "go":
            w.has_state = True
            if not w.has_left:
                w.phase = "running"
        elif kind == "pause" and not w.has_left:
            w.pausing = True
            self.outbox[w.uid].append(("begun", w.generation, w.begun))
        elif kind == "stop_after":
            w.last = body["count"]
        elif kind == "end" and body["generation"] == w.generation:
            w.has_left = True
        elif kind == "compared":
            self.check_compared(w, body)
            w.waits = False
        elif kind in ("late", "over"):
            w.phase = "error" if body["error"] else "ended"
        elif kind == "bye":
            w.phase = "ended"

    # Programs of workers

    def act(self, w: Worker) -> None:
        if not w.runs or w.phase in ("waiting", "leaving", *DONE):
            return
        if w.phase == "new" or w.has_left:
            w.phase = "waiting"
            admits = w.claim is None or w.claim % 3 > 0
            self.outbox[w.uid].append(("ready", w.claim, False, admits))
            return
        generation = self.generations[w.generation]
        if w.phase == "syncing":
            self.sync(w, generation)
        elif w.phase == "running":
            self.run(w, generation)
        elif w.phase == "instep":
            at = generation.step + w.begun
            if len(generation.entered[at]) == len(generation.members):
                w.state, w.phase = at, "running"
            elif self.rng.random() < 0.5:
                # The engine notices a dead process.
                dead = any(not self.workers[u].alive for u in generation.members)
                w.has_left |= dead

    def sync(self, w: Worker, generation: Generation) -> None:
        if generation.members[0] == w.uid:
            w.state = w.state or 0
            if w.state != generation.step:
                raise Violation(f"the chief has {w.state}, not {generation.step}")
            generation.is_sent = True
        elif w.state != generation.step:
            if not generation.is_sent:
                return
            w.state = generation.step
        w.phase = "confirming"
        self.outbox[w.uid].append(("holds", w.generation, w.state))

    def run(self, w: Worker, generation: Generation) -> None:
        if w.waits:
            return
        if w.number == 0 and w.begun == 0:
            w.number, w.waits = 1, True
            self.outbox[w.uid].append(("arrived", w.generation, 0))
            return
        has_lease = self.now <= w.contact + self.settings.timeout
        if not has_lease or (w.pausing and w.last is None):
            return
        if w.last is not None and w.begun >= w.last:
            w.phase, w.has_left = "waiting", True
            self.outbox[w.uid].append(("ready", w.claim, True))
        elif w.state == self.total:
            w.phase = "leaving"
            self.outbox[w.uid].append(("bye",))
        else:
            if w.uid == generation.members[0] and self.rng.random() < 0.1:
                self.outbox[w.uid].append(("snapshot", w.state, f"step {w.state}"))
            w.begun += 1
            self.enter(w, generation)

    def enter(self, w: Worker, generation: Generation) -> None:
        at = generation.step + w.begun
        if w.state is None or w.state != at - 1:
            raise Violation(f"{w.uid} begins step {at} with state {w.state}")
        entered = generation.entered.setdefault(at, set())
        entered.add(w.uid)
        w.phase = "instep"
        if len(entered) < len(generation.members):
            return
        number = w.generation
        later = [g for n, g in self.generations.items() if n > number and g.has_run]
        if later and at > min(g.step for g in later) + 1:
            raise Violation(f"generation {number} trains beside a later one: {at}")

    # Invariants

    def check_begin(self, message: Message) -> None:
        body = message.body
        number, begun = body["generation"], body["step"]
        if number in self.generations or len(set(body["members"])) != len(message.to):
            raise Violation("a generation twice, or a worker twice")
        if not self.settings.least <= len(message.to) <= self.settings.most:
            raise Violation(f"{len(message.to)} members")
        if body["is_first"] and any(g.has_run for g in self.generations.values()):
            raise Violation("a new beginning after training has run")
        snapshot = self.lead.snapshot
        if snapshot is not None and begun + 1 < snapshot[0]:
            raise Violation(f"begins at {begun}, a snapshot has {snapshot[0]}")
        self.check_members(message, begun)
        self.generations[number] = Generation(message.to, begun)
        forming = self.lead.clock - self.lead.group.since
        for w in self.workers.values():
            is_newer = w.claim is not None and w.claim > begun + 1
            if is_newer and self.counts(w) and forming <= self.settings.patience:
                raise Violation(f"begins at {begun}, {w.uid} has {w.state}")

    def check_members(self, message: Message, begun: int) -> None:
        """New workers begin only after a step that admits them."""
        chief, *others = message.to
        before = self.generations.get(message.body["generation"] - 1)
        known = () if before is None else before.members
        if self.lead.workers[chief].admits or before is None:
            return
        if any(uid not in known for uid in others) and not message.body["is_first"]:
            raise Violation(f"{message.to} begin after {begun}, which admits none")

    def check_compared(self, w: Worker, body: dict[str, Any]) -> None:
        members = self.generations[w.generation].members
        found = {
            rank: value
            for _, value, ranks in body["values"]
            for rank in range(len(members))
            if not ranks or int(ranks, 16) >> rank & 1
        }
        if found != dict(enumerate(members)):
            raise Violation(f"{w.uid} has compared {found} of {members}")

    def counts(self, w: Worker) -> bool:
        """Whether the lead can know that a worker is alive, or may return in time."""
        if not w.alive or w.phase in DONE or w.uid not in self.known:
            return False
        if any(kind == "over" for kind, _ in self.inbox[w.uid]):
            return False
        return w.away is None or self.now - w.away < self.settings.timeout

    def check_over(self, message: Message, before: LeadState) -> None:
        error = message.body["error"]
        if before.is_over:
            return
        if "No worker has the state" in error:
            least = -1
        elif "older than the last snapshot" in error:
            assert before.snapshot is not None
            least = before.snapshot[0]
        else:
            return
        late = self.lead.clock - before.group.since > self.settings.patience
        for w in self.workers.values():
            newer = w.claim is not None and w.claim > least + 1 * (least >= 0)
            if newer and self.counts(w) and not late:
                raise Violation(f"given up, but {w.uid} has {w.state}: {error}")

    def check_end(self) -> None:
        """After all faults all workers end, in time, with the last step or an error."""
        for w in self.workers.values():
            self.resume(w)
            if w.alive and not w.connected and w.phase not in DONE:
                self.connect(w)
        ticks = int(_END_SECONDS / TICK)
        while any(w.alive and w.phase not in DONE for w in self.workers.values()):
            ticks -= 1
            if not ticks:
                alive = [w for w in self.workers.values() if w.alive]
                phases = {w.uid: (w.phase, w.generation, w.state) for w in alive}
                raise Violation(f"some do not end: {phases} {self.lead.group}")
            self.tick()
            for w in list(self.workers.values()):
                self.settle(w)
        ends = {
            w.state for w in self.workers.values() if w.alive and w.phase == "ended"
        }
        if ends - {None, self.total} and self.total not in [
            w.state for w in self.workers.values()
        ]:
            raise Violation(f"workers end after {ends}")

    def settle(self, w: Worker) -> None:
        """Delivers the messages of a worker, and lets it act."""
        for _ in range(6):
            before = (w.phase, len(self.outbox[w.uid]), len(self.inbox[w.uid]))
            while self.outbox[w.uid]:
                self.deliver_to_lead(w)
            while self.inbox[w.uid] and w.runs:
                self.deliver_to_worker(w)
            self.act(w)
            if before == (w.phase, len(self.outbox[w.uid]), len(self.inbox[w.uid])):
                return


def play(seed: int, actions: int = 60) -> World:
    """Random actions, mostly from a generation that trains, and then the end.

    Raises:
        Violation: with the seed.
    """
    rng = random.Random(seed)
    workers = rng.randint(1, 4)
    most = rng.choice([None, None, max(1, workers - 1)])
    least = rng.randint(1, most or workers)
    world = World(rng, workers, rng.randint(3, 15), min_workers=least, max_workers=most)
    faults = rng.choice([0.03, 0.08, 0.2])
    try:
        for _ in range(rng.choice([0, 3, 3, 4])):
            for worker in list(world.workers.values()):
                world.settle(worker)
        for _ in range(rng.randint(10, actions)):
            act(world, rng, faults)
        world.check_end()
    except Exception as error:
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}") from error
    return world


def act(world: World, rng: random.Random, faults: float) -> None:
    """One random action."""
    what = rng.random()
    workers = list(world.workers.values())
    if what < faults:
        _fault(world, rng.choice(workers), rng)
    elif what < faults + 0.05:
        world.tick()
    else:
        ready = [w for w in workers if w.runs or world.outbox[w.uid]]
        if ready:
            _advance(world, rng.choice(ready), rng)


def _advance(world: World, worker: Worker, rng: random.Random) -> None:
    """Connects a worker, delivers messages from it or to it, or lets it act."""
    is_cut = worker.runs and not worker.connected and not worker.is_deaf
    what = rng.random()
    if is_cut and worker.phase not in DONE and what < 0.3:
        world.connect(worker)
    elif world.outbox[worker.uid] and what < 0.5:
        for _ in range(rng.choice([1, 1, 3])):
            world.deliver_to_lead(worker)
    elif world.inbox[worker.uid] and what < 0.8:
        for _ in range(rng.choice([1, 1, 3])):
            world.deliver_to_worker(worker)
    else:
        world.act(worker)


def _fault(world: World, worker: Worker, rng: random.Random) -> None:
    kind = rng.randrange(7)
    if kind < 5:
        faults = (world.kill, world.stop, world.resume, world.cut, world.cut_unnoticed)
        faults[kind](worker)
    elif kind == 5:
        world.start(rng.randrange(world.settings.workers))
    else:
        for _ in range(rng.randint(1, 12)):
            world.tick()
