"""Generations of an elastic group of workers.

A generation is a `WorkerGroup` of fixed members. When a worker is lost or a new one
waits, the lead ends the generation and begins the next one (`lead/`), in the same
processes. The chief is the first worker of a generation, which has the state of
training.
"""

from __future__ import annotations

import time
from typing import Any

from keras_strategies.cluster.group.alone import AloneClient
from keras_strategies.cluster.group.lead_start import connected, reap
from keras_strategies.cluster.group.worker_group import WorkerGroup
from keras_strategies.errors import ClusterError, WorkerError
from keras_strategies.lead.client import LeadClient
from keras_strategies.lead.client_state import (
    GroupListener,
    JoinedGeneration,
)
from keras_strategies.lead.state import Settings
from keras_strategies.types import Elastic

# Seconds within which the loss behind a failed collective is reported.
_LOSS_SECONDS = 2.0
_TICK = 0.05


def elastic_settings(
    elastic: Elastic, addresses: list[str], timeout: float
) -> Settings:
    """The settings of an elastic group.

    Args:
        elastic: `Elastic`.
        addresses: list of str, the workers of the cluster.
        timeout: float, seconds without a heartbeat until a worker is lost.

    Raises:
        ClusterError: if the cluster has fewer than `min_workers`.
    """
    if elastic.min_workers > len(addresses):
        raise ClusterError(
            f"`Elastic(min_workers={elastic.min_workers})` needs more workers than the "
            f"cluster describes: {len(addresses)}. Add workers, or lower "
            "`min_workers`."
        )
    return Settings(
        len(addresses),
        elastic.min_workers,
        elastic.max_workers,
        elastic.rejoin,
        timeout=timeout,
        patience=elastic.timeout_seconds,
        addresses=tuple(addresses),
    )


class Membership:
    """An elastic group of workers, as seen by one of them.

    Forms the first generation with the other workers, or joins a running one. `reform`
    and the steps of `group` are for one thread.

    Args:
        settings: `Settings` of the group.
        index: int, the number of this worker.
        same: dict of values that must agree on all workers, by name.
        job: str, identifies this cluster among others at the same addresses; None to
            use the addresses.
        is_ready: bool, whether this worker can join a group that trains without it.

    Raises:
        ClusterError: if worker 0 cannot listen at its address, two workers have one
            index, or workers disagree.
        WorkerError: if fewer than `min_workers` connect in time.

    Example:

    >>> membership = Membership(elastic_settings(elastic, addresses, 10.0), index)
    >>> try:
    ...     may_begin = membership.group.begin_step()
    ...     if may_begin:
    ...         train()
    ...         step += 1
    ... except WorkerError:
    ...     may_begin = False
    >>> if not may_begin:
    ...     generation = membership.reform(step)
    ...     synchronize(generation)
    ...     membership.confirm()
    """

    def __init__(
        self,
        settings: Settings,
        index: int,
        same: dict[str, Any] | None = None,
        job: str | None = None,
        *,
        is_ready: bool = True,
    ):
        self.settings, self._index = settings, index
        #: The connection to the lead.
        self.client: LeadClient = connected(
            settings, index, same or {}, job, GroupListener()
        )
        self._group: WorkerGroup | None = None
        self._generation: JoinedGeneration | None = None
        if self.client.is_running and not is_ready:
            self.begin_alone()
            return
        try:
            while self.reform(None).step is None:
                # All workers begin with the chief's weights.
                if self._has_confirmed():
                    break
        except BaseException:
            self.leave()
            raise

    @property
    def group(self) -> WorkerGroup:
        """The group of this generation."""
        assert self._group is not None
        return self._group

    @property
    def generation(self) -> JoinedGeneration:
        """The current generation."""
        assert self._generation is not None
        return self._generation

    @property
    def is_member(self) -> bool:
        """bool, whether this worker is in the group of the others."""
        return self._generation is not None

    def begin_alone(self) -> None:
        """Begins a group of this worker, while the others train without it."""
        alone = AloneClient(self._index, self.client.own_host, self.settings)
        self._group, self._generation = WorkerGroup.over(alone), None

    def is_broken(self) -> bool:
        """Whether a worker is lost, after a call has raised `WorkerError`.

        A worker that has reported its failure is lost when its process ends.
        """
        if self._generation is None:
            return False
        until = time.monotonic() + _LOSS_SECONDS
        failed_until = time.monotonic() + self.settings.timeout
        self.client.report_broken()
        while True:
            try:
                self.group.check()
            except WorkerError:
                return True
            has_failed = self.group.loss() is not None
            if time.monotonic() > (failed_until if has_failed else until):
                return False
            time.sleep(_TICK)

    def reform(self, step: int | None, *, admits: bool = True) -> JoinedGeneration:
        """Leaves the generation, and waits for the next one.

        Args:
            step: int, the last step that this worker has finished, counted from the
                start of training; its state must be the one after this step. None
                without training state.
            admits: bool, whether new workers can begin after `step`; otherwise they
                wait for a later generation.

        Returns:
            A `JoinedGeneration`; the workers in `behind` need the state of the chief.
            Then call `confirm`.

        Raises:
            WorkerError: if training cannot continue: there are fewer than `min_workers`
                for too long, or no worker has the state.
        """
        if self._group is not None:
            self._group.close()
        found = self.client.next_generation(step, admits=admits)
        self._group, self._generation = WorkerGroup.over(self.client), found
        return found

    def confirm(self) -> None:
        """Tells that this worker has the state of the generation.

        Raises:
            WorkerError: if a worker was lost meanwhile.
        """
        self.client.confirm(self.generation.step)

    def _has_confirmed(self) -> bool:
        """Whether the first generation has begun; False if a worker was lost."""
        try:
            self.confirm()
        except WorkerError:
            if not self.is_broken():
                raise
            return False
        return True

    def leave(self, how: str = "") -> None:
        """Leaves the group; the others continue without this worker.

        Args:
            how: str, the reason, if its script has not come to its end.
        """
        if self._group is not None:
            self._group.close()
        self.client.leave(is_complete=not how, how=how)
        reap(0.5)
