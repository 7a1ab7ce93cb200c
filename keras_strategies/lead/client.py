"""A worker of a group that a lead decides about, as seen by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_strategies.errors import WorkerError
from keras_strategies.lead.client_state import (
    ClientState,
    GroupChanged,
    JoinedGeneration,
    Offered,
)
from keras_strategies.lead.files import WENT_ON


class LeadClient(ClientState):
    """A worker, as seen by itself: one connection, one thread.

    Args:
        addresses: hosts and ports, at one of which the lead listens.
        secret: bytes, the same in the lead.
        index: int, the number of this worker in the cluster.
        same: dict of values that must agree on all workers, by name.
        job: str, identifies the cluster among others at the same addresses.
        timeout: float, seconds to wait for the lead at the start.
        listener: `GroupListener`, for what happens to the group.
        settings: `Settings` that the lead takes from the first worker; None for its
            own.
        tls: a context with which the connection is encrypted; None without.

    Raises:
        ClusterError: if workers disagree, or two have one index.
        WorkerError: if there is no lead.

    Example:

    >>> client = LeadClient([address], secret, index)
    >>> while step < steps:
    ...     generation = client.next_generation(step if has_state else None)
    ...     try:
    ...         synchronize(generation)
    ...         client.confirm(generation.step)
    ...         while step < steps and client.begin_step():
    ...             step = train()
    ...     except GroupChanged:
    ...         continue
    >>> client.leave()
    """

    # Generations

    def next_generation(
        self,
        step: int | None,
        *,
        admits: bool = True,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> JoinedGeneration:
        """Waits for the next generation.

        Args:
            step: int, the last step that this worker has finished, with the state after
                it, which it keeps until `confirm`; None without a state.
            admits: bool, whether new workers can begin after `step`.
            meanwhile: called now and then in the wait, which it may end by an error.

        Returns:
            The generation; get the state of its chief if `is_behind`, then `confirm`.

        Raises:
            WorkerError: if training cannot continue.
            TrainingEnded: if the others have finished.
        """
        with self._changed:
            before = self._generation
            self.step = step = step if self._has_state else None
            body = {"step": step, "is_planned": self._is_planned, "admits": admits}
            self._is_going, self._is_planned = False, False
            self._how, self._loss = "this worker has left it", None
            self._call = ("ready", body)
            self._connection.send(*self._call)
            self._wait(lambda: self._generation is not before, meanwhile=meanwhile)
            self._call = None
            return self.generation

    def confirm(self, step: int | None) -> None:
        """Tells that this worker has the state after `step`; waits for the others.

        Raises:
            GroupChanged: if a worker was lost meanwhile.
        """
        with self._changed:
            self._send_in_generation("holds", {"step": step or 0})
            # If it has begun and ended, this worker has the state, as the others.
            self._wait(lambda: self._is_going, in_generation=True, is_answer=True)
            self.step = step or 0

    def begin_step(self) -> bool:
        """Requests permission for another step.

        Returns:
            False, after the same step on all workers, to call `next_generation`.

        Raises:
            GroupChanged: if a worker is lost.
        """
        with self._changed:
            self._wait(self._may_decide, in_generation=True)
            if self._last_step is not None and self._begun >= self._last_step:
                self._is_planned = True
                return False
            self._begun += 1
            return True

    def await_lease(self) -> None:
        """Waits until this worker is known not to be given up.

        Raises:
            GroupChanged: if the generation has ended.
        """
        with self._changed:
            self._wait(self._connection.has_lease, in_generation=True)

    def _may_decide(self) -> bool:
        is_deciding = self._is_pausing and self._last_step is None
        return self._connection.has_lease() and not is_deciding

    def resume_steps(self) -> None:
        """Clears the request to stop, and counts steps from 0 again."""
        with self._changed:
            self._is_pausing, self._last_step, self._begun = False, None, 0
            self._is_planned = False

    def check(self) -> None:
        """Raises `GroupChanged` if the generation has ended."""
        with self._changed:
            self._check(in_generation=True)

    def report_broken(self) -> None:
        """Tells that a collective has failed, which ends a generation that lost one."""
        self._connection.send("broken", {})

    def request_stop(self) -> None:
        """Asks all workers to stop after the same step; from any thread."""
        self._connection.send("stop", {})

    def report_failure(self, how: str, call: int) -> None:
        """Reports the error by which this worker leaves a call to the others."""
        body = {"how": how, "progress": self.progress, "call": call}
        self._connection.send("failed", body)

    def report_absence(self, why: str) -> None:
        """Ends the wait for a worker that cannot come."""
        self._connection.send("absent", {"why": why})

    def report_snapshot(self, step: int, path: str) -> None:
        """Tells of a snapshot of the state after `step`."""
        self._connection.send("snapshot", {"step": step, "path": path})

    def status(self) -> dict[str, Any]:
        """The table of all workers: steps, progress, times, seconds of silence."""
        with self._changed:
            self._status = {}
            self._connection.send("askstatus", {})
            self._wait(lambda: bool(self._status))
            return self._status

    def leave(self, *, is_complete: bool = True, how: str = "") -> None:
        """Leaves the group; `is_complete` unless the script has failed."""
        with self._changed:
            if self._has_left:
                return
            self._call = ("bye", {"is_complete": is_complete, "how": how})
            self._connection.send(*self._call)
            limit = min(self.timeout, 5.0)
            self._changed.wait_for(lambda: self._has_left or self._error, limit)
            self._has_left = True
        self._connection.close()

    def abandon(self) -> None:
        """Ends the connection at once, as the end of this process does."""
        self._has_left = True
        self._connection.close()

    # Comparisons and files

    def offer(self, what: str, value: str, stream: str = "") -> Offered:
        """Sends a value to the others without waiting; the result is for `compared`."""
        with self._changed:
            self._check(in_generation=True)
            number = self._numbers.get(stream, 0)
            self._numbers[stream] = number + 1
            offered = Offered((stream, number), self.generation.number)
            self._offered[offered.key] = offered
            body = {"stream": stream, "number": number, "what": what, "value": value}
            self._send_in_generation("arrived", body | {"progress": self.progress})
            return offered

    def compared(
        self,
        offered: Offered,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[tuple[str, tuple[int, ...]]]:
        """The different values of an `offer`, with the ranks that have them.

        Args:
            offered: the result of `offer`.
            meanwhile: called now and then in the wait, which it may end by an error.

        Raises:
            GroupChanged: if a worker is lost.
            WorkerError: if workers compare different things, or some do not arrive.
        """

        def check() -> None:
            if self.generation.number != offered.generation:
                raise GroupChanged("the workers form another group")
            meanwhile()

        with self._changed:
            check()
            self._wait(lambda: bool(offered.answer), True, check, is_answer=True)
            rank, members = self.generation.rank, self.generation.members
        if "error" in offered.answer:
            raise WorkerError(offered.answer["error"])
        different, count = offered.answer["values"], len(members)
        found = [(what, v, _ranks(ranks, count)) for what, v, ranks in different]
        own = next(what for what, _, ranks in found if rank in ranks)
        for what, _, ranks in found:
            if what != own:
                raise WorkerError(
                    f"Worker {self.index} is at {own!r} but worker {members[ranks[0]]} "
                    f"is at {what!r}. All workers must make the same calls in the same "
                    "order; check for branches that depend on the worker's index or "
                    "its data."
                )
        return [(value, ranks) for _, value, ranks in found]

    def saved(self, name: str, error: str = "") -> None:
        """Ends the waits for a file; called by the chief."""
        with self._changed:
            body = {"position": self._numbers.get("", 0), "name": name}
            self._send_in_generation("saved", {**body, "error": error})

    def wait_saved(self, name: str, *, again: bool = False) -> None:
        """Waits until the chief has saved a file.

        Args:
            name: str.
            again: bool, whether the chief may have it from an earlier generation.

        Raises:
            GroupChanged: if a worker is lost.
            WorkerError: if the chief fails, or does not make the call.
        """
        with self._changed:
            position = self._numbers.get("", 0)
            if self._saves[0] != position:
                self._saves = (position, [])
            names = self._saves[1]
            names.append(name)
            key = (position, len(names))
            body = {"position": position, "name": name, "calls": len(names)}
            self._send_in_generation("awaitsfile", {**body, "same": names.count(name)})
            self._wait(lambda: key in self._files, True, is_answer=True)
            error = self._files.pop(key)
        if error and not (again and error == WENT_ON):
            raise WorkerError(
                f"Worker {self.index} waited for the chief, worker "
                f"{self.generation.members[0]}, which saves {name!r} for all workers: "
                f"{error}."
            )


def _ranks(bits: str, count: int) -> tuple[int, ...]:
    """Ranks from the bits of a number; all of them if it is empty."""
    number = int(bits, 16) if bits else -1
    return tuple(rank for rank in range(count) if number >> rank & 1)
