"""`coordinator.status()`: processes, steps and traffic, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from keras_strategies.parameter_server.coordinator.scheduler import Scheduler
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.text_tables import (
    ShownAsTable,
    Table,
    counted,
    readable_bytes,
    readable_count,
)

_HEADER = (
    "task",
    "state",
    "steps",
    "ms per step",
    "sent",
    "received",
    "restarts",
    "staleness",
    "variables",
    "memory",
    "device",
)
_NUMBERS = frozenset(_HEADER[2:-1])


@dataclass(frozen=True, repr=False)
class Status(ShownAsTable):
    """Status of a cluster; prints as text, and as a table in a notebook.

    Args:
        rows: tuple of tuples of str, a row for each worker and server.
        queued: int, functions that wait for a worker.
        under_way: int, running functions.
        steps: int, finished steps.
        max_staleness: int or None, the strategy's.
        bytes_per_step: float, bytes between workers and servers per step.
        staleness: float, mean number of updates that a step has missed.
        most_staleness: int, maximum number of updates that a step has missed.
        held_bytes: tuple of int, bytes of variables on each server.
        resident_bytes: tuple of int, bytes of each server's process in memory.
    """

    rows: tuple[tuple[str, ...], ...]
    queued: int
    under_way: int
    steps: int
    max_staleness: int | None
    bytes_per_step: float
    staleness: float = 0.0
    most_staleness: int = 0
    held_bytes: tuple[int, ...] = ()
    resident_bytes: tuple[int, ...] = ()

    @property
    def workers_alive(self) -> int:
        """int, number of live workers."""
        return sum(
            row[0].startswith("worker") and row[1] == "alive" for row in self.rows
        )

    def _table(self) -> Table:
        servers = len(self.held_bytes)
        title = (
            f"ParameterServerStrategy: {counted(len(self.rows) - servers, 'worker')}, "
            f"{counted(servers, 'parameter server')}"
        )
        bound = "no bound" if self.max_staleness is None else f"<= {self.max_staleness}"
        facts = (
            (
                "steps",
                f"{readable_count(self.steps)} done, {self.under_way} under way, "
                f"{readable_count(self.queued)} queued",
            ),
            (
                "staleness",
                f"{self.staleness:.1f} updates on average, {self.most_staleness} at "
                f"most ({bound})",
            ),
            ("sent and received per step", readable_bytes(self.bytes_per_step)),
        )
        return Table(title, _HEADER, self.rows, _NUMBERS, facts=facts)


def status_of(scheduler: Scheduler, registry: VariableRegistry) -> Status:
    """The current status of a cluster.

    Args:
        scheduler: has the states of workers and servers.
        registry: has the sizes of variables.
    """
    rows = []
    sent = received = missed = most = 0
    held = registry.bytes_per_server()
    with scheduler.condition:
        for worker in scheduler.workers.values():
            sent += worker.sent_bytes
            received += worker.received_bytes
            missed += worker.staleness
            most = max(most, worker.most_staleness)
            stale = worker.staleness / worker.steps if worker.steps else 0.0
            each = 1000 * worker.seconds / worker.steps if worker.steps else 0.0
            state = "given up" if worker.is_abandoned else "starting"
            rows.append(
                (
                    f"worker {worker.index}",
                    "alive" if worker.is_alive else state,
                    str(worker.steps),
                    f"{each:.1f}",
                    readable_bytes(worker.sent_bytes),
                    readable_bytes(worker.received_bytes),
                    str(worker.deaths),
                    f"{stale:.1f}",
                    "",
                    "",
                    worker.device,
                )
            )
        for server in scheduler.servers.values():
            rows.append(
                (
                    f"ps {server.index}",
                    "alive" if server.is_ready else "starting",
                    "",
                    "",
                    "",
                    "",
                    str(server.deaths),
                    "",
                    readable_bytes(held[server.index]),
                    readable_bytes(server.resident_bytes),
                    "cpu:0",
                )
            )
        steps = scheduler.done_steps
        return Status(
            tuple(rows),
            len(scheduler.tasks.waiting),
            sum(len(w.in_flight) for w in scheduler.workers.values()),
            steps,
            scheduler.max_staleness,
            (sent + received) / steps if steps else 0.0,
            missed / steps if steps else 0.0,
            most,
            tuple(held),
            tuple(server.resident_bytes for server in scheduler.servers.values()),
        )
