"""A worker without others, such as one that trains before it joins them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_strategies.lead.client_state import GroupListener, JoinedGeneration, Loss


class AloneClient:
    """As `LeadClient`, for a group of one worker.

    Args:
        index: int, its number in the cluster.
        host: str, its address.
        pid: int, its process.
        timeout: float, seconds.
        patience: float, seconds.
    """

    end: tuple[str, Loss | None] | None = None

    def __init__(
        self, index: int, host: str, pid: int, timeout: float, patience: float
    ):
        self.index, self.timeout, self.patience = index, timeout, patience
        self.progress = self.run_id = ""
        self.step: int | None = None
        self.listener = GroupListener()
        self.times_of: dict[int, tuple[float, ...]] = {}
        self.generation = JoinedGeneration(
            0, None, 0, (index,), (host,), (pid,), (), (), (), ""
        )

    def offer(self, what: str, value: str, stream: str = "") -> tuple[str, int, int]:
        self._value = value
        return stream, 0, 0

    def compared(
        self,
        offered: tuple[str, int, int],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[tuple[str, tuple[int, ...]]]:
        return [(self._value, (0,))]

    def begin_step(self) -> bool:
        return True

    def check(self) -> None:
        pass

    def saved(self, name: str, error: str = "") -> None:
        pass

    def wait_saved(self, name: str, *, again: bool = False) -> None:
        pass

    def await_lease(self) -> None:
        pass

    def request_stop(self) -> None:
        pass

    def resume_steps(self) -> None:
        pass

    def report_failure(self, how: str, call: int) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {"workers": []}

    def leave(self, *, is_complete: bool = True, how: str = "") -> None:
        pass
