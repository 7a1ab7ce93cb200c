"""`coordinator.status()`: who is alive and what has been done, as a table."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

_HEADER = (
    "task",
    "state",
    "steps",
    "ms per step",
    "sent",
    "received",
    "restarts",
    "staleness",
    "holds",
)


@dataclass(frozen=True)
class Status:
    """A cluster at one moment; prints as text, and as a table in a notebook.

    Args:
        rows: tuple of tuples of str, a row for each worker and server.
        queued: int, functions that wait for a worker.
        under_way: int, functions that are being run.
        steps: int, steps that are done.
        max_staleness: int or None, the strategy's.
        bytes_per_step: float, bytes between workers and servers, for each step.
        staleness: float, updates that a step has missed, on average.
        most_staleness: int, updates that a step has missed, at most.
        held_bytes: tuple of int, bytes of variables on each server.
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

    @property
    def workers_alive(self) -> int:
        """int, how many workers are alive."""
        return sum(
            row[0].startswith("worker") and row[1] == "alive" for row in self.rows
        )

    def _summary(self) -> str:
        bound = (
            "no bound"
            if self.max_staleness is None
            else f"at most {self.max_staleness}"
        )
        return (
            f"{self.steps} steps done, {self.under_way} under way, {self.queued} "
            f"queued; staleness {self.staleness:.1f}, highest {self.most_staleness} "
            f"({bound}); {readable(self.bytes_per_step)} per step"
        )

    def __str__(self) -> str:
        rows = [_HEADER, *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:], rule, self._summary()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(cells: tuple[str, ...], tag: str) -> str:
            inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{inner}</tr>"

        body = "".join(row(cells, "td") for cells in self.rows)
        return (
            f"<table><caption>{html.escape(self._summary())}</caption>"
            f"<thead>{row(_HEADER, 'th')}</thead><tbody>{body}</tbody></table>"
        )


def status_of(cluster: Any, strategy: Any) -> Status:
    """The status of a cluster now."""
    dispatcher = cluster.dispatcher
    rows = []
    sent = received = missed = most = 0
    held = strategy.registry.loads()
    with dispatcher.condition:
        for worker in dispatcher.workers.values():
            sent += worker.sent_bytes
            received += worker.received_bytes
            missed += worker.staleness
            most = max(most, worker.most_staleness)
            stale = worker.staleness / worker.steps if worker.steps else 0.0
            each = 1000 * worker.seconds / worker.steps if worker.steps else 0.0
            state = "given up" if worker.is_given_up else "starting"
            rows.append(
                (
                    f"worker {worker.index}",
                    "alive" if worker.is_alive else state,
                    str(worker.steps),
                    f"{each:.1f}",
                    readable(worker.sent_bytes),
                    readable(worker.received_bytes),
                    str(worker.deaths),
                    f"{stale:.1f}",
                    "",
                )
            )
        for server in dispatcher.servers.values():
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
                    readable(held[server.index]),
                )
            )
        steps = dispatcher.done_steps
        return Status(
            tuple(rows),
            len(dispatcher.queue),
            sum(len(w.in_flight) for w in dispatcher.workers.values()),
            steps,
            dispatcher.max_staleness,
            (sent + received) / steps if steps else 0.0,
            missed / steps if steps else 0.0,
            most,
            tuple(held),
        )


def readable(nbytes: float) -> str:
    """A size for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"
